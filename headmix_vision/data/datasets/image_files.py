"""Image files, with labels or, for prediction and for latents, without."""

import os
from collections.abc import Sequence
from pathlib import Path

from headmix_vision.console import say_left_out
from headmix_vision.data.datasets.base import Pictures, RawImage, relative_sizes
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import Decoding, find_pictures


class ImageFiles(Pictures):
    """Image files without targets.

    Args:
        paths: The files.
        decoding: The pixels that they become.
        folder: What the names of files are relative to; the folder that all are in when None.
    """

    def __init__(self, paths: Sequence[Path], decoding: Decoding, folder: Path | None = None) -> None:
        super().__init__(paths, [], decoding)
        self.folder = folder

    def read(self, index: int) -> tuple[RawImage, int]:
        """Image, and -1 for the target that it does not have."""
        return self.decoding.first_frame(self.data[index]), -1

    def files(self) -> list[tuple[str, int]]:
        """Name relative to the folder, and sizes."""
        return relative_sizes(self.data, self.folder or os.path.commonpath([path.parent for path in self.data]))

    def name(self, index: int) -> str:
        return str(self.data[index])


class LabelledFiles(ImageFiles):
    """Image files with a label each.

    Args:
        paths: The files.
        targets: The class of each file, a number.
        class_names: The names of all classes, in the order of their numbers.
        decoding: The pixels that they become.
        folder: What the names of files are relative to; the folder that all are in when None.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        targets: Sequence[int],
        class_names: list[str],
        decoding: Decoding,
        folder: Path | None = None,
    ) -> None:
        super().__init__(paths, decoding, folder)
        self.class_names = class_names
        self._targets = targets

    def read(self, index: int) -> tuple[RawImage, int]:
        """Image and target."""
        return super().read(index)[0], self._targets[index]

    def keys(self) -> list[str]:
        """Name relative to the folder, and labels."""
        start = len(str(self.folder or os.path.commonpath([path.parent for path in self.data])))
        return [f"{str(path)[start:]} {target}" for path, target in zip(self.data, self._targets, strict=True)]


def find_images(path: str, option: str) -> list[Path]:
    """Find an image file, or all image files below a folder, in sorted order; messages name the option.

    Raises:
        InputError: Nothing there, or no image in the folder.
    """
    if not path:
        raise InputError(f"{option} is '', it must be an image file or a folder")
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise InputError(f"{option} {path!r} is neither a file nor a folder")
    listing = find_pictures(root)
    listing.check_filled(f"{option} {path!r}", "image")
    say_left_out(root, len(listing.paths), "pictures", listing.left_out)
    return listing.paths
