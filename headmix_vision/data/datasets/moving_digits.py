"""`moving_digits`: clips of a handwritten digit that moves along one axis and turns round at the borders.

The class is the digit and the direction in which it starts: `digit * 4 + direction`. A frame alone tells the digit and
hardly the direction: the digit keeps the start's direction for at least four frames at 8 frames a second, and stands
anywhere that allows it.

B clips, C channels, T frames, H and W pixels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headmix_vision.data.datasets.base import BatchSource, SplitRequest, canonical_split
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError, check_counts, check_positive
from headmix_vision.files.reading import check_memory

DIRECTIONS = ("right", "left", "down", "up")
LENGTHS = {"train": 50_000, "validation": 5_000}
DEFAULT_GRID = (16, 64, 64)
FRAME_RATE = 8.0
DIGIT_SIZE = 8
LEAST_SIZE = 2 * DIGIT_SIZE
SPEEDS = (0.375, 0.75)  # ways from border to border a second
STRAIGHT_S = 3 / FRAME_RATE  # before the first turn, at least


def open_moving_digits(request: SplitRequest) -> "MovingDigits":
    """Open a split at the size, length and frame rate that a network takes."""
    grid = (*request.grid, *DEFAULT_GRID[len(request.grid) :])
    rate = request.clip.rate_of(FRAME_RATE)
    return MovingDigits(request.split, grid, frame_rate=rate, channels=request.channels)


class MovingDigits(BatchSource):
    """The clips of one split; each depends on (seed, split, index) alone and is drawn when it is read.

    The digits come from `Digits`: training and validation clips share no handwriting. A digit is enlarged by a whole
    number to at most half of the canvas's smaller side. Where it is follows from the time in seconds: a longer clip
    goes on where a shorter one ends, and another frame rate shows the same motion.

    Args:
        split: `train` or `validation`, or a synonym.
        grid: T, H and W: frames, and size in pixels.
        seed: Seed of all clips.
        frame_rate: Frames a second.
        channels: 1, or 3 equal ones.
        length: Number of clips; 50,000 for training and 5,000 for validation when None.

    Raises:
        InputError: An unknown split, no room to move, another number of channels, or numbers out of range.
    """

    def __init__(
        self,
        split: str,
        grid: Sequence[int] = DEFAULT_GRID,
        seed: int = 0,
        frame_rate: float = FRAME_RATE,
        channels: int = 1,
        length: int | None = None,
    ) -> None:
        self.split = canonical_split(split)
        self.frames, self.height, self.width = grid
        check_counts(1, frames=self.frames)
        if min(self.height, self.width) < LEAST_SIZE:
            raise InputError(
                f"moving digits of {self.height}x{self.width} have no room, they need at least {LEAST_SIZE} pixels"
            )
        check_positive(frame_rate=frame_rate)
        if channels not in (1, 3):
            raise InputError(f"channels is {channels}, it must be 1 or 3")
        if length is not None:
            check_counts(1, length=length)
        self.frame_rate = frame_rate
        self.channels = channels
        self.shape = (channels, *grid)
        self.length = length or LENGTHS[self.split]
        check_memory(5 * 8 * self.length, f"the layout of {self.length} clips")
        digits = Digits(self.split)
        self.class_names = [f"{digit} {direction}" for digit in digits.class_names for direction in DIRECTIONS]
        targets = np.array(digits.targets)
        # all handwriting sorted by digit, in sixteenths
        sixteenths = (digits.images[np.argsort(targets, kind="stable"), 0] * 16).to(torch.uint8).numpy()
        scale = min(self.height, self.width) // (2 * DIGIT_SIZE)
        self._pictures = sixteenths.repeat(scale, axis=1).repeat(scale, axis=2)
        counts = np.bincount(targets)
        # A row for each clip: the numbers of a clip depend neither on the length of the split nor on the grid.
        drawn = np.random.default_rng(derive_seed(seed, list(LENGTHS).index(self.split))).random((self.length, 5))
        self.labels = (drawn[:, 0] * len(self.class_names)).astype(np.int64)
        digit = self.labels // len(DIRECTIONS)
        self._chosen = (np.cumsum(counts) - counts)[digit] + (drawn[:, 1] * counts[digit]).astype(np.int64)
        self._speed = SPEEDS[0] + drawn[:, 2] * (SPEEDS[1] - SPEEDS[0])
        self._start = drawn[:, 3] * (1 - STRAIGHT_S * self._speed)  # from the border that it moves away from
        self._across = drawn[:, 4]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Clip, float32 [C, T, H, W] in [0, 1], and class, an index into `class_names`."""
        return self.read(index)

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Clips, float32 [B, C, T, H, W] in [0, 1], and classes, int64 [B]."""
        chosen = np.asarray(indices, np.int64)
        for index in chosen[(chosen < 0) | (chosen >= self.length)]:
            raise IndexError(f"clip {index} of {self.length}")
        rows, columns = self.places(chosen)
        clips = np.zeros((len(chosen), self.frames, self.height, self.width), np.uint8)
        size = self._pictures.shape[-1]
        for clip, picture, tops, lefts in zip(clips, chosen, rows.tolist(), columns.tolist(), strict=True):
            for frame, top, left in zip(clip, tops, lefts, strict=True):
                frame[top : top + size, left : left + size] = self._pictures[self._chosen[picture]]
        pixels = torch.from_numpy(clips)[:, None].float() / 16
        return pixels.expand(-1, self.channels, -1, -1, -1), torch.from_numpy(self.labels[chosen])

    def places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First row and first column of the digit in each frame of clips [B], int64 [B, T] each."""
        direction = self.labels[indices, None] % len(DIRECTIONS)
        way = self._start[indices, None] + self._speed[indices, None] * np.arange(self.frames) / self.frame_rate
        along = 1 - np.abs(way % 2 - 1)  # reflected at 0 and 1
        along = np.where(direction % 2 == 0, along, 1 - along)
        across = self._across[indices, None]
        size = self._pictures.shape[-1]
        rows = np.where(direction < 2, across, along) * (self.height - size)
        columns = np.where(direction < 2, along, across) * (self.width - size)
        return rows.round().astype(np.int64), columns.round().astype(np.int64)

    def name(self, index: int) -> str:
        """Name of a clip in messages."""
        return f"moving digits {self.split}[{index}]"
