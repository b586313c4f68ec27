"""`canvas`: boards of real digits on which only the comparison of distant places tells the class.

A canvas is a board of handwritten digits, one in each cell, in two halves of P cells. Both halves hold the same
collection of digits. The places of exactly one digit are the same in the left and in the right half: that digit is
the class. Every other digit never stands opposite itself.

Neither the collection of digits, nor that of either half, nor the digit of any single place says anything about the
class, all of them being distributed alike for every class; pairs of places do. So a model has to compare each place
with the one half a board away: P different comparisons, more than one summary of all tokens has room for.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from headmix_vision.data.seeding import derive_seed
from headmix_vision.data.sources import Digits, canonical_split

CLASSES = 10
DIGIT_SIZE = 8
CELL = 10
LENGTHS = {"train": 50_000, "validation": 5_000}


class CanvasDigits(Dataset[tuple[Tensor, int]]):
    """The canvases of one split; each depends on (seed, split, index) alone and is drawn when it is read.

    The digits are those of `Digits`: training and validation canvases share no handwriting.

    Args:
        split: `train` or `validation`, or a synonym.
        size: Height and width in pixels.
        seed: Seed of all canvases.
        cell: Height and width of a cell in pixels, at least 8; the digit lies anywhere in it. 64 pixels have 6 x 6
            cells of 10, 128 pixels 12 x 12.
        channels: 1, or 3 equal ones.
        length: Number of canvases; 50,000 for training and 5,000 for validation when None.

    Raises:
        ValueError: An unknown split, a cell smaller than a digit, fewer than ten cells in a half, no canvases.
    """

    def __init__(
        self,
        split: str,
        size: int = 64,
        seed: int = 0,
        cell: int = CELL,
        channels: int = 1,
        length: int | None = None,
    ) -> None:
        self.split = canonical_split(split)
        if cell < DIGIT_SIZE:
            raise ValueError(f"cell is {cell}, it must be at least {DIGIT_SIZE} pixels, the size of a digit")
        rows, columns = size // cell, size // cell // 2 * 2
        if rows * columns < 2 * CLASSES:
            raise ValueError(f"a canvas of {size} pixels has {rows * columns} cells of {cell}, it needs {2 * CLASSES}")
        if length is not None and length < 1:
            raise ValueError(f"length is {length}, it must be at least 1")
        if channels not in (1, 3):
            raise ValueError(f"channels is {channels}, it must be 1 or 3")
        self.size = size
        self.seed = seed
        self.cell = cell
        self.channels = channels
        self.length = length or LENGTHS[self.split]
        self.grid = rows, columns
        self.class_names = [str(digit) for digit in range(CLASSES)]
        digits = Digits(self.split)
        targets = np.array(digits.targets)
        self._pixels = digits.images[:, 0].numpy()
        self._writings = [np.flatnonzero(targets == digit) for digit in range(CLASSES)]
        self._counts = np.array([len(writings) for writings in self._writings])
        self._start = np.concatenate([[0], np.cumsum(self._counts)[:-1]])
        self._by_digit = np.concatenate(self._writings)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Image, float32 [channels, size, size] in [0, 1], and class."""
        if not 0 <= index < self.length:
            raise IndexError(f"canvas {index} of {self.length}")
        generator = self._generator(index)
        board, label = self._board(generator)
        image = torch.from_numpy(self._draw(board, generator))
        return image.expand(self.channels, -1, -1), label

    read = __getitem__

    def name(self, index: int) -> str:
        """What to call a canvas in a message."""
        return f"canvas {self.split}[{index}]"

    def board(self, index: int) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
        """Digits, int64 [rows, columns], and class of a canvas."""
        return self._board(self._generator(index))

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self.seed, list(LENGTHS).index(self.split), index))

    def _board(self, generator: np.random.Generator) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
        rows, columns = self.grid
        pairs = rows * columns // 2
        label = int(generator.integers(CLASSES))
        # the same collection in both halves: each digit equally often, the rest of the cells at random
        rest = generator.permutation(CLASSES)[: pairs % CLASSES]
        left = generator.permutation(np.concatenate([np.repeat(np.arange(CLASSES), pairs // CLASSES), rest]))
        right = left.copy()
        others = np.flatnonzero(left != label)
        right[others] = _arrange_apart(left[others], generator)
        halves = [half.reshape(rows, columns // 2) for half in (left, right)]
        return np.concatenate(halves, axis=1), label

    def _draw(
        self, board: np.ndarray[Any, np.dtype[np.int64]], generator: np.random.Generator
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        rows, columns = self.grid
        chosen = self._start[board] + (generator.random(board.shape) * self._counts[board]).astype(np.int64)
        digits = self._pixels[self._by_digit[chosen]]  # [rows, columns, 8, 8]
        margin = self.size - np.array(self.grid) * self.cell
        top, left = margin // 2
        corner_y = top + np.arange(rows)[:, None] * self.cell
        corner_x = left + np.arange(columns)[None, :] * self.cell
        if self.cell > DIGIT_SIZE:
            offset_y, offset_x = generator.integers(0, self.cell - DIGIT_SIZE + 1, (2, rows, columns))
            corner_y, corner_x = corner_y + offset_y, corner_x + offset_x
        inside = np.arange(DIGIT_SIZE)
        y = np.broadcast_to(corner_y, self.grid)[..., None, None] + inside[:, None]
        x = np.broadcast_to(corner_x, self.grid)[..., None, None] + inside
        canvas = np.zeros((self.size, self.size), np.float32)
        canvas[y, x] = digits
        return canvas


def _arrange_apart(
    digits: np.ndarray[Any, np.dtype[np.int64]], generator: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A random order of `digits` [P] in which no place holds the digit it held; no digit may fill half of them."""
    arranged = generator.permutation(digits)
    before, after = digits.tolist(), arranged.tolist()
    for place in np.flatnonzero(digits == arranged).tolist():
        while before[place] == after[place]:
            other = int(generator.integers(len(before)))
            if after[other] != before[place] and after[place] != before[other]:
                after[place], after[other] = after[other], after[place]
    return np.array(after)
