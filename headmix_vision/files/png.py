"""Pixels as lossless PNG files: an image as a PNG, a clip as an animated PNG.

T frames, H and W pixels, C channels (1 or 3); uint8, channels last.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence
from PIL.PngImagePlugin import PngInfo

from headmix_vision.errors import InputError
from headmix_vision.files.atomic import atomic_path
from headmix_vision.files.limits import check_file, check_memory

Item = Image.Image | list[Image.Image]
"""An image, or the frames of a clip."""
_SIGNATURE, _END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
FRAMES_NOTE = "headmix_vision frames"
"""Name of a note in the file, which tells a clip of one frame from an image."""


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
        is_clip = getattr(image, "is_animated", False) or FRAMES_NOTE in image.info
        count = getattr(image, "n_frames", 1)
        check_memory(4 * count * image.width * image.height, f"{path} of {count} x {image.width}x{image.height} pixels")
        pixels = np.stack([*map(np.asarray, ImageSequence.Iterator(image))]) if is_clip else np.asarray(image)
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
