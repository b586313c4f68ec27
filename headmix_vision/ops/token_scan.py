"""Set the order in which a recurrent op reads a raster-ordered token sequence.

N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.ops.dispatch import is_plain
from headmix_vision.ops.runtime import cached_tables
from headmix_vision.ops.token_grid import TokenGrid

SCAN_ORDERS = ("row_major", "column_major")


class ScanTables:
    """The index tables of a scan; int64 on one device.

    Attributes:
        order: [N], the token read at each step.
        inverse: [N], the step at which each token is read; computed from the order on first use, if not given.
    """

    def __init__(self, order: Tensor, inverse: Tensor | None = None) -> None:
        self.order = order
        if inverse is not None:
            self.inverse = inverse

    @cached_property
    def inverse(self) -> Tensor:
        return self.order.argsort()


@dataclass(frozen=True)
class TokenScan:
    """An order of the tokens of a :class:`~headmix_vision.ops.TokenGrid`.

    A scan that is not reversed reads the grid and then the prefix tokens (class, register, distillation), which so see
    the whole grid. Its reverse reads all tokens the other way round: the prefix tokens first and then the grid. The
    pseudo-tokens of a token are read one after the other, first to last in either direction.

    Instances are hashable and compare by value.

    Args:
        grid: the tokens.
        order: ``"row_major"``, the last axis runs fastest, or ``"column_major"``, the first axis runs fastest.
        reverse: read the tokens backwards.

    Raises:
        InputError: if the order is unknown.
    """

    grid: TokenGrid
    order: str = "row_major"
    reverse: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.grid, TokenGrid):
            raise InputError(f"grid must be a TokenGrid, got {self.grid!r}; TokenScan.from_grid takes a shape.")
        if not isinstance(self.reverse, bool):
            raise InputError(f"reverse must be True or False, got {self.reverse!r}.")
        if self.order not in SCAN_ORDERS:
            raise InputError(f"scan order must be one of {SCAN_ORDERS}, got {self.order!r}.")

    @classmethod
    def from_grid(
        cls,
        grid: TokenGrid | tuple[int, ...] | list[int],
        order: str = "row_major",
        reverse: bool = False,
        num_prefix_tokens: int = 0,
    ) -> TokenScan:
        """Choose an order of a token grid.

        Args:
            grid: tokens along each axis, (H, W) for images or (T, H, W) for videos; or a complete grid.
            order: ``"row_major"``, the last axis runs fastest, or ``"column_major"``, the first axis runs fastest.
            reverse: read the whole sequence backwards.
            num_prefix_tokens: tokens in front of a grid that is given by its axes.

        Raises:
            InputError: if the grid is not one to three positive numbers, or the order is unknown.
        """
        return cls(TokenGrid.of(grid, num_prefix_tokens), order, reverse)

    @property
    def num_tokens(self) -> int:
        """N, prefix tokens and repeats included."""
        return self.grid.num_tokens

    @property
    def is_raster(self) -> bool:
        """Return whether tokens are read in the order in which they lie in memory."""
        return self.order == "row_major" and not self.reverse and not self.grid.num_prefix_tokens

    def tables(self, like: Tensor) -> ScanTables:
        """Return the index tables on the device of ``like``, cached for plain tensors as in ``TokenBlocks``."""
        return _cached_tables(self, like.device) if is_plain(like) else _build_tables(self, like.device)


def _build_tables(scan: TokenScan, device: torch.device) -> ScanTables:
    shape, prefix, tokens = scan.grid.shape, scan.grid.num_prefix_tokens, scan.grid.num_grid_tokens
    order, steps = torch.arange(tokens, device=device), torch.arange(tokens, device=device)
    if scan.order == "column_major":
        axes = tuple(reversed(range(len(shape))))
        order = order.view(shape).permute(axes).flatten()
        steps = steps.view(shape[::-1]).permute(axes).flatten()
    first = torch.arange(prefix, device=device)
    order, inverse = torch.cat([order + prefix, first]), torch.cat([first + tokens, steps])
    if scan.reverse:
        order, inverse = order.flip(0), prefix + tokens - 1 - inverse
    if scan.grid.repeats > 1:
        each = torch.arange(scan.grid.repeats, device=device)
        order, inverse = ((x[:, None] * scan.grid.repeats + each).flatten() for x in (order, inverse))
    return ScanTables(order, inverse)


@cached_tables
def _cached_tables(scan: TokenScan, device: torch.device) -> ScanTables:
    tables = _build_tables(scan, torch.device("cpu"))
    return ScanTables(tables.order.to(device), tables.inverse.to(device))
