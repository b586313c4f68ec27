"""Videos as files: read by frame number with PyAV, written as H.264 or GIF.

T frames, H and W pixels, C channels (1 or 3); uint8, channels last. Frames are counted in the order of display, and
they are given as they lie in the file: a note of a camera that it was turned is not applied.
"""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headmix_vision.checks import check_positive
from headmix_vision.errors import InputError
from headmix_vision.extras import require_extra
from headmix_vision.files.atomic import atomic_path
from headmix_vision.files.png import to_item

VIDEO_SUFFIXES = frozenset((
    ".3g2", ".3gp", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".gif", ".m1v", ".m2ts", ".m2v", ".m4v", ".mjpeg",
    ".mjpg", ".mkv", ".mov", ".mp4", ".mpe", ".mpeg", ".mpg", ".mts", ".mxf", ".ogv", ".qt", ".rm", ".rmvb", ".ts",
    ".vob", ".webm", ".wmv", ".y4m",
))  # fmt: skip
WRITTEN_SUFFIXES = (".mp4", ".gif")
_CRF = "17"  # of x264, hardly to be told from the original


@dataclass(frozen=True)
class VideoInfo:
    """What a video file holds: frames, their average number a second, and their size in pixels."""

    num_frames: int
    frame_rate: float
    height: int
    width: int


@dataclass(frozen=True)
class EncodedVideo:
    """A video in memory, as it would lie in a file, and what messages call it."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return self.name

    def open(self, mode: str) -> BinaryIO:
        """Opens it as `Path.open` opens a file."""
        return io.BytesIO(self.data)


@dataclass(frozen=True)
class _Packet:
    """A coded frame, in the order of decoding: times in units of the stream, None where the file has none."""

    shown: int | None
    decoded: int | None
    is_key: bool


def probe(path: str | os.PathLike[str] | EncodedVideo) -> VideoInfo:
    """Counts the frames of a video, without decoding them, and reads their rate and size.

    Raises:
        InputError: The file is damaged, or holds no frames.
        OSError: It cannot be opened.
    """
    with _opened(path) as (container, stream):
        return _info(path, stream, _packets(container, stream))


def read_frames(
    path: str | os.PathLike[str] | EncodedVideo, indices: Sequence[int] | Callable[[VideoInfo], Sequence[int]]
) -> np.ndarray:
    """Reads frames by their numbers; decoding begins at the last key frame before the first of them.

    Args:
        path: The video, on a disk or in memory.
        indices: Numbers of frames from 0, in any order, also repeated; or what chooses them.

    Returns:
        Uint8 [T, H, W, 3], in the order of `indices`.

    Raises:
        InputError: The file is damaged or holds no frames, or a number is not of one of them.
        OSError: It cannot be opened.
    """
    with _opened(path) as (container, stream):
        packets = _packets(container, stream)
        info = _info(path, stream, packets)
        indices = indices(info) if callable(indices) else indices
        wrong = [index for index in indices if not 0 <= index < info.num_frames]
        if wrong:
            raise InputError(f"{path} has {info.num_frames} frames, there is no frame {wrong[0]}")
        wanted = sorted({*indices})
        found = _seek_and_decode(container, stream, packets, wanted)
    if len(found) < len(wanted):
        with _opened(path) as (container, stream):
            found = _decode_from_start(container, stream, wanted)
    missing = [index for index in wanted if index not in found]
    if missing:
        raise InputError(f"{path} is truncated: frame {missing[0]} of {info.num_frames} cannot be decoded")
    if len({frame.shape for frame in found.values()}) > 1:
        raise InputError(f"{path} changes its size on the way")
    return np.stack([found[index] for index in indices])


def read_video(path: str | os.PathLike[str]) -> tuple[np.ndarray, float]:
    """Reads all frames, uint8 [T, H, W, 3], and their number a second; raises as `read_frames` does."""
    info = probe(path)
    return read_frames(path, range(info.num_frames)), info.frame_rate


def write_video(path: str | os.PathLike[str], frames: np.ndarray, frame_rate: float) -> None:
    """Writes a clip in the format of the path's ending; the file is complete or absent.

    `.mp4` is H.264 with 4:2:0 colours, as every player takes it: lossy, and of even size, for which the last row or
    column of an odd one is repeated. `.gif` has 256 colours a frame and times in hundredths of a second; of equal
    frames in a row it holds one, shown for longer.

    Args:
        path: The file.
        frames: Uint8 [T, H, W, C], C 1 or 3.
        frame_rate: Frames a second.

    Raises:
        InputError: Another ending, or a frame rate that is not a positive number.
        OSError: The file cannot be written.
    """
    check_video_name(path)
    check_positive(frame_rate=frame_rate)
    assert frames.dtype == np.uint8 and frames.ndim == 4 and len(frames) and frames.shape[-1] in (1, 3)
    encode = _encode_gif if Path(path).suffix.lower() == ".gif" else _encode_mp4
    encoded = encode(frames, frame_rate)  # in memory, as for pictures
    with atomic_path(path) as temporary:
        temporary.write_bytes(encoded)


def check_video_name(path: str | os.PathLike[str]) -> None:
    """Checks, before the work whose result it takes, that a video of this name can be written.

    Raises:
        InputError: Its ending is none of `WRITTEN_SUFFIXES`, or PyAV is missing.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in WRITTEN_SUFFIXES:
        raise InputError(f"{path} must end on one of {', '.join(WRITTEN_SUFFIXES)}")
    if suffix != ".gif":
        require_extra("video", "writing a video")


@contextmanager
def _opened(path: str | os.PathLike[str] | EncodedVideo) -> Iterator[tuple[Any, Any]]:
    """Opens a file and its first video stream; whatever PyAV raises within names the file."""
    require_extra("video", "reading a video")
    import av

    with (path if isinstance(path, EncodedVideo) else Path(path)).open("rb") as file:
        try:
            with av.open(file) as container:
                if not container.streams.video:
                    raise InputError(f"{path} holds no video")
                stream = container.streams.video[0]
                stream.codec_context.thread_count = 1  # data loaders read many files at once
                yield container, stream
        except (av.FFmpegError, OSError) as error:  # of the file that is open: an empty one is an OSError
            raise InputError(f"{path} cannot be read as a video ({type(error).__name__}: {error.strerror})") from None


def _packets(container: Any, stream: Any) -> list[_Packet]:
    # Not the number in the header: some files have none, or a wrong one.
    return [
        _Packet(packet.pts, packet.dts, packet.is_keyframe)
        for packet in container.demux(stream)
        if packet.size and not packet.is_discard
    ]


def _info(path: str | os.PathLike[str] | EncodedVideo, stream: Any, packets: list[_Packet]) -> VideoInfo:
    if not packets:
        raise InputError(f"{path} has no frames")
    rate = stream.average_rate or stream.guessed_rate
    times = [packet.shown for packet in packets if packet.shown is not None]
    if stream.codec_context.name == "gif" and len(times) > 1:  # whose stated rate is that of the first frames
        rate = (len(times) - 1) / ((max(times) - min(times)) * stream.time_base)
    if not rate:
        raise InputError(f"{path} states no frame rate")
    return VideoInfo(len(packets), float(rate), stream.height, stream.width)


def _seek_and_decode(container: Any, stream: Any, packets: list[_Packet], wanted: list[int]) -> dict[int, np.ndarray]:
    """Decodes frames by the times at which they are shown; those that are not found that way are left out."""
    times = sorted(packet.shown for packet in packets if packet.shown is not None)
    if len({*times}) < len(packets) or not wanted:
        return {}
    numbers = {times[index]: index for index in wanted}
    # Frames that are shown before a key frame and coded after it may need the one before.
    keys = [
        (packet.shown, packet.decoded)
        for packet in packets
        if packet.is_key and packet.shown is not None and packet.shown <= times[wanted[0]]
    ]
    _, start = max(keys, default=(0, packets[0].decoded))
    if start is None:
        return {}
    container.seek(start, stream=stream)
    found: dict[int, np.ndarray] = {}
    for frame in container.decode(stream):
        if frame.pts in numbers:
            found[numbers[frame.pts]] = frame.to_ndarray(format="rgb24")
            if len(found) == len(numbers):
                break
    return found


def _decode_from_start(container: Any, stream: Any, wanted: list[int]) -> dict[int, np.ndarray]:
    """Decodes frames by counting them."""
    found: dict[int, np.ndarray] = {}
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            found[number] = frame.to_ndarray(format="rgb24")
        if number == wanted[-1]:
            break
    return found


def _encode_mp4(frames: np.ndarray, frame_rate: float) -> bytes:
    import av

    _, height, width, channels = frames.shape
    pixels = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    encoded = io.BytesIO()
    with av.open(encoded, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(frame_rate).limit_denominator(1001))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt, stream.options = "yuv420p", {"crf": _CRF}
        for image in pixels:
            frame = av.VideoFrame.from_ndarray(np.repeat(image, 3 // channels, axis=-1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return encoded.getvalue()


def _encode_gif(frames: np.ndarray, frame_rate: float) -> bytes:
    item = to_item(frames)
    assert isinstance(item, list)
    # Each time is rounded, not each duration: the clip keeps its length.
    ends = [round(100 * number / frame_rate) * 10 for number in range(len(item) + 1)]
    durations = [max(end - start, 10) for start, end in pairwise(ends)]
    encoded = io.BytesIO()
    item[0].save(encoded, format="gif", save_all=True, append_images=item[1:], duration=durations, loop=0)
    return encoded.getvalue()
