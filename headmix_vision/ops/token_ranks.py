"""Spreads the tokens of each sample over the ranks of a process group, and exchanges tensors between them.

B batch, N tokens of all ranks, n those of one, C channels. Collectives are those that torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headmix_vision.errors import InputError
from headmix_vision.ops.token_grid import TokenGrid


@dataclass(frozen=True)
class TokenRanks:
    """The ranks of a process group that share the tokens of each sample, as one of them sees it.

    A rank holds consecutive rows of the first axis of a grid (rows of an image, frames of a clip), whose numbers differ
    by at most one; the first rank holds the prefix tokens too. Ranks part the axis where as many blocks would: if the
    number of blocks along it is a multiple of the number of ranks, no block has tokens on two of them.

    Args:
        group: name of the process group.
        rank: this rank within the group.
        size: ranks of the group.
    """

    group: str
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh) -> TokenRanks:
        """Describe a process group, or a device mesh of one dimension.

        Raises:
            InputError: for anything else, and for a group that this process is no member of.
        """
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise InputError(
                    f"the mesh must have one dimension, got {group.ndim}: name one, as in mesh['context']."
                )
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise InputError(f"the group must be a process group or a device mesh, got {group!r}.")
        return cls(group.group_name, group.rank(), group.size())

    def rows(self, grid: TokenGrid, rank: int) -> tuple[int, int]:
        """Return the first row of a rank along the first axis of a grid, and the row after its last.

        Raises:
            InputError: if there are fewer rows than ranks.
        """
        rows = grid.shape[0]
        if rows < self.size:
            raise InputError(
                f"{grid} cannot be spread over {self.size} ranks: each takes at least a row of its first axis."
            )
        return -(-rank * rows // self.size), -(-(rank + 1) * rows // self.size)

    def local(self, grid: TokenGrid) -> TokenGrid:
        """Return this rank's part of a grid."""
        return self._part(grid, self.rank)

    def _part(self, grid: TokenGrid, rank: int) -> TokenGrid:
        first, end = self.rows(grid, rank)
        return replace(
            grid, shape=(end - first, *grid.shape[1:]), num_prefix_tokens=0 if rank else grid.num_prefix_tokens
        )

    def split(self, x: Tensor, grid: TokenGrid, dim: int = 1) -> Tensor:
        """Take this rank's tokens of the N tokens of a grid, which a dim of ``x`` counts: a view."""
        first, end = self._spans(grid)[self.rank]
        return x.narrow(dim, first, end - first)

    def gather(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """Join the tokens [B, n, ...] of all ranks to those of a grid on every rank, [B, N, ...].

        Every rank is taken to compute the same loss of the result: each keeps its own tokens' part of the gradient.
        """
        return _Gather.apply(x, self, tuple(self._spans(grid)))

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients of parameters over the ranks, in place: each rank has those of its own tokens."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for dtype in {grad.dtype for grad in grads}:
            alike = [grad for grad in grads if grad.dtype == dtype]
            for grad in torch.ops._c10d_functional.all_reduce_coalesced_(alike, "sum", self.group):
                _wait(grad)

    def _spans(self, grid: TokenGrid) -> list[tuple[int, int]]:
        """Return the first token of each rank in the sequence of all, and the one after its last."""
        counts = [self._part(grid, rank).num_tokens for rank in range(self.size)]
        return [(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(self.size)]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks."""
        return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group))

    def all_gather(self, x: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
        """Return the tensors of all ranks, which have these sizes along a dim, and else one shape."""
        pad = max(sizes) - x.shape[dim]
        if pad:
            x = torch.cat([x, x.new_zeros(*x.shape[:dim], pad, *x.shape[dim + 1 :])], dim)
        everything = torch.ops._c10d_functional.all_gather_into_tensor(x[None].contiguous(), self.size, self.group)
        parts = _wait(everything).unbind()
        return [part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)]

    def exchange_edges(self, x: Tensor, width: int) -> Tensor:
        """Extend the tokens [B, n, C] of a rank by the nearest ``width`` tokens of the ranks before and after it.

        The first rank has none before it, the last none after it; each must have as many.
        """
        return _ExchangeEdges.apply(x, self, width)


def _wait(x: Tensor) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return result


class _Gather(torch.autograd.Function):
    """Joins the tokens of all ranks; its gradient is the part of this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TokenRanks, spans: tuple[tuple[int, int], ...]) -> Tensor:
        ctx.span = spans[ranks.rank]
        return torch.cat(ranks.all_gather(x, [end - first for first, end in spans], 1), 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        first, end = ctx.span
        return grads[0][:, first:end], None, None


class _ExchangeEdges(torch.autograd.Function):
    """Brings neighbours' edges; their gradients go back to the neighbours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TokenRanks, width: int) -> Tensor:
        ctx.ranks, ctx.width = ranks, width
        before, after = _swap(x[:, :width], x[:, x.shape[1] - width :], ranks)
        return torch.cat([before, x, after], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ranks, width, grad = ctx.ranks, ctx.width, grads[0]
        has_before, has_after = _neighbours(ranks)
        end = grad.shape[1] - width * has_after
        d_x = grad[:, width * has_before : end].clone()
        before, after = _swap(grad[:, :width], grad[:, grad.shape[1] - width :], ranks)
        d_x[:, : before.shape[1]] += before
        d_x[:, d_x.shape[1] - after.shape[1] :] += after
        return d_x, None, None


def _neighbours(ranks: TokenRanks) -> tuple[bool, bool]:
    """Tell whether there is a rank before, and one after."""
    return ranks.rank > 0, ranks.rank + 1 < ranks.size


def _swap(first: Tensor, last: Tensor, ranks: TokenRanks) -> tuple[Tensor, Tensor]:
    """Send [B, w, C] each to the rank before and the one after, and return what they send, if there are any."""
    has_before, has_after = _neighbours(ranks)
    w, sizes = first.shape[1], [0] * ranks.size
    if has_before:
        sizes[ranks.rank - 1] = w
    if has_after:
        sizes[ranks.rank + 1] = w
    sent = torch.cat([first[:, : w * has_before], last[:, : w * has_after]], 1).transpose(0, 1).contiguous()
    received = _wait(torch.ops._c10d_functional.all_to_all_single(sent, sizes, sizes, ranks.group)).transpose(0, 1)
    return received[:, : w * has_before], received[:, w * has_before :]
