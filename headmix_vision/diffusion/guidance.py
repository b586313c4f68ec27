"""Classifier-free guidance (arXiv 2207.12598), optionally in an interval of noise levels (arXiv 2404.07724)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headmix_vision.errors import InputError

CHANNELS = ("all", "first_three")


@dataclass(frozen=True)
class Guidance:
    """Moves the prediction away from that without a class.

    Args:
        scale: 1 leaves the prediction as it is (and costs nothing), 0 forgets the class.
        interval: Noise levels, from 0 (data) to 1 (noise), within which guidance acts.
        channels: Guide `all` channels, or the `first_three`, as DiT and SiT did for their published figures.

    Raises:
        InputError: For a negative scale, an interval outside [0, 1] or unknown channels.
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    channels: Literal["all", "first_three"] = "all"

    def __post_init__(self) -> None:
        if not self.scale >= 0:
            raise InputError(f"guidance scale must be at least 0, got {self.scale}")
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise InputError(f"guidance interval must be within 0 and 1, low before high, got {low} and {high}")
        if self.channels not in CHANNELS:
            raise InputError(f"guidance channels must be one of {CHANNELS}, got {self.channels!r}")

    @property
    def enabled(self) -> bool:
        """Whether guidance acts at any noise level."""
        return self.scale != 1

    def acts_at(self, level: float) -> bool:
        """Tells whether guidance acts at a noise level."""
        return self.enabled and self.interval[0] <= level <= self.interval[1]

    def combine(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        """Combines two predictions [B, C, *grid], without the channels of a learned variance, into the guided one."""
        guided = torch.lerp(unconditional, conditional, self.scale)
        if self.channels == "first_three":
            guided = torch.cat([guided[:, :3], conditional[:, 3:]], dim=1)
        return guided
