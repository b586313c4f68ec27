"""Cut a raster-ordered token sequence into blocks (the "token-level heads" of MHLA), and gather tokens by tables.

B batch, N tokens, H heads, D head dim, M blocks, n the largest number of tokens in one block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.ops.dispatch import apply_of, as_axes, is_plain, out_of_dead_transformation
from headmix_vision.ops.runtime import cached_tables
from headmix_vision.ops.symbolic_sizes import is_symbolic, larger
from headmix_vision.ops.token_grid import TokenGrid
from headmix_vision.ops.token_ranks import SEQUENCE, TokenRanks


class BlockTables(NamedTuple):
    """The index tables of a :class:`TokenBlocks` on one device, int64 where nothing else is said.

    Attributes:
        block_of_token: [N], the block of each token.
        tokens: [M, n], the tokens of each block in raster order, -1 where a block has fewer than n.
        slot_of_token: [N], the flat position of each token in ``tokens``.
        places: [M * n], ``tokens`` with 0 in the place of -1.
        absent: bool [M * n, 1], where ``tokens`` has -1; None if nowhere.
    """

    block_of_token: Tensor
    tokens: Tensor
    slot_of_token: Tensor
    places: Tensor
    absent: Tensor | None

    @classmethod
    def of(cls, block_of_token: Tensor, tokens: Tensor, slot_of_token: Tensor) -> BlockTables:
        places = tokens.flatten()
        full = not is_symbolic(places.numel()) and places.numel() == slot_of_token.numel()
        absent = None if full else (places < 0)[:, None]
        return cls(block_of_token, tokens, slot_of_token, places.clamp(min=0), absent)


@dataclass(frozen=True)
class TokenBlocks:
    """A partition of a :class:`~headmix_vision.ops.TokenGrid` into blocks.

    Tokens stay in raster order; a block is a set of indices. Along an axis of ``g`` tokens cut into ``b`` blocks,
    token ``i`` belongs to block ``i * b // g``, so sizes differ by at most one when ``b`` does not divide ``g``.
    Prefix tokens form one block of their own, the first. Pseudo-tokens belong to the block of their token.

    Instances are hashable and compare by value.

    Args:
        grid: the tokens.
        block_grid: blocks along each axis, as many axes as the grid.

    Raises:
        InputError: if the axes do not match or are not whole numbers, or a block would hold no token.
    """

    grid: TokenGrid
    block_grid: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.grid, TokenGrid):
            raise InputError(f"grid must be a TokenGrid, got {self.grid!r}; TokenBlocks.from_grid takes a shape.")
        shape, block_grid = self.grid.shape, self.block_grid
        as_axes("block_grid", block_grid)
        if len(shape) != len(block_grid):
            raise InputError(f"grid {shape} and block_grid {block_grid} must have the same number of axes.")
        if any(count < 1 for count in block_grid):
            raise InputError(f"block_grid {block_grid} must be positive.")
        if any(b > g for g, b in zip(shape, block_grid, strict=True)):
            raise InputError(
                f"block_grid {block_grid} is larger than the token grid {shape}: some blocks would be empty."
            )

    @classmethod
    def from_grid(
        cls,
        grid: TokenGrid | tuple[int, ...] | list[int],
        block_grid: tuple[int, ...] | list[int],
        num_prefix_tokens: int = 0,
    ) -> TokenBlocks:
        """Divide a token grid into blocks.

        Args:
            grid: tokens along each axis, (H, W) for images or (T, H, W) for videos; or a complete grid.
            block_grid: blocks along each axis, as many axes as ``grid``.
            num_prefix_tokens: tokens in front of a grid that is given by its axes.

        Raises:
            InputError: if the axes do not match, or a block would hold no token.
        """
        return cls(TokenGrid.of(grid, num_prefix_tokens), as_axes("block_grid", block_grid))

    @classmethod
    def of_clip(cls, grid: TokenGrid, block_grid: tuple[int, ...]) -> TokenBlocks:
        """Divide a grid; a clip of fewer frames than there are blocks along time has the first of them, one a frame.

        Raises:
            InputError: if the axes do not match, or a block along another axis would hold no token.
        """
        if len(grid.shape) == len(block_grid) == 3 and grid.shape[0] < block_grid[0]:
            block_grid = (grid.shape[0], *block_grid[1:])
        return cls(grid, block_grid)

    @property
    def num_tokens(self) -> int:
        """N, prefix tokens and repeats included."""
        return self.grid.num_tokens

    @property
    def num_blocks(self) -> int:
        """M, the prefix block included."""
        return self.num_prefix_blocks + math.prod(self.block_grid)

    @property
    def num_prefix_blocks(self) -> int:
        """1 where prefix tokens form a block, else 0."""
        return int(self.grid.num_prefix_tokens > 0)

    @property
    def max_block_size(self) -> int:
        """n, tokens in the largest block, repeats included."""
        largest = math.prod([-(-g // b) for g, b in zip(self.grid.shape, self.block_grid, strict=True)])
        return self.grid.repeats * larger(largest, self.grid.num_prefix_tokens)

    @property
    def row_ends(self) -> tuple[int, ...]:
        """Tokens up to the end of each row of blocks along the first axis, prefix tokens and repeats included.

        The first so many tokens are the same ones in raster order and in that of :meth:`order`.
        """
        ends = self._axes[0].starts()[1:]
        return tuple(self.grid.repeats * (self.grid.num_prefix_tokens + ends * math.prod(self.grid.shape[1:])).tolist())

    def tables(self, like: Tensor) -> BlockTables:
        """Return the index tables on the device of ``like``, cached for plain tensors.

        Under a tracer, in a fake-tensor mode or under a transformation of torch.func it computes them anew: a cached
        constant would leak between modes.
        """
        return _cached_tables(self, like.device) if is_plain(like) else _build_tables(self, like.device)

    def order(self, like: Tensor) -> Tensor:
        """Return the tokens block by block, the order of causal attention: int64 [N] on the device of ``like``.

        Prefix tokens come first, then blocks in raster order of the block grid; within a block tokens are in raster
        order.
        """
        return self.tables(like).slot_of_token.argsort()

    def block_centers(self) -> Tensor:
        """Compute the mean coordinates, in tokens, of all blocks but the prefix block: float64 [M - prefix, axes]."""
        starts = [axis.starts().double() for axis in self._axes]
        axes = [(ends[:-1] + ends[1:] - 1) / 2 for ends in starts]
        return torch.cartesian_prod(*axes).reshape(math.prod(self.block_grid), len(self.block_grid))

    def of_rank(self, ranks: TokenRanks) -> BlocksOfRank:
        """Return the blocks of the tokens that a rank holds where several share the grid.

        Raises:
            InputError: if the grid cannot be parted among them.
        """
        return BlocksOfRank(self.grid, self.block_grid, ranks)

    @property
    def _axes(self) -> list[_Axis]:
        return list(map(_Axis, self.grid.shape, self.block_grid))


@dataclass(frozen=True)
class BlocksOfRank(TokenBlocks):
    """The blocks, whole or in part, of the tokens that one of several ranks holds.

    ``grid`` and ``block_grid`` are those of all ranks; counted and listed are the tokens of this rank, and the blocks
    that have one of them.
    """

    ranks: TokenRanks

    @property
    def axis(self) -> int:
        """The axis of the block grid along which ranks follow each other."""
        return max(self.ranks.axis, 0)

    @property
    def skipped(self) -> int:
        """Tokens of the first row along the axis that the rank before holds."""
        if self.ranks.axis != SEQUENCE:
            return 0
        return self.ranks.span(self.grid, self.ranks.rank)[0] % math.prod(self.grid.shape[1:])

    @property
    def whole(self) -> TokenBlocks:
        """The blocks of all ranks."""
        return TokenBlocks(self.grid, self.block_grid)

    @property
    def held(self) -> TokenGrid:
        """The tokens of this rank."""
        return self.ranks.local(self.grid)

    @property
    def num_tokens(self) -> int:
        return self.held.num_tokens

    @property
    def num_blocks(self) -> int:
        return self.num_prefix_blocks + math.prod(self.held_block_grid(self.ranks.rank))

    @property
    def num_prefix_blocks(self) -> int:
        return int(self.held.num_prefix_tokens > 0)

    @property
    def max_block_size(self) -> int:
        largest = math.prod([axis.longest for axis in self._axes])
        return self.grid.repeats * larger(largest, self.held.num_prefix_tokens)

    @property
    def are_shared(self) -> bool:
        """Whether two ranks, this one or others, have tokens of one block."""
        parts = [self._part(rank) for rank in range(self.ranks.size)]
        return any(a.first_block + a.count > b.first_block for a, b in itertools.pairwise(parts))

    def held_block_grid(self, rank: int) -> tuple[int, ...]:
        """Return the blocks along each axis of which a rank has tokens."""
        return (*self.block_grid[: self.axis], self._part(rank).count, *self.block_grid[self.axis + 1 :])

    def narrow(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Take the blocks [..., *block_grid, ...] of which a rank has tokens: a view."""
        part = self._part(rank)
        return x.narrow(dim + self.axis, part.first_block, part.count)

    def numbers(self, like: Tensor) -> Tensor:
        """Return the numbers of this rank's blocks among all blocks: int64 [m], as :meth:`tables`."""
        return _cached_numbers(self, like.device) if is_plain(like) else _build_numbers(self, like.device)

    @property
    def _axes(self) -> list[_Axis]:
        axes = self.whole._axes
        axes[self.axis] = self._part(self.ranks.rank)
        return axes

    def _part(self, rank: int) -> _PartOfAxis:
        first, end = self.ranks.span(self.grid, rank)
        if self.ranks.axis == SEQUENCE:  # rows of which the rank has a token
            row = math.prod(self.grid.shape[1:])
            first, end = first // row, -(-end // row)
        return _PartOfAxis.cut(_Axis(self.grid.shape[self.axis], self.block_grid[self.axis]), first, end)


@dataclass(frozen=True)
class _Axis:
    """An axis of ``size`` tokens in ``count`` blocks."""

    size: int
    count: int

    def start(self, block: Tensor) -> Tensor:
        """Return the first token of blocks, and the number of tokens for the block after the last."""
        return (block * self.size + self.count - 1) // self.count

    def block(self, token: Tensor) -> Tensor:
        """Return the block of tokens."""
        return token * self.count // self.size

    def starts(self) -> Tensor:
        """Return the first token of each block, and the number of tokens at the end: [blocks + 1] on the CPU."""
        return self.start(torch.arange(self.count + 1, device="cpu"))

    @property
    def longest(self) -> int:
        """The tokens of the longest block."""
        return -(-self.size // self.count)


@dataclass(frozen=True)
class _PartOfAxis(_Axis):
    """The tokens of an axis from one on, and their blocks, the first of which may begin before them."""

    whole: _Axis
    first_token: int
    first_block: int

    @classmethod
    def cut(cls, whole: _Axis, first: int, end: int) -> _PartOfAxis:
        first_block, last_block = (token * whole.count // whole.size for token in (first, end - 1))
        return cls(end - first, last_block + 1 - first_block, whole, first, first_block)

    def start(self, block: Tensor) -> Tensor:
        return (self.whole.start(block + self.first_block) - self.first_token).clamp(0, self.size)

    def block(self, token: Tensor) -> Tensor:
        return self.whole.block(token + self.first_token) - self.first_block

    @property
    def longest(self) -> int:
        blocks = range(self.first_block, self.first_block + self.count + 1)
        starts = [-(-block * self.whole.size // self.whole.count) - self.first_token for block in blocks]
        return max(min(end, self.size) - max(start, 0) for start, end in itertools.pairwise(starts))


def _build_tables(blocks: TokenBlocks, device: torch.device) -> BlockTables:
    """Compute the tables elementwise, and of symbolic sizes with two places or more in a block.

    A graph holds for all sizes then: dims that may be 1, as these of axes and blocks, would be guarded.
    """
    grid, first = (blocks.held, blocks.skipped) if isinstance(blocks, BlocksOfRank) else (blocks.grid, 0)
    repeats, prefix, prefix_blocks = grid.repeats, grid.num_prefix_tokens, blocks.num_prefix_blocks
    n = blocks.max_block_size
    n = larger(n, 2) if is_symbolic(n) else n

    # The raster index of every (block, place in block), -1 where a block lacks the place.
    slot = torch.arange(blocks.num_blocks * n, device=device)
    block, place = slot // n, slot % n // repeats
    raster = torch.zeros_like(slot)
    absent, across, stride = torch.zeros_like(slot, dtype=torch.bool), (block - prefix_blocks, place), 1
    for axis in reversed(blocks._axes):
        of_axis, inside = across[0] % axis.count, across[1] % axis.longest
        across = across[0] // axis.count, across[1] // axis.longest
        token = axis.start(of_axis) + inside
        absent = absent | (token >= axis.start(of_axis + 1))
        raster, stride = raster + stride * token, stride * axis.size
    absent = absent | (across[1] > 0) | (raster < first) | (raster >= first + grid.num_grid_tokens)
    index = raster - first + prefix
    if prefix:
        in_prefix = block < prefix_blocks
        index, absent = torch.where(in_prefix, place, index), torch.where(in_prefix, place >= prefix, absent)
    tokens = torch.where(absent, -1, index * repeats + slot % n % repeats)

    # The block of every token, and its place in it.
    each = torch.arange(grid.num_tokens, device=device)
    token = each // repeats
    rest = token - prefix + first
    block, place, count, size = torch.zeros_like(each), torch.zeros_like(each), 1, 1
    for axis in reversed(blocks._axes):
        at, rest = rest % axis.size, rest // axis.size
        of_axis = axis.block(at)
        block, place = block + count * of_axis, place + size * (at - axis.start(of_axis))
        count, size = count * axis.count, size * axis.longest
    if prefix:
        block = torch.where(token < prefix, 0, block + prefix_blocks)
        place = torch.where(token < prefix, token, place)
    return BlockTables.of(block, tokens.view(blocks.num_blocks, n), block * n + place * repeats + each % repeats)


@cached_tables
def _cached_tables(blocks: TokenBlocks, device: torch.device) -> BlockTables:
    tables = _build_tables(blocks, torch.device("cpu"))
    return BlockTables.of(*(table.to(device) for table in tables[:3]))


def _build_numbers(blocks: BlocksOfRank, device: torch.device) -> Tensor:
    numbers = torch.arange(blocks.whole.num_prefix_blocks, blocks.whole.num_blocks, device=device)
    held = blocks.narrow(numbers.view(blocks.block_grid), 0, blocks.ranks.rank).flatten()
    return torch.cat([held.new_zeros(blocks.num_prefix_blocks), held])


@cached_tables
def _cached_numbers(blocks: BlocksOfRank, device: torch.device) -> Tensor:
    return _build_numbers(blocks, torch.device("cpu")).to(device)


def gather(
    tensors: Iterable[Tensor],
    dim: int,
    places: Tensor,
    absent: Tensor | None,
    back: Tensor,
    absent_back: Tensor | None = None,
) -> list[Tensor]:
    """Take the same places of a dim of several tensors. The gradient takes them back instead of summing into places.

    Args:
        tensors: [..., N, ...] each.
        dim: of the N places.
        places: int64 [P], numbers of places, each at most once.
        absent: where outputs are zero, a mask that broadcasts to them; None for nowhere.
        back: int64 [N], where each place has gone.
        absent_back: places that are not taken, a mask that broadcasts to the gradient; None for none.

    Returns:
        [..., P, ...] each.
    """
    if torch.compiler.is_compiling():
        apply = _Gather.apply
    elif torch._C._are_functorch_transforms_active():
        apply = _GatherWithTangents.apply
    else:
        apply, tensors = _gather_eagerly, map(out_of_dead_transformation, tensors)
    return [apply(x, dim, places, absent, back, absent_back) for x in tensors]


def to_blocks(tables: BlockTables, *tensors: Tensor) -> list[Tensor]:
    """Gather tensors [B, N, H, D] into blocks [B, H, M, n, D], zero where a block has no token."""
    heads = [x.transpose(1, 2) for x in tensors]
    gathered = gather(heads, 2, tables.places, tables.absent, tables.slot_of_token)
    return [torch.unflatten(x, 2, tables.tokens.shape) for x in gathered]


def to_tokens(tables: BlockTables, x: Tensor) -> Tensor:
    """Gather blocks [B, H, M, n, D] back into raster order [B, N, H, D]."""
    (x,) = gather((x.flatten(2, 3),), 2, tables.slot_of_token, None, tables.places, tables.absent)
    return x.transpose(1, 2)


def _take(x: Tensor, dim: int, places: Tensor, absent: Tensor | None) -> Tensor:
    out = x.index_select(dim, places)
    # Out of place: traced by torch.compile, an in-place fill here gives wrong gradients (torch 2.11).
    return out if absent is None else out.masked_fill(absent, 0)


class _Gather(torch.autograd.Function):
    """Gather one tensor; its adjoint takes the tokens back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, dim: int, places: Tensor, absent: Tensor | None, back: Tensor, absent_back: Tensor | None
    ) -> Tensor:
        return _take(x, dim, places, absent)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.dim, *tables = inputs
        ctx.save_for_backward(*tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places, absent, back, absent_back = ctx.saved_tensors
        return *gather(grads, ctx.dim, back, absent_back, places, absent), None, None, None, None, None


class _GatherWithTangents(_Gather):
    """Add the derivative in forward mode, which torch.compile cannot trace: the map itself."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.dim, *tables = inputs
        ctx.save_for_backward(*tables)
        ctx.save_for_forward(*tables)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return gather(tangents[:1], ctx.dim, *ctx.saved_tensors)[0]


class _EagerGather(_GatherWithTangents):
    """Leave out ``setup_context``, for which PyTorch binds arguments by name: this takes longer than a gather."""

    setup_context = staticmethod(torch.autograd.Function.setup_context)

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, *tables: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.dim = dim
        ctx.save_for_backward(*tables)
        ctx.save_for_forward(*tables)
        return _take(x, dim, *tables[:2])  # type: ignore[arg-type]


_gather_eagerly = apply_of(_EagerGather)
