"""Context parallelism: part the tokens of each sample among the ranks of a process group, and exchange tensors.

B batch, N tokens of all ranks, n tokens of one rank, C channels. All collectives can be traced by torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headmix_vision.errors import InputError
from headmix_vision.ops.dispatch import check_size, kept
from headmix_vision.ops.token_grid import TokenGrid

SEQUENCE = -1
"""In place of an axis: ranks part the tokens in raster order, as diffusers does, and a part may begin within a row."""


@dataclass(frozen=True)
class TokenRanks:
    """One rank of a process group under context parallelism, in which ranks share the tokens of each sample.

    A rank holds consecutive places along one axis of a grid (with the first axis, rows of an image or frames of a
    clip), whose numbers differ by at most one; the first rank holds the prefix tokens too. Ranks part the axis where as
    many blocks would: if the number of blocks along it is a multiple of the number of ranks, no block has tokens on two
    of them.

    Args:
        group: name of the process group.
        rank: this rank within the group.
        size: ranks of the group.
        axis: the axis of the grid that is parted, from 0, or ``SEQUENCE``.
    """

    group: str
    rank: int
    size: int
    axis: int = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh, axis: int = 0) -> TokenRanks:
        """Describe a process group, or a device mesh of one dimension.

        Raises:
            InputError: for anything else, and for a group that does not include this process.
        """
        check_size("axis", axis, 0)
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise InputError(
                    f"the mesh must have one dimension, got {group.ndim}: name one, as in mesh['context']."
                )
            group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` returns to who is not in it
            raise InputError("the group must be one of this process, which is not a member of it.")
        if not isinstance(group, dist.ProcessGroup):
            raise InputError(f"the group must be a process group or a device mesh, got {group!r}.")
        return cls(group.group_name, group.rank(), group.size(), axis)

    def span(self, grid: TokenGrid, rank: int) -> tuple[int, int]:
        """Return the first place of a rank along the axis of a grid that is parted, and the place after its last.

        Raises:
            InputError: if the grid has no such axis, or fewer places along it than ranks.
        """
        grid, axis = self._parted(grid)
        places = grid.shape[axis] if axis < len(grid.shape) else 0
        if places < self.size:
            raise InputError(
                f"{grid} cannot be spread over {self.size} ranks along axis {axis}, which has {places} tokens."
            )
        if self.axis == SEQUENCE:
            least, rest = divmod(places, self.size)  # as torch.tensor_split
            return rank * least + min(rank, rest), (rank + 1) * least + min(rank + 1, rest)
        return -(-rank * places // self.size), -(-(rank + 1) * places // self.size)

    def local(self, grid: TokenGrid) -> TokenGrid:
        """Return this rank's part of a grid."""
        return _local(self, grid)

    def _parted(self, grid: TokenGrid) -> tuple[TokenGrid, int]:
        """Return the grid and its axis that is parted, with ``SEQUENCE`` all tokens on one axis."""
        if self.axis != SEQUENCE:
            return grid, self.axis
        return TokenGrid((grid.num_grid_tokens,), grid.num_prefix_tokens, grid.repeats), 0

    def _part(self, grid: TokenGrid, rank: int) -> TokenGrid:
        first, end = self.span(grid, rank)
        grid, axis = self._parted(grid)
        shape = (*grid.shape[:axis], end - first, *grid.shape[axis + 1 :])
        # not by dataclasses.replace, at which torch.compile cuts a graph in an autograd.Function
        return TokenGrid(shape, 0 if rank else grid.num_prefix_tokens, grid.repeats)

    def split(self, x: Tensor, grid: TokenGrid, dim: int = 1) -> Tensor:
        """Take this rank's tokens of the N tokens of a grid, which a dim of ``x`` counts.

        Raises:
            InputError: if ``x`` has another number of tokens.
        """
        _check_tokens(x.shape[dim], grid)
        first, end = self.span(grid, self.rank)
        grid, axis = self._parted(grid)
        prefix, places = unflatten_tokens(x, grid, dim)
        held = places.narrow(dim + axis, first, end - first)
        return flatten_tokens(prefix.narrow(dim, 0, 0) if self.rank else prefix, held, dim)

    def gather(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """Join the tokens [B, n, ...] of all ranks to a whole grid on every rank, [B, N, ...].

        Every rank is taken to compute the same loss of the result: each keeps its own tokens' part of the gradient.

        Raises:
            InputError: if ``x`` has another number of tokens than this rank's part of the grid.
        """
        _check_tokens(x.shape[1], self.local(grid))
        return _Gather.apply(x, self, grid)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum parameter gradients over the ranks, in place: each rank has the gradients of its own tokens."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for dtype in {grad.dtype for grad in grads}:
            alike = [grad for grad in grads if grad.dtype == dtype]
            for grad in torch.ops._c10d_functional.all_reduce_coalesced_(alike, "sum", self.group):
                wait(grad)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks."""
        return wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group))

    def all_gather(self, tensors: Sequence[Tensor], sizes: list[int], dim: int) -> list[list[Tensor]]:
        """Exchange tensors in one collective.

        Args:
            tensors: this rank's. Those of other ranks may have other sizes along ``dim``.
            sizes: of each rank's tensors along ``dim``, by rank.
            dim: from 0.

        Returns:
            For each given tensor a list of the tensors of all ranks, by rank.
        """
        sent = []
        for x in tensors:
            if pad := max(sizes) - x.shape[dim]:
                x = torch.cat([x, x.new_zeros(*x.shape[:dim], pad, *x.shape[dim + 1 :])], dim)
            sent.append(x[None].contiguous())
        received = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(sent, self.size, self.group)
        return [[x.narrow(dim, 0, size) for x, size in zip(wait(y).unbind(), sizes, strict=True)] for y in received]

    def exchange_edges(self, x: Tensor, width: int, dim: int) -> Tensor:
        """Extend a tensor along a dim by the nearest ``width`` places of the ranks before and after this one.

        The first rank has none before it, the last none after it; each must have as many.
        """
        return _ExchangeEdges.apply(x, self, width, dim)


def even_axis(shape: Sequence[int], block_grid: Sequence[int], ranks: int) -> int:
    """Return the first axis of which each rank has as many tokens, and as many whole blocks; the first if none."""
    even = (size % ranks == count % ranks == 0 for size, count in zip(shape, block_grid, strict=True))
    return next((axis for axis, fits in enumerate(even) if fits), 0)


@kept
def _local(ranks: TokenRanks, grid: TokenGrid) -> TokenGrid:
    return ranks._part(grid, ranks.rank)


def _check_tokens(found: int, grid: TokenGrid) -> None:
    if found != grid.num_tokens:
        raise InputError(f"{grid} has {grid.num_tokens} tokens, got {found}.")


def unflatten_tokens(x: Tensor, grid: TokenGrid, dim: int) -> tuple[Tensor, Tensor]:
    """Part the N tokens that a dim of ``x`` counts into prefix tokens and [..., *shape, repeats, ...]: views."""
    prefix = grid.repeats * grid.num_prefix_tokens
    places = x.narrow(dim, prefix, grid.repeats * grid.num_grid_tokens)
    return x.narrow(dim, 0, prefix), places.unflatten(dim, (*grid.shape, grid.repeats))


def flatten_tokens(prefix: Tensor, places: Tensor, dim: int) -> Tensor:
    """Join what :func:`unflatten_tokens` parted."""
    tokens = places.flatten(dim, dim + places.ndim - prefix.ndim)
    return torch.cat([prefix, tokens], dim) if prefix.shape[dim] else tokens


def wait(x: Tensor) -> Tensor:
    """Wait for a collective, and return its result."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return result


class _Gather(torch.autograd.Function):
    """Join the tokens of all ranks; its gradient is the part of this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TokenRanks, grid: TokenGrid) -> Tensor:
        ctx.ranks, ctx.grid = ranks, grid
        grids = [ranks._part(grid, rank) for rank in range(ranks.size)]
        (gathered,) = ranks.all_gather([x], [part.num_tokens for part in grids], 1)
        prefixes, places = zip(*(unflatten_tokens(*part, 1) for part in zip(gathered, grids, strict=True)), strict=True)
        return flatten_tokens(prefixes[0], torch.cat(places, 1 + ranks._parted(grid)[1]), 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.split(grads[0], ctx.grid), None, None


class _ExchangeEdges(torch.autograd.Function):
    """Bring neighbours' edges; their gradients go back to the neighbours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TokenRanks, width: int, dim: int) -> Tensor:
        ctx.ranks, ctx.width, ctx.dim = ranks, width, dim
        before, after = _swap(x.narrow(dim, 0, width), x.narrow(dim, x.shape[dim] - width, width), ranks, dim)
        return torch.cat([before, x, after], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, width, dim, grad = ctx.ranks, ctx.width, ctx.dim, grads[0]
        first, last = (width * has for has in _neighbours(ranks))
        d_x = grad.narrow(dim, first, grad.shape[dim] - first - last).clone()
        before, after = _swap(grad.narrow(dim, 0, width), grad.narrow(dim, grad.shape[dim] - width, width), ranks, dim)
        d_x.narrow(dim, 0, first).add_(before)
        d_x.narrow(dim, d_x.shape[dim] - last, last).add_(after)
        return d_x, None, None, None


def _neighbours(ranks: TokenRanks) -> tuple[bool, bool]:
    """Return whether there is a rank before, and one after."""
    return ranks.rank > 0, ranks.rank + 1 < ranks.size


def _swap(first: Tensor, last: Tensor, ranks: TokenRanks, dim: int) -> tuple[Tensor, Tensor]:
    """Send as many places each to the rank before and the one after; return what they send, if there are any."""
    width, sizes = first.shape[dim], [0] * ranks.size
    has_before, has_after = _neighbours(ranks)
    if has_before:
        sizes[ranks.rank - 1] = width
    if has_after:
        sizes[ranks.rank + 1] = width
    sent = torch.cat([first.narrow(dim, 0, width * has_before), last.narrow(dim, 0, width * has_after)], dim)
    sent = sent.movedim(dim, 0).contiguous()
    received = wait(torch.ops._c10d_functional.all_to_all_single(sent, sizes, sizes, ranks.group)).movedim(0, dim)
    before, after = received.split([width * has_before, width * has_after], dim)
    return before, after
