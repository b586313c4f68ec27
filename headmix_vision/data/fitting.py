"""Bring images and clips to the size and range that generators take.

C channels, *grid height and width of an image, frames, height and width of a clip.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.functional import pil_to_tensor

from headmix_vision.data.center_crop import center_crop
from headmix_vision.data.datasets.base import RawImage


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
        return to_range(x)


def to_range(pixels: Tensor) -> Tensor:
    """Scale pixels in [0, 1] of any shape to [-1, 1]."""
    return pixels * 2 - 1
