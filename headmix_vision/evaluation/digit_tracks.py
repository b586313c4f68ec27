"""Places of the digit in the frames of `moving_digits`.

Shapes: B clips, C channels, T frames, H and W pixels, S pixels of a digit's side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from headmix_vision.data.datasets.moving_digits import DIGIT_SIZE
from headmix_vision.errors import InputError

_INK = 0.3  # of the brightest pixel
_TIE = 0.999  # of the most ink: windows that hold the whole digit, which has empty borders


@dataclass(frozen=True)
class Tracks:
    """The digit of each frame.

    Args:
        crops: uint8 [B, C, T, S, S].
        places: First row and first column of the crops before rounding, float32 [B, T, 2], in pixels.
    """

    crops: Tensor
    places: Tensor


def find_digits(clips: Tensor) -> Tracks:
    """Cut out the window of a digit's size that holds the most ink; the middle one of several that hold it all.

    Ink is what is brighter than 30 % of the brightest pixel; windows may stand out of the frame by half of a digit.

    Args:
        clips: uint8 [B, C, T, H, W].

    Raises:
        InputError: Frames smaller than two digits.
    """
    batch, _, frames, height, width = clips.shape
    size = digit_size(height, width)
    edge = size // 2
    pixels = clips.transpose(1, 2).flatten(0, 1)  # [B * T, C, H, W]
    bright = pixels.float().mean(1)
    ink = (bright - _INK * bright.amax((1, 2), keepdim=True)).relu()
    held = _windows(height, size).to(ink) @ ink @ _windows(width, size).to(ink).T  # [B * T, H + 1, W + 1]
    tied = (held >= _TIE * held.amax((1, 2), keepdim=True)).float()
    rows, columns = (torch.arange(length, device=clips.device, dtype=torch.float32) for length in held.shape[1:])
    count = tied.sum((1, 2))
    places = torch.stack([(tied.sum(2) * rows).sum(1) / count, (tied.sum(1) * columns).sum(1) / count], 1)
    row, column = places.round().long().unbind(1)
    windows = pad(pixels, (edge,) * 4).unfold(2, size, 1).unfold(3, size, 1)  # [B * T, C, H + 1, W + 1, S, S]
    crops = windows[torch.arange(len(pixels), device=clips.device), :, row, column]
    return Tracks(crops.unflatten(0, (batch, frames)).transpose(1, 2), (places - edge).unflatten(0, (batch, frames)))


def _windows(length: int, size: int) -> Tensor:
    """Which places of an axis each window holds, float32 [length + 1, length]: summing by them is a matrix product."""
    offsets = torch.arange(length) - torch.arange(length + 1)[:, None] + size // 2
    return ((offsets >= 0) & (offsets < size)).float()


def digit_size(height: int, width: int) -> int:
    """S on a canvas of a size, as `moving_digits` draws it; InputError where it has no room."""
    scale = min(height, width) // (2 * DIGIT_SIZE)
    if not scale:
        raise InputError(f"clips are {width}x{height} pixels, moving digits need at least {2 * DIGIT_SIZE}")
    return scale * DIGIT_SIZE
