"""Pictures as files, alike for every command: which files they are, what pixels they have, and lossless PNGs.

A picture is the first frame of its file, upright as its EXIF says, on a background where it is transparent, with 8 bits
a channel: of 16 the upper 8. CMYK is converted by Pillow's formula, and embedded colour profiles are not applied. An
image is written as a PNG, a clip as an animated PNG.

A listing follows links. A folder is not entered again from within itself, and a file that several links reach is listed
once, under its own name if that is below the folder too. Hidden files and folders are left out before anything else is
decided: names that begin with a dot, such as the `._*` beside each file that macOS copies, and `__MACOSX`. What is left
out is counted.

T frames, H and W pixels, C channels (1 or 3); uint8, channels last.
"""

import importlib
import io
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageColor, ImageSequence, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from headmix_vision.errors import InputError, explain
from headmix_vision.files.reading import check_file, check_memory
from headmix_vision.files.writing import atomic_path

Source = str | os.PathLike[str] | bytes | BinaryIO
"""A file of a picture: its path, its bytes, or the open file."""
Item = Image.Image | list[Image.Image]
"""An image, or the frames of a clip."""
FRAMES_NOTE = "headmix_vision frames"
"""Name of a note in the file, which tells a clip of one frame from an image."""
_SIGNATURE, _END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"

# EPS starts a program, the others are read by Pillow's header alone
_NOT_PICTURES = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
_ANIMATED = ("AVIF", "GIF", "PNG", "WEBP")  # other formats hold pages or views
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
_PIXEL_BYTES = 16  # while a picture is decoded, put on its background and converted
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by EXIF's orientation
VIDEO_SUFFIXES = frozenset((
    ".3g2", ".3gp", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".gif", ".m1v", ".m2ts", ".m2v", ".m4v", ".mjpeg",
    ".mjpg", ".mkv", ".mov", ".mp4", ".mpe", ".mpeg", ".mpg", ".mts", ".mxf", ".ogv", ".qt", ".rm", ".rmvb", ".ts",
    ".vob", ".webm", ".wmv", ".y4m",
))  # fmt: skip
HIDDEN = "hidden"
"""Reason for which files are left out."""
_AGAIN, _SPECIAL, _BARE = "linked again", "no regular file", "without ending"
_MAX_DEPTH, _MAX_VISITS = 256, 1000
_SHOWN = 8  # kinds of files in a message


@cache
def picture_formats() -> tuple[str, ...]:
    """Names of Pillow's formats that are read as pictures, with its plug-ins for HEIC and JPEG XL where installed."""
    Image.init()
    if find_spec("pillow_heif") is not None:
        importlib.import_module("pillow_heif").register_heif_opener()
    if find_spec("pillow_jxl") is not None:
        importlib.import_module("pillow_jxl")  # registers itself
    named = {*Image.registered_extensions().values()}
    return tuple(sorted(name for name in Image.OPEN if name in named and name not in _NOT_PICTURES))


@cache
def picture_suffixes() -> frozenset[str]:
    """Endings of picture files, in small letters and with their dot."""
    formats = {*picture_formats(), "MPO"}  # a JPEG of several pictures
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in formats)


@dataclass(frozen=True)
class Decoding:
    """The pixels that pictures become.

    Args:
        mode: PIL mode, `L` or `RGB`.
        background: Colour behind transparent pixels: a name such as `white`, or `#rrggbb`.

    Raises:
        InputError: `background` is not such a colour.
    """

    mode: str = "RGB"
    background: str = "white"

    def __post_init__(self) -> None:
        check_background(self.background)

    def first_frame(self, file: Source) -> Image.Image:
        """Decode a picture; anything may be raised for a damaged one."""
        with open_picture(file) as image:
            return self.convert(image)

    def frames(self, file: Source) -> list[Image.Image]:
        """Decode all frames of an animated picture, or the only one of another."""
        with open_picture(file) as image:
            if not _is_animated(image):
                return [self.convert(image)]
            upright = _orientation(image)
            self._check_frames(image)
            return [self._convert(frame, upright) for frame in ImageSequence.Iterator(image)]

    def _check_frames(self, image: Any) -> None:
        width, height = image.size
        size = image.n_frames * width * height * len(self.mode)
        _check_memory(size, f"a clip of {image.n_frames} frames of {width}x{height} pixels")

    def item(self, file: Source) -> Item:
        """Decode a picture, or the frames of an animated PNG, as samples of clips are stored."""
        with open_picture(file) as image:
            is_clip = image.format == "PNG" and _is_animated(image)
        return self.frames(file) if is_clip else self.first_frame(file)

    def convert(self, image: Image.Image) -> Image.Image:
        """Convert a picture that Pillow has opened; ValueError for one of other than 8 or 16 bits."""
        image.load()  # a TIFF turns itself then
        return self._convert(image, _orientation(image))

    def _convert(self, image: Image.Image, upright: Image.Transpose | None) -> Image.Image:
        image.load()
        image = _to_eight_bits(image)
        if image.has_transparency_data:
            canvas = Image.new("RGBA", image.size, self.background)
            canvas.alpha_composite(image.convert("RGBA"))
            image = canvas.convert("RGB")
        image = image.convert(self.mode)
        image = image if upright is None else image.transpose(upright)
        image.info = {}  # which asks for what is done now
        return image


def check_background(background: object) -> None:
    """Raise InputError for what is not an opaque colour."""
    try:
        opaque = isinstance(background, str) and len(ImageColor.getrgb(background)) == 3
    except ValueError:
        opaque = False
    if not opaque:
        raise InputError(f"background is {background!r}, it must be a colour such as white, black or #rrggbb")


@contextmanager
def open_picture(file: Source) -> Iterator[Image.Image]:
    """Open a picture without decoding it.

    Raises:
        ValueError: It is not a picture, is not a regular file, or has more pixels than Pillow takes or memory is left
            for, or is a PNG with a wrong checksum.
    """
    if isinstance(file, str | os.PathLike):
        check_file(file)
    opened: Any = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        image = Image.open(opened, formats=picture_formats())
        if image.format == "PNG":  # Pillow compares the checksums of pixels here alone: 2 % of the time of decoding
            image.verify()
            image = Image.open(opened, formats=["PNG"])
    except UnidentifiedImageError:
        raise ValueError("it is not a picture that Pillow reads") from None
    except (Image.DecompressionBombError, SyntaxError) as error:  # the second of `verify`
        raise ValueError(str(error)) from None
    with image:
        _check_memory(_PIXEL_BYTES * image.width * image.height, f"a picture of {image.width}x{image.height} pixels")
        yield image


def _check_memory(needed_bytes: int, what: str) -> None:
    """As `check_memory`, with a ValueError, to which callers add the name of the file."""
    try:
        check_memory(needed_bytes, what)
    except InputError as error:
        raise ValueError(str(error)) from None


def is_clip(path: str | os.PathLike[str]) -> bool:
    """Tell whether a picture is animated, or a clip of one frame that `write_png` wrote; not if it cannot be read."""
    with suppress(Exception), open_picture(path) as image:  # reading it says why
        return _is_animated(image)
    return False


@contextmanager
def readable(name: object) -> Iterator[None]:
    """Name the picture in whatever a decoder raises; it raises whatever comes to mind on a damaged file.

    Raises:
        InputError: For any exception.
    """
    try:
        yield
    except Exception as error:
        raise InputError(f"{name} cannot be read ({explain(error)})") from None


def _is_animated(image: Image.Image) -> bool:
    return image.format in _ANIMATED and (getattr(image, "is_animated", False) or FRAMES_NOTE in image.info)


def _orientation(image: Image.Image) -> Image.Transpose | None:
    """Find how a picture is turned upright; EXIF that cannot be read says nothing."""
    try:
        return _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # whatever comes to Pillow's mind on damaged EXIF
        return None


def _to_eight_bits(image: Image.Image) -> Image.Image:
    if image.mode in _EIGHT_BITS:
        return image
    if image.mode not in _SIXTEEN_BITS and not (image.mode == "I" and image.format in ("PNG", "PPM")):
        raise ValueError(f"its pixels are of mode {image.mode}, they must have 8 or 16 bits a channel")
    pixels = np.asarray(image)
    upper = Image.fromarray((pixels >> 8).astype(np.uint8))
    if "transparency" in image.info:  # the value that is transparent
        upper.putalpha(Image.fromarray(np.where(pixels == image.info["transparency"], 0, 255).astype(np.uint8)))
    return upper


def to_item(pixels: np.ndarray) -> Item:
    """Convert pixels, uint8 [H, W, C] or [T, H, W, C], to an image or the frames of a clip."""
    if pixels.ndim == 4:
        return [_to_image(frame) for frame in pixels]
    return _to_image(pixels)


def _to_image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def write_png(path: str | os.PathLike[str], pixels: np.ndarray) -> None:
    """Write an image, uint8 [H, W, C], or a clip, uint8 [T, H, W, C]; the file is complete or absent."""
    item = to_item(pixels)
    options: dict[str, Any] = {}
    if isinstance(item, list):
        item, *others = item
        note = PngInfo()
        note.add_text(FRAMES_NOTE, str(len(pixels)))
        # Without a duration: nothing here knows the frame rate, and Pillow merges equal frames that have one.
        options = {"save_all": True, "append_images": others, "pnginfo": note}
    # Encoded in memory: where the disk is full, Pillow says `encoder error -2`.
    encoded = io.BytesIO()
    item.save(encoded, format="png", **options)
    with atomic_path(path) as temporary:
        temporary.write_bytes(encoded.getvalue())


def read_png(path: str | os.PathLike[str]) -> np.ndarray:
    """Read what `write_png` wrote, bit for bit.

    Raises:
        InputError: If the file is damaged.
    """
    with _opened(path) as image:
        count = getattr(image, "n_frames", 1)
        check_memory(4 * count * image.width * image.height, f"{path} of {count} x {image.width}x{image.height} pixels")
        pixels = (
            np.stack([*map(np.asarray, ImageSequence.Iterator(image))]) if _is_animated(image) else np.asarray(image)
        )
        return pixels[..., None] if image.mode == "L" else pixels


def check_png(path: str | os.PathLike[str], shape: tuple[int, ...]) -> None:
    """Check that a file holds a whole image or clip of a size, by its checksums, without decoding it.

    Args:
        path: The file.
        shape: Height, width and channels (1 or 3); frames before them for a clip.

    Raises:
        InputError: If the file is damaged, or holds something else.
    """
    *frames, height, width, channels = shape
    with _opened(path) as image:
        if (image.format, image.size) != ("PNG", (width, height)) or image.mode != ("L" if channels == 1 else "RGB"):
            raise InputError(f"{path} is {image.format} {image.mode} {image.width}x{image.height}")
        if image.info.get(FRAMES_NOTE) != (str(frames[0]) if frames else None):
            raise InputError(f"{path} has {image.info.get(FRAMES_NOTE, 'no')} frames of a clip")
        image.verify()


def is_whole_png(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins and ends as a PNG does, without decoding it."""
    check_file(path)
    with open(path, "rb") as file:
        begins = file.read(len(_SIGNATURE)) == _SIGNATURE
        file.seek(max(file.seek(0, os.SEEK_END) - len(_END), 0))
        return begins and file.read() == _END


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    check_file(path)
    with Path(path).open("rb") as file:
        try:
            with Image.open(file, formats=["png"]) as image:
                yield image
        except InputError:
            raise
        except Exception as error:  # whatever comes to Pillow's mind on damaged files
            raise InputError(f"{path} is damaged ({type(error).__name__}: {error})") from None


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
