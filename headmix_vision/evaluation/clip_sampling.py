"""Sampling of clips: which of them are scored, and which of their frames."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import check_counts

_CHOICE, _OFFSET = 0, 1  # what random numbers are for


@dataclass(frozen=True)
class ClipSampling:
    """Which clips of a place are scored, and which of their frames.

    Args:
        frames: Frames of a scored clip; all when None, for clips that have equally many.
        stride: Take every `stride`-th frame.
        offset: `first`: from the first frame on; `random`: from any that leaves enough, by (seed, number of the clip).
        count: At most so many clips; all when None.
        choice: `first`: the first ones by name; `random`: any, by the seed.
        mirror: Score each clip a second time, mirrored.
        skip_short: Leave out clips of fewer than `frames` x `stride` frames, and count them; otherwise an error.
        seed: Of what is random.

    Raises:
        InputError: A number below 1.
    """

    frames: int | None = 16
    stride: int = 1
    offset: Literal["first", "random"] = "first"
    count: int | None = None
    choice: Literal["first", "random"] = "first"
    mirror: bool = False
    skip_short: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {"frames": self.frames, "stride": self.stride, "count": self.count}
        check_counts(1, **{name: value for name, value in counts.items() if value is not None})

    @property
    def needed(self) -> int:
        """Frames that a clip must have; StyleGAN-V leaves out those with fewer."""
        assert self.frames is not None
        return self.frames * self.stride

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """Choose among clips, in rising order."""
        if self.count is None or len(numbers) <= self.count:
            return list(numbers)
        if self.choice == "first":
            return list(numbers[: self.count])
        return sorted(random.Random(derive_seed(self.seed, _CHOICE)).sample(list(numbers), self.count))

    def indices(self, number: int, num_frames: int) -> range:
        """Return the numbers of the frames of a clip that are scored."""
        free = num_frames - self.needed + self.stride
        start = 0 if self.offset == "first" else random.Random(derive_seed(self.seed, _OFFSET, number)).randrange(free)
        return range(start, start + self.needed, self.stride)
