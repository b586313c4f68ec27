"""Bring images and clips to the size and range that models take.

C channels, *grid height and width of an image, frames, height and width of a clip.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from headmix_vision.data.datasets.base import RawImage
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_memory

SHEET_SIDE, SHEET_PIXELS = 4, 32  # frames along a side of a sheet, and their size


def center_crop(image: Image.Image, size: int | tuple[int, int]) -> Image.Image:
    """Scale an image until it just covers `size`, and cut its centre out.

    Halved by box averaging while both sides are at least twice too long, then bicubic: the order of ADM's data loader,
    which decides what "ImageNet at 256 pixels" means.

    Args:
        image: Any PIL image.
        size: Height and width of the result in pixels, or one number for a square.
    """
    height, width = (size, size) if isinstance(size, int) else size
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    enlarged = round(image.width * scale), round(image.height * scale)
    check_memory(8 * math.prod(enlarged), f"a picture of {image.width}x{image.height} pixels, as {width}x{height},")
    image = image.resize(enlarged, Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


class FitImage:
    """Bring an image to a size.

    Pictures are cropped as ADM does, as in `cache_latents` and `evaluate`. Tensors are resized whole: enlarging keeps
    pixels square and hard when the size is a multiple, so that reducing restores the image.

    Args:
        size: Height and width in pixels.
    """

    def __init__(self, size: tuple[int, ...]) -> None:
        self.size = size

    def __call__(self, image: RawImage) -> Tensor:
        """Float32 [C, H, W] in [0, 1], of a PIL image or of a float32 tensor [C, h, w] in [0, 1]."""
        from torchvision.transforms.functional import pil_to_tensor

        if isinstance(image, Tensor):
            return self._resize(image)
        height, width = self.size
        return pil_to_tensor(center_crop(image, (height, width))).float() / 255

    def _resize(self, x: Tensor) -> Tensor:
        if x.shape[1:] == self.size:
            return x
        multiple = all(new % old == 0 for new, old in zip(self.size, x.shape[1:], strict=True))
        mode = "nearest" if multiple else "bilinear"
        return interpolate(x[None], self.size, mode=mode, antialias=mode == "bilinear")[0]


class ImageToRange:
    """Bring an image to the wanted size, flip it and scale it to [-1, 1]; clips have their size already.

    Args:
        size: Height and width in pixels; frames, height and width of clips.
        hflip: Probability of a horizontal flip, of all frames alike.
    """

    def __init__(self, size: tuple[int, ...], hflip: float = 0.0) -> None:
        self.fit = FitImage(size) if len(size) == 2 else None
        self.hflip = hflip

    def __call__(self, image: RawImage) -> Tensor:
        """Float32 [C, *grid] in [-1, 1], of an image (see `FitImage`), or of a clip in [0, 1]."""
        x: Any = image if self.fit is None else self.fit(image)
        if self.hflip and torch.rand(()) < self.hflip:
            x = x.flip(-1)
        return x * 2 - 1


def draw_sheet(frames: Sequence[Image.Image]) -> Image.Image:
    """Lay 16 frames of a clip, at even distances, on a sheet of four rows; each is cropped to 32 pixels."""
    chosen = [frames[number] for number in sheet_numbers(len(frames))]
    sheet = Image.new(chosen[0].mode, (SHEET_SIDE * SHEET_PIXELS,) * 2)
    for place, frame in enumerate(chosen):
        row, column = divmod(place, SHEET_SIDE)
        sheet.paste(center_crop(frame, (SHEET_PIXELS,) * 2), (column * SHEET_PIXELS, row * SHEET_PIXELS))
    return sheet


def sheet_numbers(count: int) -> list[int]:
    """Number the frames of a clip that are on its sheet; a short clip has some of them more than once."""
    return [place * count // SHEET_SIDE**2 for place in range(SHEET_SIDE**2)]


def crop_frames(frames: Sequence[Image.Image], size: Sequence[int]) -> Tensor:
    """Crop each frame as ADM does; float32 [C, T, H, W] in [0, 1]. An empty size leaves them as they are.

    Raises:
        InputError: Frames of several sizes.
    """
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) > 1:
        (width, height), (other_width, other_height) = sizes[:2]
        raise InputError(f"it has frames of {width}x{height} and of {other_width}x{other_height} pixels")
    if size:
        height, width = size
        frames = [center_crop(frame, (height, width)) for frame in frames]
    pixels = np.stack([np.asarray(frame) for frame in frames])
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    return torch.from_numpy(pixels.transpose(3, 0, 1, 2).astype(np.float32)) / 255
