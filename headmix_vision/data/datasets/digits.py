"""`digits`: the 1797 handwritten digits of 8 x 8 pixels that scikit-learn carries with it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headmix_vision.data.datasets.base import BatchSource, SplitRequest, canonical_split
from headmix_vision.errors import InputError

SPLIT_SEED = 0


def open_digits(request: SplitRequest) -> "Digits":
    """Open a split of digits."""
    return Digits(request.split, request.channels)


class Digits(BatchSource):
    """Handwritten digits (UCI, test part of "Optical Recognition").

    Values are the official 0..16 divided by 16: float32 [channels, 8, 8], exact. The stratified 80/20 split is fixed.

    Args:
        split: `train`, `validation` or a synonym, or `all`: training digits, then validation digits.
        channels: 1, or 3 equal ones.

    Raises:
        InputError: Another split or number of channels.
    """

    in_memory = True

    def __init__(self, split: str, channels: int = 1) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        if channels not in (1, 3):
            raise InputError(f"digits are images of 1 or 3 channels, asked for {channels}")
        images, targets = load_digits(return_X_y=True)
        train, validation = train_test_split(
            np.arange(len(targets)), test_size=0.2, stratify=targets, random_state=SPLIT_SEED
        )
        parts = {"train": np.sort(train), "validation": np.sort(validation)}
        self.indices = np.concatenate(list(parts.values())) if split == "all" else parts[canonical_split(split)]
        pixels = torch.from_numpy(images[self.indices]).to(torch.float32) / 16
        self.images = pixels.view(-1, 1, 8, 8).expand(-1, channels, -1, -1)
        self.shape = (channels, 8, 8)
        self.targets = targets[self.indices].tolist()
        self.class_names = [str(digit) for digit in range(10)]

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.targets[index]

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        targets = torch.tensor([self.targets[index] for index in indices], dtype=torch.int64)
        return self.images.index_select(0, torch.tensor(indices)), targets

    def name(self, index: int) -> str:
        return f"digits[{self.indices[index]}]"
