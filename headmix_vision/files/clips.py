"""Clips as files: videos, animated pictures, and folders of frames, whose pictures are one clip sorted by name.

H and W pixels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from headmix_vision.errors import InputError, explain
from headmix_vision.files.listing import find_frames, is_video
from headmix_vision.files.pictures import Decoding, open_picture, readable
from headmix_vision.files.video import VideoInfo, probe, read_frames

Frames = list[Image.Image]


@dataclass(frozen=True)
class ClipInfo:
    """Facts about a clip before it is read.

    Args:
        num_frames: Frames.
        size: H and W.
        frame_rate: Frames a second, None where nobody says.
        times: When each frame begins to show and the last one ends, None where they follow each other evenly.
    """

    num_frames: int
    size: tuple[int, int]
    frame_rate: float | None = None
    times: tuple[float, ...] | None = None


def probe_clip(path: Path) -> ClipInfo:
    """Read what is known of a clip by its first frame; InputError where it cannot be read."""
    with _named(path):
        if is_video(path) and not path.is_dir():
            return _describe(probe(path))
        return _describe_pictures(path)[0]


def read_clip(path: Path, indices: Sequence[int] | Callable[[ClipInfo], Sequence[int]], decoding: Decoding) -> Frames:
    """Read frames of a clip by their numbers, or those that are chosen; InputError where they cannot be read."""
    with _named(path):
        if is_video(path) and not path.is_dir():
            chosen = (lambda info: indices(_describe(info))) if callable(indices) else indices
            return [
                Image.fromarray(frame).convert(decoding.mode)
                for frame in read_frames(path, chosen, decoding.background)
            ]
        info, files = _describe_pictures(path)
        numbers = indices(info) if callable(indices) else indices
        if path.is_dir():
            return [_first_frame(files[number], decoding) for number in numbers]
        frames = decoding.frames(path)
        return [frames[number] for number in numbers]


def _first_frame(path: Path, decoding: Decoding) -> Image.Image:
    with readable(path):
        return decoding.first_frame(path)


def _describe(info: VideoInfo) -> ClipInfo:
    return ClipInfo(info.num_frames, (info.height, info.width), info.frame_rate, info.times)


def _describe_pictures(path: Path) -> tuple[ClipInfo, list[Path]]:
    """Describe a folder of frames or an animated picture by its first frame; return its files too."""
    files = find_frames(path) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} has no frames")
    with readable(files[0]), open_picture(files[0]) as image:
        count = len(files) if path.is_dir() else getattr(image, "n_frames", 1)
        upright = Decoding().convert(image)
        return ClipInfo(count, (upright.height, upright.width)), files


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """As `readable`, for what names the file itself where it can."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path} cannot be read ({explain(error)})") from None
