"""Which files are pictures, and what pixels they have, alike for every command.

A picture is the first frame of its file, upright as its EXIF says, on a background where it is transparent, with 8 bits
a channel: of 16 the upper 8. CMYK is converted by Pillow's formula, and embedded colour profiles are not applied.
"""

import importlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageColor, ImageSequence, UnidentifiedImageError

from headmix_vision.errors import InputError, explain
from headmix_vision.files.limits import check_file, check_memory
from headmix_vision.files.png import FRAMES_NOTE, Item

Source = str | os.PathLike[str] | bytes | BinaryIO
"""A file of a picture: its path, its bytes, or the open file."""

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
            for.
        SyntaxError: A checksum of a PNG is wrong.
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
    except Image.DecompressionBombError as error:
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
