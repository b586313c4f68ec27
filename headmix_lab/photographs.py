"""Pictures as files, and photographs that scikit-learn brings along."""

from pathlib import Path

import numpy as np
from PIL import Image

from headmix_vision.files.writing import atomic_path


def save_png(path: Path, picture: np.ndarray) -> None:
    """Write a picture, uint8 [H, W, 3], as a PNG file that is complete or absent."""
    with atomic_path(path) as temporary:
        Image.fromarray(picture).save(temporary, "png")


def write_photographs(folder: Path) -> None:
    """Write the photographs of scikit-learn, a temple and a flower, as PNG files."""
    from sklearn.datasets import load_sample_images

    found = load_sample_images()
    for name, pixels in zip(found.filenames, found.images, strict=True):
        save_png(folder / Path(name).with_suffix(".png").name, pixels)
