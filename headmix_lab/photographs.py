"""Photographs that scikit-learn brings along."""

from pathlib import Path

from PIL import Image


def write_photographs(folder: Path) -> None:
    """Write the photographs of scikit-learn as files."""
    from sklearn.datasets import load_sample_images

    folder.mkdir(parents=True, exist_ok=True)
    found = load_sample_images()
    for name, pixels in zip(found.filenames, found.images, strict=True):
        Image.fromarray(pixels).save(folder / Path(name).with_suffix(".png").name)
