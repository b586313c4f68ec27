"""Describe the grid that tokens lie on, and the prefix tokens in front of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from headmix_vision.errors import InputError
from headmix_vision.ops.dispatch import as_axes, check_size, kept


@dataclass(frozen=True)
class TokenGrid:
    """A 1-D, 2-D or 3-D grid of tokens in raster order, preceded by prefix tokens (class, register, distillation).

    Args:
        shape: tokens along each axis, (H, W) for images or (T, H, W) for videos.
        num_prefix_tokens: tokens in front of the grid.
        repeats: pseudo-tokens of each token, one after the other; more than 1 with a head mix that makes several. They
            share the position and the block of their token.

    Attributes:
        num_tokens: N, the length of the sequence, prefix tokens and pseudo-tokens included.

    Raises:
        InputError: if ``shape`` is not one to three positive whole numbers, or another number is none or out of range.
    """

    shape: tuple[int, ...]
    num_prefix_tokens: int = 0
    repeats: int = 1
    num_tokens: ClassVar[int]  # of an instance, but no argument of it

    def __post_init__(self) -> None:
        as_axes("a token grid", self.shape)
        if not 1 <= len(self.shape) <= 3 or any(size < 1 for size in self.shape):
            raise InputError(
                f"a token grid must have one to three axes of at least one token, all positive, got {self.shape}."
            )
        check_size("num_prefix_tokens", self.num_prefix_tokens, 0)
        check_size("repeats", self.repeats, 1)
        num_tokens = self.repeats * (self.num_prefix_tokens + self.num_grid_tokens)
        object.__setattr__(self, "num_tokens", num_tokens)

    @classmethod
    def of(cls, grid: TokenGrid | tuple[int, ...] | list[int], num_prefix_tokens: int = 0) -> TokenGrid:
        """Return a grid as it is, or build it from a shape and a number of prefix tokens."""
        return grid if isinstance(grid, TokenGrid) else cls(as_axes("a token grid", grid), num_prefix_tokens)

    @property
    def num_grid_tokens(self) -> int:
        """Tokens of the grid, each counted once, prefix tokens left out."""
        return math.prod(self.shape)

    def repeat(self, times: int) -> TokenGrid:
        """Return the grid with ``times`` pseudo-tokens in the place of each."""
        return self if times == 1 else repeated(self, times)

    def __str__(self) -> str:
        prefix = f" plus {self.num_prefix_tokens} prefix tokens" if self.num_prefix_tokens else ""
        times = f", {self.repeats} places each" if self.repeats > 1 else ""
        return f"a {'x'.join(map(str, self.shape))} grid{prefix}{times}"


# Functions of a module, as torch.compile does not read the closures of methods.
@kept
def repeated(grid: TokenGrid, times: int) -> TokenGrid:
    """Return the grid with ``times`` pseudo-tokens in the place of each."""
    return replace(grid, repeats=grid.repeats * times)


@kept
def with_shape(grid: TokenGrid, shape: tuple[int, ...]) -> TokenGrid:
    """Return the grid of another shape with the same prefix tokens and repeats."""
    return replace(grid, shape=shape)
