"""Files that hold clips: videos, animated PNGs, and folders of frames, whose pictures are one clip sorted by name.

H and W pixels.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from headmix_vision.data.datasets.base import check_depth, readable
from headmix_vision.errors import InputError, explain
from headmix_vision.files.png import read_item
from headmix_vision.files.video import VIDEO_SUFFIXES, probe, read_frames

Frames = list[Image.Image]


@dataclass(frozen=True)
class ClipInfo:
    """What is known of a clip before it is read: its frames, H and W, and frames a second, None where nobody says."""

    num_frames: int
    size: tuple[int, int]
    frame_rate: float | None = None


def find_clips(path: Path) -> Iterator[Path]:
    """Finds the clips below a folder: files, and folders whose pictures are single frames."""
    for folder, inner, names in os.walk(path, followlinks=True):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if _is_file(name, VIDEO_SUFFIXES))
        pictures = _pictures(Path(folder))
        if pictures:
            yield from pictures if _is_clip(pictures[0]) else [Path(folder)]


def _pictures(folder: Path) -> list[Path]:
    from timm.data.readers.img_extensions import get_img_extensions

    return sorted(path for path in folder.iterdir() if _is_file(path.name, get_img_extensions()) and not path.is_dir())


def _is_file(name: str, suffixes: Collection[str]) -> bool:
    return Path(name).suffix.lower() in suffixes and not name.startswith(".")


def _is_clip(path: Path) -> bool:
    with readable(path), Image.open(path) as image:
        return isinstance(read_item(image), list)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """As `readable`, for what names the file itself where it can."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path} cannot be read ({explain(error)})") from None


def probe_clip(path: Path) -> ClipInfo:
    """Reads what is known of a clip without decoding it; InputError where it cannot be read."""
    with _named(path):
        if path.suffix.lower() in VIDEO_SUFFIXES and path.is_file():
            info = probe(path)
            return ClipInfo(info.num_frames, (info.height, info.width), info.frame_rate)
        files = _pictures(path) if path.is_dir() else [path]
        with readable(files[0]), Image.open(files[0]) as image:
            count = len(files) if path.is_dir() else getattr(image, "n_frames", 1)
            return ClipInfo(count, (image.height, image.width))


def read_clip(path: Path, indices: Sequence[int]) -> Frames:
    """Reads frames of a clip by their numbers; InputError where they cannot be read."""
    if path.is_dir():
        files = _pictures(path)
        return [_decode(files[index])[0] for index in indices]
    if path.suffix.lower() in VIDEO_SUFFIXES:
        with _named(path):
            return [Image.fromarray(frame) for frame in read_frames(path, indices)]
    frames = _decode(path)
    return [frames[index] for index in indices]


def _decode(path: Path) -> Frames:
    with readable(path), Image.open(path) as image:
        item = read_item(image)
        check_depth(image)
    return item if isinstance(item, list) else [item]
