"""`fake`: random samples of the network's input size, to try a recipe without data; the label is index % classes."""

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from headmix_vision.data.datasets.base import PreparedSource, RawImage, Source, SplitRequest, canonical_split
from headmix_vision.data.seeding import derive_seed

IMAGE_COUNTS = {"train": 4096, "validation": 512}
NUMBER_COUNT = 4096
_NUMBERS_APART = 61


def open_fake(request: SplitRequest) -> Source:
    """Random pictures for classifiers; random numbers for generators, which may take latents."""
    return FakeNumbers(request) if request.use == "generation" else FakeImages(request)


class FakeImages(Source):
    """PIL images of random pixels."""

    def __init__(self, request: SplitRequest) -> None:
        self.split = canonical_split(request.split)
        self.size = request.grid if request.decoding.mode == "L" else (*request.grid, 3)
        self.class_names = request.numbered_classes

    def __len__(self) -> int:
        return IMAGE_COUNTS[self.split]

    def read(self, index: int) -> tuple[RawImage, int]:
        generator = np.random.default_rng(derive_seed(list(IMAGE_COUNTS).index(self.split), index))
        pixels = generator.integers(0, 256, self.size, dtype=np.uint8)
        return Image.fromarray(pixels), index % len(self.class_names)

    def name(self, index: int) -> str:
        return f"fake {self.split}[{index}]"


class FakeNumbers(PreparedSource):
    """Normal random numbers of the network's input shape, the same ones in every split and epoch.

    Samples are stretches of one row of numbers, so that reading costs nothing.
    """

    in_memory = True

    def __init__(self, request: SplitRequest) -> None:
        self.shape = request.shape
        self.class_names = request.numbered_classes
        count = math.prod(self.shape) + NUMBER_COUNT * _NUMBERS_APART
        self._row = torch.randn(count, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUMBER_COUNT

    def read(self, index: int, draw: int = 0) -> tuple[Tensor, int]:
        start = index * _NUMBERS_APART
        return self._row[start : start + math.prod(self.shape)].view(self.shape), index % len(self.class_names)

    def name(self, index: int) -> str:
        return f"fake[{index}]"
