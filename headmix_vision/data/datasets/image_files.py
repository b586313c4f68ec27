"""Image files without labels, for prediction and for latents."""

import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from headmix_vision.data.datasets.base import Pictures, RawImage, relative_sizes, to_mode
from headmix_vision.errors import InputError


class ImageFiles(Pictures):
    """Image files without targets.

    Args:
        paths: The files.
        mode: PIL mode of the images, `L` or `RGB`.
    """

    def __init__(self, paths: Sequence[Path], mode: str) -> None:
        super().__init__(paths, [], mode)

    def read(self, index: int) -> tuple[RawImage, int]:
        """Image, and -1 for the target that it does not have."""
        with Image.open(self.data[index]) as image:
            return to_mode(image, self.mode), -1

    def files(self) -> list[tuple[str, int]]:
        """Names relative to the folder that all files are in, and sizes."""
        return relative_sizes(self.data, os.path.commonpath([path.parent for path in self.data]))

    def name(self, index: int) -> str:
        return str(self.data[index])


def find_images(path: str, option: str) -> list[Path]:
    """Find an image file, or all image files below a folder, in sorted order; messages name the option.

    Raises:
        InputError: Nothing there, or no image in the folder.
    """
    from timm.data.readers.img_extensions import get_img_extensions

    if not path:
        raise InputError(f"{option} is '', it must be an image file or a folder")
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise InputError(f"{option} {path!r} is neither a file nor a folder")
    extensions = get_img_extensions()
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in extensions and not file.is_dir())
    if not files:
        raise InputError(f"{option} {path!r} has no image ({', '.join(extensions)})")
    return files
