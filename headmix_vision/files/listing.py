"""List the pictures or clips below a folder, alike for every command.

Links are followed. A folder is not entered again from within itself, and a file that several links reach is listed
once, under its own name if that is below the folder too. Hidden files and folders are left out before anything else is
decided: names that begin with a dot, such as the `._*` beside each file that macOS copies, and `__MACOSX`. What is left
out is counted.
"""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headmix_vision.errors import InputError
from headmix_vision.files.pictures import is_clip, picture_suffixes
from headmix_vision.files.video import VIDEO_SUFFIXES

HIDDEN = "hidden"
"""Reason for which files are left out."""
_AGAIN, _SPECIAL, _BARE = "linked again", "no regular file", "without ending"
_MAX_DEPTH, _MAX_VISITS = 256, 1000
_SHOWN = 8  # kinds of files in a message


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is left out."""
    return name.startswith(".") or name == "__MACOSX"


def ending(name: str | os.PathLike[str]) -> str:
    """Ending of a file's name in small letters, with its dot."""
    return os.path.splitext(name)[1].lower()


def is_picture(name: str | os.PathLike[str]) -> bool:
    """Whether a file of this name is listed as a picture."""
    return ending(name) in picture_suffixes()


def is_video(name: str | os.PathLike[str]) -> bool:
    """Whether a file of this name is listed as a video."""
    return ending(name) in VIDEO_SUFFIXES


@dataclass
class Listing:
    """Contents of a folder.

    Args:
        paths: Pictures, or clips: video files, animated pictures, folders of frames.
        left_out: Number of other files by ending or reason.
    """

    paths: list[Path] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def check_filled(self, where: str, what: str) -> None:
        """Raise InputError for a folder without what is looked for, saying what it holds instead."""
        if not self.paths:
            others = f"; {describe_left_out(self.left_out)}" if self.left_out else ""
            raise InputError(f"{where} has no {what}{others}")


def describe_left_out(left_out: Counter[str]) -> str:
    """Write `3 other files left out: .txt 2, .xmp 1`."""
    kinds = sorted(left_out.items(), key=lambda kind: (-kind[1], kind[0]))
    shown = [f"{name} {count}" for name, count in kinds[:_SHOWN]]
    if kinds[_SHOWN:]:
        shown.append(f"{sum(count for _, count in kinds[_SHOWN:])} of other kinds")
    total = left_out.total()
    return f"{total} other file{'s' if total != 1 else ''} left out{': ' if shown else ''}{', '.join(shown)}"


class _File(NamedTuple):
    path: str
    place: str
    """Where it lies, all links resolved."""
    is_linked: bool
    """Whether a link leads to it."""


class _Folder(NamedTuple):
    path: str
    place: str
    is_linked: bool
    files: list[_File]


def find_pictures(folder: Path, group: Callable[[str], Hashable] = lambda path: None) -> Listing:
    """List the pictures below a folder in the order of their names.

    Args:
        folder: The folder.
        group: Takes a path; a file that several links reach is listed once in each group.

    Raises:
        OSError: A folder that cannot be read.
    """
    listing = Listing()
    found = [file for inner in _walk(folder, listing.left_out) for file in inner.files]
    pictures = [file for file in found if takes(is_picture, file.path, listing.left_out)]
    paths = _unique(pictures, lambda file: (group(file.path), file.place), listing.left_out)
    listing.paths = [Path(path) for path in sorted(paths, key=lambda path: path.split(os.sep))]
    return listing


def find_frames(folder: Path) -> list[Path]:
    """List the pictures of a folder of frames, without its sub-folders, in the order of their names."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if not is_hidden(e.name) and is_picture(e.name) and not e.is_dir()]
    return [folder / name for name in sorted(names)]


def find_clips(folder: Path) -> Listing:
    """List the clips below a folder: folder by folder, files before sub-folders, by name.

    In each folder these are its video files, or, where it has none, its pictures: each is a clip if the first one is
    animated, otherwise they are the frames of one clip, for which the folder stands.

    Raises:
        OSError: A folder that cannot be read.
    """
    listing = Listing()
    found: list[_File] = []
    for inner in _walk(folder, listing.left_out):
        videos = [file for file in inner.files if is_video(file.path)]
        if videos or not any(is_picture(file.path) for file in inner.files):
            found += [file for file in inner.files if takes(is_video, file.path, listing.left_out)]
            continue
        pictures = [file for file in inner.files if takes(is_picture, file.path, listing.left_out)]
        found += pictures if is_clip(pictures[0].path) else [_File(*inner[:3])]
    listing.paths = [Path(path) for path in _unique(found, lambda file: file.place, listing.left_out)]
    return listing


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[_Folder]:
    """Yield a folder and those below it with their files, in the order of names; count what is hidden or a loop."""
    yield from _enter(str(folder), os.path.realpath(folder), False, (), left_out, Counter())


def _enter(
    folder: str,
    place: str,
    is_linked: bool,
    around: tuple[str, ...],
    left_out: Counter[str],
    visits: Counter[str],
) -> Iterator[_Folder]:
    around = (*around, place)
    visits[place] += 1
    if len(around) > _MAX_DEPTH or visits[place] > _MAX_VISITS:
        what = f"lies more than {_MAX_DEPTH} folders deep"
        raise InputError(f"{folder} {what if visits[place] <= _MAX_VISITS else f'is linked {_MAX_VISITS} times'}")
    files: list[_File] = []
    folders: list[_File] = []
    with os.scandir(folder) as opened:
        entries = sorted(opened, key=lambda entry: entry.name)
    for entry in entries:
        is_link = entry.is_symlink()
        real = os.path.realpath(entry.path) if is_link else os.path.join(place, entry.name)
        found = _File(os.path.join(folder, entry.name), real, is_linked or is_link)
        if is_hidden(entry.name):
            left_out[HIDDEN] += 1
        elif entry.is_dir():
            folders.append(found)
        elif is_link or entry.is_file():  # a link to nothing is a file that cannot be read
            files.append(found)
        else:
            left_out[_SPECIAL] += 1
    yield _Folder(folder, place, is_linked, files)
    for inner in folders:
        if inner.place in around:
            left_out[_AGAIN] += 1
        else:
            yield from _enter(*inner, around, left_out, visits)


def takes(belongs: Callable[[str], bool], name: str, left_out: Counter[str]) -> bool:
    """Tell whether a file of this name belongs to a listing; count it otherwise."""
    if belongs(name):
        return True
    left_out[ending(name) or _BARE] += 1
    return False


def _unique(files: list[_File], key: Callable[[_File], Hashable], left_out: Counter[str]) -> list[str]:
    """Keep one path to each file, in their order: its own rather than a link's; count the others."""
    best: dict[Hashable, _File] = {}
    for file in files:
        known = best.setdefault(key(file), file)
        if known.is_linked and not file.is_linked:
            best[key(file)] = file
    if len(best) < len(files):
        left_out[_AGAIN] += len(files) - len(best)
    kept = set(map(id, best.values()))
    return [file.path for file in files if id(file) in kept]
