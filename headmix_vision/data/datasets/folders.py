"""`folder`: a directory or tar file per split, with a directory of images per class."""

import os
from collections import Counter
from pathlib import Path, PurePosixPath

from timm.utils.misc import natural_key

from headmix_vision.console.notes import say_left_out
from headmix_vision.data.datasets.base import (
    EVAL_SYNONYMS,
    TRAIN_SYNONYMS,
    Pictures,
    RawImage,
    Source,
    SplitRequest,
)
from headmix_vision.data.datasets.image_files import LabelledFiles
from headmix_vision.errors import InputError
from headmix_vision.files.listing import HIDDEN, describe_left_out, ending, find_pictures, is_hidden, is_picture, takes
from headmix_vision.files.pictures import Decoding
from headmix_vision.files.tars import Member, list_members


def open_folder(request: SplitRequest) -> Source:
    """Open a split of a folder.

    Its root is a directory with one sub-directory or tar file per split, or one tar file of that; `train`,
    `validation` and their synonyms are interchangeable.

    Raises:
        InputError: Nothing there, an empty class folder, or images outside of a class folder.
    """
    root, decoding = request.existing_root(), request.decoding
    if request.split in ("", ".", ".."):
        raise InputError(f"split is {request.split!r}, it must be the name of a folder or tar file in {str(root)!r}")
    names = split_candidates(request.split)
    if root.is_file():
        if ending(root) != ".tar":
            raise InputError(f"root {str(root)!r} is a file, it must be a directory or a .tar")
        return _open_tar(root, decoding, names)
    for name in names:
        if (root / name).is_dir():
            return open_class_folders(root / name, decoding)
        if (root / f"{name}.tar").is_file():
            return _open_tar(root / f"{name}.tar", decoding)
    looked_for = ", ".join(f"{name}/" for name in names)
    raise InputError(f"root {str(root)!r} has no {request.split} split: looked for {looked_for} and the same with .tar")


def split_candidates(split: str) -> tuple[str, ...]:
    """Directory names that may hold a split: its own and timm's synonyms."""
    synonyms = next((group for group in (TRAIN_SYNONYMS, EVAL_SYNONYMS) if split in group), ())
    return tuple(dict.fromkeys((split, *synonyms)))


def open_class_folders(folder: Path, decoding: Decoding) -> Source:
    """Open a directory with one sub-directory of images per class, numbered and sorted as timm does.

    Raises:
        InputError: Images outside of a class folder, or an empty one.
    """
    listing = find_pictures(folder, group=_class_of)
    listing.check_filled(f"{str(folder)!r}", "image")
    stray = next((path for path in listing.paths if path.parent == folder), None)
    if stray is not None:
        raise InputError(f"{str(folder)!r} has images outside of a class folder, for example {stray.name!r}")
    # timm forgets a class without images, which would shift all later class indices
    filled = {path.relative_to(folder).parts[0] for path in listing.paths}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir() and not is_hidden(entry.name) and entry.name not in filled:
            raise InputError(f"class folder {entry.path!r} has no image")
    say_left_out(folder, len(listing.paths), "pictures", listing.left_out)
    paths = sorted(listing.paths, key=lambda path: natural_key(str(path)))
    labels = [_class_of(path) for path in paths]
    return LabelledFiles(paths, labels, sorted({*labels}, key=natural_key), decoding, folder)


def _class_of(path: Path) -> str:
    """Label of a picture: the innermost folder that it is in."""
    return path.parent.name


def _open_tar(path: Path, decoding: Decoding, splits: tuple[str, ...] = ()) -> "TarImages":
    pictures: list[Member] = []
    left_out: Counter[str] = Counter()
    for member in list_members(path, nested=True):
        if member.is_hidden:
            left_out[HIDDEN] += 1
        elif takes(is_picture, member.name, left_out):
            pictures.append(member)
    if not pictures:
        raise InputError(f"{str(path)!r} has no image; {describe_left_out(left_out)}")
    stray = next((member for member in pictures if not _class_in_tar(member)), None)
    if stray is not None:
        raise InputError(f"{str(path)!r} has images outside of a class folder, for example {stray.name!r}")
    say_left_out(path, len(pictures), "pictures", left_out)
    names = sorted({_class_in_tar(member) for member in pictures}, key=natural_key)
    if splits:
        folders = [PurePosixPath(member.name).parts[:-2] for member in pictures]
        split = next((name for name in splits if any(name in parts for parts in folders)), None)
        if split is None:
            raise InputError(f"{str(path)!r} has none of the folders {', '.join(f'{name}/' for name in splits)}")
        pictures = [member for member, parts in zip(pictures, folders, strict=True) if split in parts]
    missing = sorted({*names} - {_class_in_tar(member) for member in pictures}, key=natural_key)
    if missing:
        raise InputError(f"class {missing[0]!r} has no image in {str(path)!r} {'/'.join(splits[:1])}".rstrip())
    return TarImages(path, sorted(pictures, key=lambda member: natural_key(member.name)), names, decoding)


def _class_in_tar(member: Member) -> str:
    """Label of a picture: the innermost folder that it is in, or the tar file within the tar file."""
    return PurePosixPath(os.path.splitext(member.archive)[0], member.name).parent.name


class TarImages(Pictures):
    """Images in a tar file, or in tar files within it, labelled by their folder.

    Args:
        path: The tar file.
        members: The images.
        class_names: One name per label.
        decoding: The pixels that they become.
    """

    data: list[Member]

    def __init__(self, path: Path, members: list[Member], class_names: list[str], decoding: Decoding) -> None:
        super().__init__(members, class_names, decoding)
        self.path = path
        numbers = {name: number for number, name in enumerate(class_names)}
        self._targets = [numbers[_class_in_tar(member)] for member in members]

    def read(self, index: int) -> tuple[RawImage, int]:
        with self.path.open("rb") as file:
            data = self.data[index].read(file)
        return self.decoding.first_frame(data), self._targets[index]

    def files(self) -> list[tuple[str, int]]:
        """Names and sizes of the members."""
        return [(member.name, member.size) for member in self.data]

    def name(self, index: int) -> str:
        return f"{self.path}: {self.data[index].name}"
