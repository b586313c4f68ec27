"""Limit attention to the tokens around each token of a grid.

N tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headmix_vision.errors import InputError, is_whole
from headmix_vision.ops.dispatch import as_axes, is_plain
from headmix_vision.ops.runtime import cached_tables
from headmix_vision.ops.token_grid import TokenGrid


@dataclass(frozen=True)
class TokenWindow:
    """A window of tokens around each token of a :class:`~headmix_vision.ops.TokenGrid`.

    Along an axis with a window of ``w`` tokens, token ``i`` sees tokens ``i - w // 2`` to ``i + w // 2``, fewer at the
    borders. Prefix tokens see all tokens and are seen by all. Pseudo-tokens see what their token sees.

    Instances are hashable and compare by value.

    Args:
        grid: the tokens.
        extent: odd number of tokens along each axis, as many axes as the grid.

    Raises:
        InputError: if the axes do not match, or a number is even, below 1 or larger than its axis.
    """

    grid: TokenGrid
    extent: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.grid, TokenGrid):
            raise InputError(f"grid must be a TokenGrid, got {self.grid!r}.")
        as_axes("window", self.extent)
        shape = self.grid.shape
        if len(self.extent) != len(shape):
            raise InputError(f"window {self.extent} and token grid {shape} must have the same number of axes.")
        if any(size < 1 or size % 2 == 0 for size in self.extent):
            raise InputError(f"window {self.extent} must be odd numbers of tokens, with the same to either side.")
        if any(size > axis for size, axis in zip(self.extent, shape, strict=True)):
            raise InputError(f"window {self.extent} is larger than the token grid {shape}.")

    @classmethod
    def of(cls, grid: TokenGrid, extent: int | tuple[int, ...] | list[int]) -> TokenWindow:
        """Make a window of the same extent along all axes, or of one for each."""
        return cls(grid, as_axes("window", (extent,) * len(grid.shape) if is_whole(extent) else extent))

    @property
    def num_pairs(self) -> int:
        """Pairs of places that see each other, prefix tokens and repeats included."""
        prefix, tokens = self.grid.num_prefix_tokens, self.grid.num_grid_tokens
        inside = math.prod(_pairs(g, w) for g, w in zip(self.grid.shape, self.extent, strict=True))
        return self.grid.repeats**2 * (prefix * (prefix + 2 * tokens) + inside)

    def mask(self, like: Tensor) -> Tensor:
        """Return which place (row) sees which (column): bool [N, N] on the device of ``like``."""
        return _cached_mask(self, like.device) if is_plain(like) else _build_mask(self, like.device)


def _pairs(axis: int, extent: int) -> int:
    """Count the pairs of tokens along one axis that are at most half a window apart."""
    half = extent // 2
    return axis * (2 * half + 1) - half * (half + 1)


def _build_mask(window: TokenWindow, device: torch.device) -> Tensor:
    prefix, repeats = window.grid.num_prefix_tokens, window.grid.repeats
    mask = torch.ones((1, 1), dtype=torch.bool, device=device)
    for axis, extent in zip(window.grid.shape, window.extent, strict=True):
        place = torch.arange(axis, device=device)
        near = (place[:, None] - place).abs() <= extent // 2
        mask = (mask[:, None, :, None] & near[:, None, :]).flatten(2).flatten(0, 1)
    mask = torch.nn.functional.pad(mask, (prefix, 0, prefix, 0), value=True)
    return mask.repeat_interleave(repeats, 0).repeat_interleave(repeats, 1) if repeats > 1 else mask


@partial(cached_tables, size=8)  # a mask has N x N numbers
def _cached_mask(window: TokenWindow, device: torch.device) -> Tensor:
    return _build_mask(window, torch.device("cpu")).to(device)
