"""Image files without labels, for prediction and for latents."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from headmix_vision.data.datasets.base import Pictures, RawImage
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
            return image.convert(self.mode), -1

    def name(self, index: int) -> str:
        return str(self.data[index])


def find_images(path: str, option: str) -> list[Path]:
    """Find an image file, or all image files below a folder, in sorted order; messages name the option.

    Raises:
        InputError: Nothing there, or no image in the folder.
    """
    from timm.data.readers.img_extensions import get_img_extensions

    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise InputError(f"{option} {path!r} is neither a file nor a folder")
    extensions = get_img_extensions()
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in extensions and file.is_file())
    if not files:
        raise InputError(f"{option} {path!r} has no image ({', '.join(extensions)})")
    return files
