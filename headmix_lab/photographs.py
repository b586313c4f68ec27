"""Pictures as files, and photographs that scikit-learn brings along."""

from pathlib import Path

import numpy as np
from PIL import Image

from headmix_vision.files.video import write_video
from headmix_vision.files.writing import atomic_path


def save_png(path: Path, picture: np.ndarray) -> None:
    """Write a picture, uint8 [H, W, 3], as a PNG file that is complete or absent."""
    with atomic_path(path) as temporary:
        Image.fromarray(picture).save(temporary, "png")


def save_picture(path: Path, picture: np.ndarray, frame_rate: float = 8.0) -> None:
    """Write a picture, uint8 [H, W, 3], as PNG, or a clip, uint8 [T, H, W, 3], as GIF; the path has no suffix."""
    if picture.ndim == 3:
        save_png(path.with_name(f"{path.name}.png"), picture)
    else:
        write_video(path.with_name(f"{path.name}.gif"), picture, frame_rate)


def write_photographs(folder: Path) -> None:
    """Write the photographs of scikit-learn, a temple and a flower, as PNG files."""
    from sklearn.datasets import load_sample_images

    found = load_sample_images()
    for name, pixels in zip(found.filenames, found.images, strict=True):
        save_png(folder / Path(name).with_suffix(".png").name, pixels)
