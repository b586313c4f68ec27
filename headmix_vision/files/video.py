"""Videos and clips as files: read by frame number with PyAV, written as H.264 or GIF.

T frames, H and W pixels, C channels (1 or 3); uint8, channels last. Frames are counted in the order of display. They
are turned as the file's display matrix says. Their colours follow the matrix and range that the stream names: BT.601 of
limited range where it names none. A video is the first stream of its file that is not a cover picture. A clip is a
video, an animated picture, or a folder of frames, whose pictures are sorted by name.
"""

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from headmix_vision.errors import InputError, check_positive, explain, require_extra
from headmix_vision.files.pictures import Decoding, find_frames, is_video, open_picture, readable, to_item
from headmix_vision.files.reading import check_file, check_memory
from headmix_vision.files.writing import atomic_path

WRITTEN_SUFFIXES = (".mp4", ".gif")
_CRF, _TRAINING_CRF = "17", "12"  # of x264: the first is hardly to be told from the original
_INSTANT_S = 1e-6
_NUMBER_BYTES = 64  # of the number of a frame, in a list
_FRAME_BYTES = 16  # of a pixel, with the frames that a decoder keeps
_NOTHING_ELSE = {"protocol_whitelist": "none"}  # a video may name addresses and other files, which are not opened
_OLDEST_AV = 17  # which converts the colours of BT.709 and of full range rightly
# BT.601, limited range, primaries of BT.709 and the curve of sRGB, by their numbers in H.273
_WRITTEN_COLOURS = {"colorspace": 6, "color_range": 1, "color_primaries": 1, "color_trc": 13}
Frames = list[Image.Image]
Choice = Callable[[int, float | None, tuple[float, ...] | None], Sequence[int]]
"""Chooses the numbers of frames by how many there are, their rate and their times, as in `ClipInfo`."""


@dataclass(frozen=True)
class ClipInfo:
    """Facts about a clip before it is read.

    Args:
        num_frames: Frames.
        size: H and W of a frame in pixels.
        frame_rate: Frames a second, of a video on average; None where nobody says.
        times: When each frame begins to show, and when the last one ends, in seconds from the first; None where they
            follow each other evenly.
    """

    num_frames: int
    size: tuple[int, int]
    frame_rate: float | None = None
    times: tuple[float, ...] | None = None

    def frames_at(self, frame_rate: float) -> list[int]:
        """Number the frames that show at the times of another rate, from the first to the end."""
        assert self.frame_rate is not None
        times = self.times or [number / self.frame_rate for number in range(self.num_frames + 1)]
        count = max(round(times[-1] * frame_rate), 1)
        needed = count * (3 * self.size[0] * self.size[1] + _NUMBER_BYTES)
        check_memory(needed, f"a video of {times[-1]:g} s at {frame_rate:g} frames a second")
        return [bisect_right(times[:-1], number / frame_rate + _INSTANT_S) - 1 for number in range(count)]


@dataclass(frozen=True)
class EncodedVideo:
    """A video in memory, as it would lie in a file, and what messages call it."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return self.name

    def open(self, mode: str) -> BinaryIO:
        """Open it as `Path.open` opens a file."""
        return io.BytesIO(self.data)


@dataclass(frozen=True)
class _Packet:
    """A coded frame, in the order of decoding: times in units of the stream, None where the file has none."""

    shown: int | None
    decoded: int | None
    duration: int
    is_key: bool


def probe(path: str | os.PathLike[str] | EncodedVideo) -> ClipInfo:
    """Count the frames of a video, and read their times, without decoding more than the first.

    Raises:
        InputError: The file is damaged, or holds no frames.
        OSError: It cannot be opened.
    """
    with _opened(path) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise InputError(f"{path} has no frames")
        height, width, _ = _Pixels().turn(np.empty((first.height, first.width, 0), np.uint8), first).shape
    with _opened(path) as (container, stream):
        return replace(_info(path, stream, _packets(path, container, stream)), size=(height, width))


def read_frames(
    path: str | os.PathLike[str] | EncodedVideo,
    indices: Sequence[int] | Callable[[ClipInfo], Sequence[int]],
    background: str = "white",
) -> np.ndarray:
    """Read frames by their numbers; decoding begins at the last key frame before the first of them.

    Args:
        path: The video, on a disk or in memory.
        indices: Numbers of frames from 0, in any order, also repeated; or what chooses them, for which height and
            width are those before the frames are turned.
        background: Colour behind transparent pixels.

    Returns:
        Uint8 [T, H, W, 3], in the order of `indices`.

    Raises:
        InputError: The file is damaged or holds no frames, or a number is not of one of them.
        OSError: It cannot be opened.
    """
    with _opened(path) as (container, stream):
        packets = _packets(path, container, stream)
        info = _info(path, stream, packets)
        indices = indices(info) if callable(indices) else indices
        wrong = [index for index in indices if not 0 <= index < info.num_frames]
        if wrong:
            raise InputError(f"{path} has {info.num_frames} frames, there is no frame {wrong[0]}")
        height, width = info.size
        check_memory(6 * len(indices) * height * width, f"{path}: {len(indices)} frames of {height}x{width} pixels")
        wanted = sorted({*indices})
        found = _seek_and_decode(container, stream, packets, wanted, _Pixels(background))
    if len(found) < len(wanted):
        with _opened(path) as (container, stream):
            found = _decode_from_start(container, stream, wanted, _Pixels(background))
    missing = [index for index in wanted if index not in found]
    if missing:
        raise InputError(f"{path} is truncated or damaged: frame {missing[0]} of {info.num_frames} cannot be decoded")
    if len({frame.shape for frame in found.values()}) > 1:
        raise InputError(f"{path} changes its size on the way")
    return np.stack([found[index] for index in indices])


def read_video(path: str | os.PathLike[str], frame_rate: float | None = None) -> tuple[np.ndarray, float]:
    """Read all frames of a video.

    Args:
        path: The video.
        frame_rate: Of a video whose frames do not follow each other evenly, the frames that show at this rate.

    Returns:
        Frames, uint8 [T, H, W, 3], and their number a second.

    Raises:
        InputError: As `read_frames`.
    """
    info = probe(path)
    assert info.frame_rate is not None
    if info.times is not None and frame_rate is not None:
        return read_frames(path, info.frames_at(frame_rate)), frame_rate
    return read_frames(path, range(info.num_frames)), info.frame_rate


def write_video(
    path: str | os.PathLike[str], frames: np.ndarray, frame_rate: float, *, full_chroma: bool = False
) -> None:
    """Write a clip in the format of the path's ending; the file is complete or absent.

    `.mp4` is H.264 with 4:2:0 colours, as every player takes it: lossy, and of even size, for which the last row or
    column of an odd one is repeated. `.gif` has 256 colours a frame and times in hundredths of a second; of equal
    frames in a row it holds one, shown for longer.

    Args:
        path: The file.
        frames: Uint8 [T, H, W, C], C 1 or 3.
        frame_rate: Frames a second.
        full_chroma: Write an `.mp4` in 4:4:4 colours, with less loss and always the same bytes, for training; few
            players show it.

    Raises:
        InputError: Another ending, or a frame rate that is not a positive number.
        OSError: The file cannot be written.
    """
    check_video_name(path)
    check_positive(frame_rate=frame_rate)
    assert frames.dtype == np.uint8 and frames.ndim == 4 and len(frames) and frames.shape[-1] in (1, 3)
    is_gif = Path(path).suffix.lower() == ".gif"  # encoded in memory, as pictures are
    encoded = _encode_gif(frames, frame_rate) if is_gif else _encode_mp4(frames, frame_rate, full_chroma)
    with atomic_path(path) as temporary:
        temporary.write_bytes(encoded)


def check_video_name(path: str | os.PathLike[str]) -> None:
    """Check, before the work whose result it takes, that a video of this name can be written.

    Raises:
        InputError: Its ending is none of `WRITTEN_SUFFIXES`, or PyAV is missing or too old.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in WRITTEN_SUFFIXES:
        raise InputError(f"{path} must end on one of {', '.join(WRITTEN_SUFFIXES)}")
    if suffix != ".gif":
        require_av("writing a video")


def is_whole_video(path: Path) -> bool:
    """Return whether a file has the whole structure of the GIF or MP4 of its name, without decoding it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        if path.suffix.lower() == ".gif":
            file.seek(max(size - 1, 0))
            last = file.read()
            file.seek(0)
            return file.read(4) == b"GIF8" and last == b";"
        boxes, place = set[bytes](), 0
        while place < size:
            file.seek(place)
            header = file.read(16)
            length, kind = int.from_bytes(header[:4], "big"), header[4:8]
            length = int.from_bytes(header[8:], "big") if length == 1 else length or size - place
            if length < 8:
                return False
            boxes.add(kind)
            place += length
        return place == size and {b"ftyp", b"moov"} <= boxes


def require_av(what: str) -> None:
    """Tell what to install, unless PyAV is there in a version that converts colours rightly.

    Args:
        what: What needs it, to begin the message.

    Raises:
        InputError: It is missing or too old.
    """
    require_extra("video", what)
    found = version("av")
    if int(found.partition(".")[0]) < _OLDEST_AV:
        raise InputError(
            f"{what} needs PyAV {_OLDEST_AV} or later, {found} is installed, which converts colours wrongly:"
            " pip install 'headmix_vision[video]'"
        )


@contextmanager
def _opened(path: str | os.PathLike[str] | EncodedVideo) -> Iterator[tuple[Any, Any]]:
    """Open a file and its first video stream; whatever PyAV raises within names the file."""
    require_av("reading a video")
    import av
    from av.stream import Disposition

    if not isinstance(path, EncodedVideo):
        check_file(path)
    with (path if isinstance(path, EncodedVideo) else Path(path)).open("rb") as file:
        try:
            with av.open(file, options=_NOTHING_ELSE) as container:
                covers = Disposition.attached_pic | Disposition.timed_thumbnails
                stream = next((one for one in container.streams.video if not one.disposition & covers), None)
                if stream is None:
                    raise InputError(f"{path} holds no video")
                size = stream.height * stream.width
                check_memory(_FRAME_BYTES * size, f"{path}: a frame of {stream.height}x{stream.width} pixels")
                stream.codec_context.thread_count = 1  # data loaders read many files at once
                if container.format.name == "gif" and _is_cut_gif(file):
                    raise InputError(f"{path} is truncated: its last frame is incomplete")
                yield container, stream
        except InputError:
            raise
        except (av.FFmpegError, OSError) as error:  # of the file that is open: an empty one is an OSError
            raise InputError(f"{path} cannot be read as a video ({type(error).__name__}: {error.strerror})") from None
        except ValueError as error:
            raise InputError(f"{path} cannot be read as a video ({error})") from None


def _packets(path: object, container: Any, stream: Any) -> list[_Packet]:
    # Not the number in the header: some files have none, or a wrong one.
    packets = [packet for packet in container.demux(stream) if packet.size and not packet.is_discard]
    if packets and packets[-1].is_corrupt:  # of a file that ends within it
        raise InputError(f"{path} is truncated: its last frame is incomplete")
    return [_Packet(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe) for packet in packets]


def _is_cut_gif(file: BinaryIO) -> bool:
    """Tell whether a GIF ends within a block, of which FFmpeg decodes what is there; keep the place in the file."""
    before = file.tell()
    file.seek(-1, io.SEEK_END)
    ended = file.read() == b";"
    file.seek(0)
    data = b"" if ended else file.read()
    file.seek(before)
    try:
        place = 0 if ended else 13 + _colours_bytes(data[10])
        while place < len(data) and (kind := data[place]) in b",!":  # a picture or an extension, then its sub-blocks
            place += 2 if kind == ord("!") else 11 + _colours_bytes(data[place + 9])
            while data[place]:
                place += 1 + data[place]
            place += 1
    except IndexError:
        return True
    return False


def _colours_bytes(flags: int) -> int:
    """Bytes of the colour table that a GIF's flags tell of."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _info(path: str | os.PathLike[str] | EncodedVideo, stream: Any, packets: list[_Packet]) -> ClipInfo:
    if not packets:
        raise InputError(f"{path} has no frames")
    rate, times = stream.average_rate or stream.guessed_rate, _times(packets)
    if len(times) > 1:
        ends = [*times, max(packet.shown + packet.duration for packet in packets if packet.shown == times[-1])]
        is_gif = stream.codec_context.name == "gif"  # whose stated rate is that of the first frames
        if is_gif or not _is_even(times):
            rate = (len(times) - 1) / ((times[-1] - times[0]) * stream.time_base)
        if not _is_even(ends if is_gif else times):  # other files seldom tell how long the last frame shows
            shown = tuple(float((time - times[0]) * stream.time_base) for time in ends)
            return ClipInfo(len(packets), (stream.height, stream.width), float(rate), shown)
    if not rate:
        raise InputError(f"{path} states no frame rate")
    return ClipInfo(len(packets), (stream.height, stream.width), float(rate))


def _is_even(times: list[int]) -> bool:
    """Tell whether times are equally far apart, but for their rounding to whole numbers."""
    step = (times[-1] - times[0]) / (len(times) - 1)
    return all(abs(time - times[0] - step * number) <= 1 for number, time in enumerate(times))


def _times(packets: list[_Packet]) -> list[int]:
    """Times at which frames show, in their order; none where the file does not tell them all apart."""
    times = sorted(packet.shown for packet in packets if packet.shown is not None)
    return times if len({*times}) == len(packets) else []


class _Pixels:
    """Convert the decoded frames of a video to pixels, uint8 [H, W, 3], turned as they are to be shown.

    Args:
        background: Colour behind transparent pixels.
    """

    def __init__(self, background: str = "white") -> None:
        from av.video.reformatter import VideoReformatter

        self._background = background
        # not that of each frame: its threads end with it, which garbage in a forked process would wait for
        self._reformatter: Any = VideoReformatter()
        self._matrix: np.ndarray | None = None

    def __call__(self, frame: Any) -> np.ndarray:
        has_alpha = any(component.is_alpha for component in frame.format.components)
        form = "rgba" if has_alpha else "rgb24"
        pixels = self._reformatter.reformat(frame, format=form, threads=1).to_ndarray()
        if has_alpha:
            pixels = np.asarray(Decoding(background=self._background).convert(Image.fromarray(pixels)))
        return self.turn(pixels, frame)

    def turn(self, pixels: np.ndarray, frame: Any) -> np.ndarray:
        """Turn and mirror pixels [H, W, C] as the display matrix of the first frame says."""
        if self._matrix is None:  # PyAV keeps a frame that it is asked of until the garbage is collected
            self._matrix = _display_matrix(frame)
        right, down = self._matrix
        if right[0] == 0:
            pixels, right, down = pixels.swapaxes(0, 1), down, right
        return np.ascontiguousarray(pixels[:: down[1], :: right[0]])


def _display_matrix(frame: Any) -> np.ndarray:
    """Find where a step to the right and a step down in a stored picture go when it is shown: [[x, y], [x, y]]."""
    from av.sidedata.sidedata import Type

    data = frame.side_data.get(Type.DISPLAYMATRIX)
    if data is None:
        return np.eye(2, dtype=int)
    matrix = np.sign(np.frombuffer(bytes(data), "=i4").reshape(3, 3)[:2, :2])
    if (abs(matrix).sum(0) != 1).any() or (abs(matrix).sum(1) != 1).any():
        raise ValueError("it is to be shown turned by other than a multiple of 90 degrees")
    return matrix


def _decode(container: Any, stream: Any) -> Iterator[tuple[Any, bool]]:
    """Decode frames in the order of display, each with whether it is whole.

    A decoder fills up what is missing, as at the end of a truncated MPEG transport stream, whose packets do not tell
    it. Frames up to the next key frame may repeat what was filled in.
    """
    is_whole = True
    for frame in container.decode(stream):
        is_whole = not frame.is_corrupt and (is_whole or bool(frame.key_frame))
        yield frame, is_whole


def _seek_and_decode(
    container: Any, stream: Any, packets: list[_Packet], wanted: list[int], to_pixels: _Pixels
) -> dict[int, np.ndarray]:
    """Decode frames by the times at which they are shown; those that are not found whole that way are left out."""
    times = _times(packets)
    if not times or not wanted:
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
    for frame, is_whole in _decode(container, stream):
        if is_whole and frame.pts in numbers:
            found[numbers[frame.pts]] = to_pixels(frame)
            if len(found) == len(numbers):
                break
    return found


def _decode_from_start(container: Any, stream: Any, wanted: list[int], to_pixels: _Pixels) -> dict[int, np.ndarray]:
    """Decode frames by counting them; those that are not whole are left out."""
    found: dict[int, np.ndarray] = {}
    for number, (frame, is_whole) in enumerate(_decode(container, stream)):
        if is_whole and number in wanted:
            found[number] = to_pixels(frame)
        if number == wanted[-1]:
            break
    return found


def _encode_mp4(frames: np.ndarray, frame_rate: float, full_chroma: bool) -> bytes:
    import av

    _, height, width, channels = frames.shape
    pixels = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    encoded = io.BytesIO()
    with av.open(encoded, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(frame_rate).limit_denominator(1001))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt, stream.options = "yuv420p", {"crf": _CRF}
        if full_chroma:
            # x264 does not repeat its bytes with several threads, nor with its tree of macroblocks in small frames
            stream.codec_context.thread_count = 1
            stream.pix_fmt = "yuv444p"
            stream.options = {"crf": _TRAINING_CRF, "preset": "veryslow", "x264-params": "mbtree=0"}
        for name, number in _WRITTEN_COLOURS.items():
            setattr(stream.codec_context, name, number)
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
            return probe(path)
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
