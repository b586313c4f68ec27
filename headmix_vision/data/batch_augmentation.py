"""Flip, shift and erase the images of a batch at once, each by its own random numbers.

B images, C channels, H and W pixels.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import Normalize

from headmix_vision.data.augmentation import Augmentation
from headmix_vision.data.batches import RandomBatch

_DRAWN = 8  # numbers of an image
_AREA, _ASPECT = (0.02, 1 / 3), 0.3  # of what is erased, as in Zhong et al. (2017) and timm


class BatchAugmentation(RandomBatch):
    """Flip, shift by whole pixels onto black, normalise, and erase a rectangle to zero, the mean.

    A rectangle that is longer than the image ends at its border; timm draws another one.

    Args:
        mean, std: Of the normalisation.
        augmentation: The probabilities, and the share of the size up to which images are shifted.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], augmentation: Augmentation) -> None:
        self.normalize = Normalize(mean, std, inplace=True)
        self.augmentation = augmentation

    def __call__(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        drawn = uniform_numbers(seeds, _DRAWN)
        height, width = images.shape[-2:]
        rows, columns = torch.arange(height), torch.arange(width)
        down, right = (self._shift(drawn[:, n], size) for n, size in ((0, height), (1, width)))
        flipped = (drawn[:, 2] < self.augmentation.hflip)[:, None]
        y = rows - down[:, None]  # [B, H], rows to read
        x = columns - right[:, None]  # [B, W]
        inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None]
        x = x.clamp(0, width - 1)
        x = torch.where(flipped, width - 1 - x, x)
        read = torch.arange(len(images))[:, None, None], slice(None), y.clamp(0, height - 1)[:, :, None], x[:, None]
        moved = images[read].movedim(-1, 1) * inside[:, None]
        return self.normalize(moved) * ~self._erased(drawn[:, 3:], height, width)[:, None]

    def _shift(self, drawn: Tensor, size: int) -> Tensor:
        """Pixels of the shift, as torchvision's RandomAffine rounds them: [B]."""
        return ((2 * drawn - 1) * self.augmentation.translate * size).round().long()

    def _erased(self, drawn: Tensor, height: int, width: int) -> Tensor:
        """Which pixels are erased: [B, H, W]."""
        area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * drawn[:, 0])
        aspect = _ASPECT ** (2 * drawn[:, 1] - 1)
        chosen = drawn[:, 2] < self.augmentation.reprob
        sides = []
        for size, length, place in ((height, area * aspect, drawn[:, 3]), (width, area / aspect, drawn[:, 4])):
            length = length.sqrt().round().clamp(max=size)
            start = (place * (size - length + 1)).floor()[:, None]
            at = torch.arange(size)
            sides.append((at >= start) & (at < start + length[:, None]))
        return sides[0][:, :, None] & sides[1][:, None] & chosen[:, None, None]


def batch_augmentation(data_config: dict[str, Any], augmentation: Augmentation) -> BatchAugmentation | None:
    """Return the augmentation of whole batches; None where images need steps that it lacks.

    Args:
        data_config: timm's resolved data configuration (mean, std).
        augmentation: What to do; checked by its `check`.
    """
    rest = replace(augmentation, hflip=0.0, translate=0.0, reprob=0.0)
    erases_otherwise = augmentation.reprob and (augmentation.remode, augmentation.recount) != ("const", 1)
    if not rest.is_idle or erases_otherwise:
        return None
    return BatchAugmentation(data_config["mean"], data_config["std"], augmentation)


def uniform_numbers(seeds: Sequence[int], count: int) -> Tensor:
    """Draw uniform numbers in [0, 1) for each seed: float64 [len(seeds), count].

    They are the outputs of SplitMix64 (Steele et al., 2014), which starts at the seed; the upper 53 bits count.
    """
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = np.array(seeds, dtype=np.uint64)[:, None] + steps
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) / 2**53)
