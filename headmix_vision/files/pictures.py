"""Which files are pictures: what Pillow reads, with its plug-ins for HEIC and JPEG XL where they are installed."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from headmix_vision.errors import InputError, explain
from headmix_vision.files.png import FRAMES_NOTE, Item, read_item

# EPS starts a program, the others are read by Pillow's header alone
_NOT_PICTURES = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
_EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
_ANIMATED = ("AVIF", "GIF", "PNG", "WEBP")  # other formats hold pages or views


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


@cache
def picture_formats() -> tuple[str, ...]:
    """Names of Pillow's formats that are read as pictures."""
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


def decode(path: Path) -> Item:
    """Decode a picture, or the frames of an animated PNG; InputError where that cannot be."""
    with readable(path), Image.open(path) as image:
        item = read_item(image)
        check_depth(image)
    return item


def check_depth(image: Image.Image) -> None:
    """Raises ValueError for a picture of more than 8 bits, which Pillow would clip to white."""
    if image.mode not in _EIGHT_BIT_MODES:
        raise ValueError(f"it is of mode {image.mode}, images have 8 bits")


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """Converts a decoded picture to `L` or `RGB`; ValueError if it has more than 8 bits."""
    check_depth(image)
    return image.convert(mode)


def is_clip(path: Path) -> bool:
    """Tell whether a picture is animated, or a clip of one frame that `write_png` wrote."""
    with readable(path), Image.open(path, formats=picture_formats()) as image:
        return _is_clip(image)


def _is_clip(image: Image.Image) -> bool:
    return image.format in _ANIMATED and (getattr(image, "is_animated", False) or FRAMES_NOTE in image.info)
