"""Image files, and `folder`: a directory or tar file per split, with a directory of images per class."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from timm.utils.misc import natural_key

from headmix_vision.console import say_left_out
from headmix_vision.data.datasets.base import (
    EVAL_SYNONYMS,
    TRAIN_SYNONYMS,
    AbsentSplitError,
    Pictures,
    RawImage,
    Source,
    SplitRequest,
    relative_sizes,
)
from headmix_vision.data.labels import Labels, fault_of, number_labels
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import (
    HIDDEN,
    Decoding,
    Listing,
    describe_left_out,
    ending,
    find_pictures,
    is_hidden,
    is_picture,
    takes,
)
from headmix_vision.files.tars import Member, list_members


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


def open_folder(request: SplitRequest) -> Source:
    """Open a split of a folder.

    Its root is a directory with one sub-directory or tar file per split, or one tar file of that; `train`,
    `validation` and their synonyms are interchangeable. Where no labels are needed, a root without the training split
    is that split itself.

    Raises:
        InputError: Nothing there, an empty class folder, or images outside of a class folder.
    """
    root = request.existing_root()
    if request.split in ("", ".", ".."):
        raise InputError(f"split is {request.split!r}, it must be the name of a folder or tar file in {str(root)!r}")
    names = split_candidates(request.split)
    if root.is_file():
        if ending(root) != ".tar":
            raise InputError(f"root {str(root)!r} is a file, it must be a directory or a .tar")
        return _open_tar(root, request, names)
    for name in names:
        if (root / name).is_dir():
            return open_class_folders(root / name, request)
        if (root / f"{name}.tar").is_file():
            return _open_tar(root / f"{name}.tar", request)
    if request.split == request.train_split and not request.needs_labels:
        return open_class_folders(root, request)
    looked_for = ", ".join(f"{name}/" for name in names)
    message = f"root {str(root)!r} has no {request.split} split: looked for {looked_for} and the same with .tar"
    if request.split == request.train_split and any(path.is_dir() for path in root.iterdir()):
        message += f". If {str(root)!r} holds the folders of the classes, move them into {root / names[0]}"
    raise AbsentSplitError(message)


def split_candidates(split: str) -> tuple[str, ...]:
    """Directory names that may hold a split: its own and timm's synonyms."""
    synonyms = next((group for group in (TRAIN_SYNONYMS, EVAL_SYNONYMS) if split in group), ())
    return tuple(dict.fromkeys((split, *synonyms)))


def find_class_folders(folder: Path) -> Listing:
    """List the pictures of class folders; one that several links reach counts once in each class."""
    return find_pictures(folder, group=_class_of)


def open_class_folders(folder: Path, request: SplitRequest, listing: Listing | None = None) -> Source:
    """Open a directory with one sub-directory of images per class, numbered and sorted as timm does.

    Args:
        folder: The directory.
        request: What is asked for.
        listing: Its pictures, where they are known.

    Raises:
        InputError: Images outside of a class folder, unless they are to be skipped, or an empty class folder.
    """
    listing = find_class_folders(folder) if listing is None else listing
    listing.check_filled(f"{str(folder)!r}", "image")
    # timm forgets a class without images, which would shift all later class indices
    paths = sorted(listing.paths, key=lambda path: natural_key(str(path)))
    texts = list(map(str, paths))
    start = len(str(folder / "x")) - 1
    filled = {text[start:].partition(os.sep)[0] for text in texts}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir() and not is_hidden(entry.name) and entry.name not in filled:
            raise InputError(f"class folder {entry.path!r} has no image")
    say_left_out(folder, len(listing.paths), "pictures", listing.left_out)
    labels = [_class_of(text) if os.sep in text[start:] else "" for text in texts]
    kept, targets, names = _number(labels, texts.__getitem__, folder, request)
    return LabelledFiles([paths[number] for number in kept], targets, names, request.decoding, folder)


def _number(labels: list[str], name: Callable[[int], str], place: Path, request: SplitRequest) -> Labels:
    """Number the classes of pictures by the names of their folders; those outside of one have no label."""
    classes = sorted((label for label in {*labels} if not fault_of(label)), key=natural_key)
    return number_labels(labels, name, place, request.label_rule, class_names=classes)


def _class_of(path: str) -> str:
    """Label of a picture: the innermost folder that it is in."""
    return os.path.basename(os.path.dirname(path))


def _open_tar(path: Path, request: SplitRequest, splits: tuple[str, ...] = ()) -> "TarImages":
    pictures: list[Member] = []
    left_out: Counter[str] = Counter()
    for member in list_members(path, nested=True):
        if member.is_hidden:
            left_out[HIDDEN] += 1
        elif takes(is_picture, member.name, left_out):
            pictures.append(member)
    if not pictures:
        raise InputError(f"{str(path)!r} has no image; {describe_left_out(left_out)}")
    say_left_out(path, len(pictures), "pictures", left_out)
    names = {_class_in_tar(member) for member in pictures} - {""}
    if splits:
        folders = [PurePosixPath(member.name).parts[:-2] for member in pictures]
        split = next((name for name in splits if any(name in parts for parts in folders)), None)
        if split is None:
            raise InputError(f"{str(path)!r} has none of the folders {', '.join(f'{name}/' for name in splits)}")
        pictures = [member for member, parts in zip(pictures, folders, strict=True) if split in parts]
    missing = sorted(names - {_class_in_tar(member) for member in pictures}, key=natural_key)
    if missing:
        raise InputError(f"class {missing[0]!r} has no image in {str(path)!r} {'/'.join(splits[:1])}".rstrip())
    pictures.sort(key=lambda member: natural_key(member.name))
    labels = [_class_in_tar(member) for member in pictures]
    kept, targets, class_names = _number(labels, lambda number: f"{path}: {pictures[number].name}", path, request)
    return TarImages(path, [pictures[number] for number in kept], targets, class_names, request.decoding)


def _class_in_tar(member: Member) -> str:
    """Label of a picture: the innermost folder that it is in, or the tar file within the tar file."""
    return PurePosixPath(os.path.splitext(member.archive)[0], member.name).parent.name


class TarImages(Pictures):
    """Images in a tar file, or in tar files within it, labelled by their folder.

    Args:
        path: The tar file.
        members: The images.
        targets: The class of each, a number.
        class_names: One name per label.
        decoding: The pixels that they become.
    """

    data: list[Member]

    def __init__(
        self, path: Path, members: list[Member], targets: list[int], class_names: list[str], decoding: Decoding
    ) -> None:
        super().__init__(members, class_names, decoding)
        self.path, self._targets = path, targets

    def read(self, index: int) -> tuple[RawImage, int]:
        with self.path.open("rb") as file:
            data = self.data[index].read(file)
        return self.decoding.first_frame(data), self._targets[index]

    def files(self) -> list[tuple[str, int]]:
        """Names and sizes of the members."""
        return [(member.name, member.size) for member in self.data]

    def keys(self) -> list[str]:
        """Names and sizes of the members, and labels."""
        return [f"{m.name} {m.size} {target}" for m, target in zip(self.data, self._targets, strict=True)]

    def name(self, index: int) -> str:
        return f"{self.path}: {self.data[index].name}"
