"""`canvas`: boards of real digits whose class depends on which digit stands where.

A canvas has 3 x 3 regions. Each is filled with handwritten samples of one digit from 1 to 9, every digit in one
region, and leaves one cell free. In one of the free cells stands a zero. The class is the digit of the region in which
the zero stands (rule `same`), or of the region opposite to it through the centre (rule `opposite`).

Every canvas holds the same collection of digits, so a summary of what is on it, without where, says nothing about the
class. A fifth of the zeros stand in one home region, the others in any region alike: reading the digit that the home
region points to is right in 29 % of all cases, and it is the first thing that a model learns.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from headmix_vision.data.datasets.base import BatchSource, SplitRequest, canonical_split
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.reading import check_memory

RULES = ("same", "opposite")
LENGTHS = {"train": 50_000, "validation": 5_000}
DIGIT_SIZE = 8
CELL = 10
REGIONS = 3
FREE = -1
NOT_DRAWN = -1
HOME = {"same": 4, "opposite": 2}
HOME_SHARE = 0.2
DEFAULT_SIZE = 64


def open_canvas(request: SplitRequest) -> "CanvasDigits":
    """Open `canvas` or `canvas/RULE` at a size in pixels.

    Raises:
        InputError: The size is not a square, or is too small.
    """
    height, width = request.grid or (DEFAULT_SIZE, DEFAULT_SIZE)
    if height != width:
        raise InputError(f"dataset {request.name!r} is square, the model takes {height}x{width} pixels")
    return CanvasDigits(request.split, height, rule=request.variant or "same", channels=request.channels)


class CanvasDigits(BatchSource):
    """The canvases of one split; each depends on (seed, split, index) alone and is drawn when it is read.

    The digits come from `Digits`: training and validation canvases share no handwriting. 64 pixels hold regions of
    2 x 2 cells, 96 pixels of 3 x 3, 128 pixels of 4 x 4. Which handwriting stands where is remembered (72 bytes a
    canvas of 64 pixels), so that from the second epoch on a batch is one look-up.

    Args:
        split: `train` or `validation`, or a synonym.
        size: Height and width in pixels.
        seed: Seed of all canvases.
        rule: `same` or `opposite`.
        channels: 1, or 3 equal ones.
        length: Number of canvases; 50,000 for training and 5,000 for validation when None.

    Raises:
        InputError: An unknown split or rule, no room for regions of 2 x 2 cells, another number of channels, no
            canvases, or more than the memory holds.
    """

    def __init__(
        self,
        split: str,
        size: int = DEFAULT_SIZE,
        seed: int = 0,
        rule: str = "same",
        channels: int = 1,
        length: int | None = None,
    ) -> None:
        self.split = canonical_split(split)
        if rule not in RULES:
            raise InputError(f"rule is {rule!r}, it must be one of {', '.join(RULES)}")
        self.region_cells = size // (CELL * REGIONS)
        if not isinstance(size, int) or self.region_cells < 2:
            raise InputError(f"size is {size}, a canvas needs at least {2 * CELL * REGIONS} pixels")
        if channels not in (1, 3):
            raise InputError(f"channels is {channels}, it must be 1 or 3")
        if length is not None:
            check_counts(1, length=length)
        self.size = size
        self.seed = seed
        self.rule = rule
        self.channels = channels
        self.shape = (channels, size, size)
        self.length = length or LENGTHS[self.split]
        self.class_names = [str(digit) for digit in range(1, 10)]
        digits = Digits(self.split)
        targets = np.array(digits.targets)
        # all handwriting sorted by digit, in sixteenths, with the border of its cell; the last picture is a free cell
        order = np.argsort(targets, kind="stable")
        sixteenths = (digits.images[order, 0] * 16).to(torch.uint8).numpy()
        border = (CELL - DIGIT_SIZE) // 2
        self._pictures = np.pad(sixteenths, ((0, 1), (border, border), (border, border)))
        self._counts = np.bincount(targets)
        self._first = np.cumsum(self._counts) - self._counts
        cells = REGIONS * self.region_cells
        self._start = (size - cells * CELL) // 2
        check_memory(self.length * (2 * cells**2 + 1), f"the layout of {self.length} canvases of {size} pixels")
        self._chosen = np.zeros((self.length, cells, cells), np.int16)
        self._labels = np.full(self.length, NOT_DRAWN, np.int8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Image, float32 [channels, size, size] in [0, 1], and class, an index into `class_names`."""
        return self.read(index)

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images, float32 [B, channels, size, size], and classes, int64 [B], of several canvases."""
        places = np.asarray(indices, np.int64)
        for index in places[(places < 0) | (places >= self.length)]:
            raise IndexError(f"canvas {index} of {self.length}")
        for index in places[self._labels[places] == NOT_DRAWN].tolist():
            self._draw(index)
        board = rearrange(self._pictures[self._chosen[places]], "b rows columns h w -> b (rows h) (columns w)")
        images = np.zeros((len(places), 1, self.size, self.size), np.uint8)
        middle = slice(self._start, self._start + board.shape[1])
        images[:, 0, middle, middle] = board
        pixels = torch.from_numpy(images).float() / 16
        return pixels.expand(-1, self.channels, -1, -1), torch.from_numpy(self._labels[places].astype(np.int64))

    def name(self, index: int) -> str:
        """Name of a canvas in messages."""
        return f"canvas {self.split}[{index}]"

    def board(self, index: int) -> tuple[NDArray[np.int64], int]:
        """Digits of a canvas, int64 [cells, cells] with -1 for a free cell, and its class."""
        return self._board(self._generator(index))

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self.seed, list(LENGTHS).index(self.split), index))

    def _draw(self, index: int) -> None:
        generator = self._generator(index)
        board, label = self._board(generator)
        written = np.maximum(board, 0)
        chosen = self._first[written] + (generator.random(board.shape) * self._counts[written]).astype(np.int64)
        self._chosen[index] = np.where(board == FREE, len(self._pictures) - 1, chosen)
        self._labels[index] = label

    def _board(self, generator: np.random.Generator) -> tuple[NDArray[np.int64], int]:
        n, regions = self.region_cells, REGIONS * REGIONS
        digits = generator.permutation(regions) + 1
        zero = HOME[self.rule] if generator.random() < HOME_SHARE else int(generator.integers(regions))
        free = generator.integers(0, n * n, regions)
        cells: NDArray[Any] = np.repeat(digits[:, None], n * n, axis=1)  # [regions, cells of a region]
        cells[np.arange(regions), free] = FREE
        cells[zero, free[zero]] = 0
        board = rearrange(cells, "(R C) (r c) -> (R r) (C c)", R=REGIONS, r=n)
        answer = zero if self.rule == "same" else regions - 1 - zero
        return board, int(digits[answer]) - 1
