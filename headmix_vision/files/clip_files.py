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
from headmix_vision.files.video import probe, read_frames

Frames = list[Image.Image]
Choice = Callable[[int, float | None, tuple[float, ...] | None], Sequence[int]]
"""Chooses the numbers of frames by how many there are, their rate and their times, as in `ClipInfo`."""


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
        if path.is_dir():
            files = find_frames(path)
            if not files:
                raise InputError(f"{path} has no frames")
            first = _first_frame(files[0], Decoding())
            return ClipInfo(len(files), (first.height, first.width))
        if is_video(path):
            info = probe(path)
            return ClipInfo(info.num_frames, (info.height, info.width), info.frame_rate, info.times)
        with open_picture(path) as image:
            first = Decoding().convert(image)
            return ClipInfo(getattr(image, "n_frames", 1), (first.height, first.width))


def read_clip(path: Path, indices: Sequence[int] | Choice, decoding: Decoding) -> Frames:
    """Read frames of a clip by their numbers, or those that are chosen; InputError where they cannot be read."""

    def choose(count: int, frame_rate: float | None = None, times: tuple[float, ...] | None = None) -> Sequence[int]:
        return indices(count, frame_rate, times) if callable(indices) else indices

    with _named(path):
        if path.is_dir():
            files = find_frames(path)
            return [_first_frame(files[number], decoding) for number in choose(len(files))]
        if is_video(path):
            frames = read_frames(
                path, lambda info: choose(info.num_frames, info.frame_rate, info.times), decoding.background
            )
            return [Image.fromarray(frame).convert(decoding.mode) for frame in frames]
        pictures = decoding.frames(path)
        return [pictures[number] for number in choose(len(pictures))]


def _first_frame(path: Path, decoding: Decoding) -> Image.Image:
    with readable(path):
        return decoding.first_frame(path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """As `readable`, for what names the file itself where it can."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path} cannot be read ({explain(error)})") from None
