"""Exchange of block summaries between ranks under context parallelism (README.md, "Context parallelism").

B batch, H heads, M blocks of all ranks, m those with tokens of this rank, F numbers of a summary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.numerics import accumulation_dtype
from headmix_vision.ops.token_blocks import BlocksOfRank


def mix_over_ranks(mixing: Tensor, blocks: BlocksOfRank, dtype: torch.dtype, *summaries: Tensor) -> tuple[Tensor, ...]:
    """Mix summaries of all ranks for the queries of this one.

    Args:
        mixing: [M, M], shared by the heads, or [H, M, M].
        blocks: the blocks of this rank.
        dtype: to which the mixing and the first of the summaries are rounded before they are multiplied.
        summaries: [B, H, m, ...] each, of blocks or, where ranks share blocks, of their parts, which are summed.

    Returns:
        Mixed summaries, as ``summaries``. Each rank gets 1 / size of the whole gradient of the mixing, so that it can
        tell its sign, and the sum over the ranks is whole.
    """
    mixed: tuple[Tensor, ...] = _MixOverRanks.apply(mixing, blocks, dtype, *summaries)
    return mixed


class _MixOverRanks(torch.autograd.Function):
    """Gather the summaries of all blocks and mix them for the blocks of this rank.

    The adjoint gathers and mixes the gradients in the same way, by the transpose of the mixing.
    """

    @staticmethod
    def forward(
        ctx: Any, mixing: Tensor, blocks: BlocksOfRank, dtype: torch.dtype, *summaries: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.blocks, ctx.dtype = blocks, dtype
        gathered = _gather(summaries, blocks, dtype)
        ctx.save_for_backward(mixing, *gathered)
        return _mix(mixing.index_select(-2, blocks.numbers(mixing)), gathered, summaries, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixing, *summaries = ctx.saved_tensors
        weights = mixing.index_select(-1, ctx.blocks.numbers(mixing)).mT
        sent, d_mixing = list(grads), None
        if ctx.needs_input_grad[0]:  # the rows of this rank's blocks travel with the gradients of summaries
            over = (0,) if mixing.ndim == 3 else (0, 1)
            products = [x.flatten(3).to(y.dtype) @ y.mT for x, y in zip(grads, summaries, strict=True)]  # [B, H, m, M]
            rows = [x.sum(over, keepdim=True, dtype=accumulation_dtype(ctx.dtype)) for x in products]
            sent.append(sum(rows[1:], rows[0]))
        gathered = _gather(sent, ctx.blocks, ctx.dtype)
        if ctx.needs_input_grad[0]:
            d_mixing = (gathered.pop().view(mixing.shape) / ctx.blocks.ranks.size).to(mixing.dtype)
        d_summaries = _mix(weights, gathered, grads, ctx.dtype)
        return d_mixing, None, None, *d_summaries


def _mix(weights: Tensor, summaries: list[Tensor], like: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Multiply weights [(H,) m, M] with summaries [B, H, M, F], to the shapes and types of ``like``."""
    weights = weights.to(dtype).expand(*summaries[0].shape[:2], *weights.shape[-2:])  # see mhla_torch
    return tuple((weights.to(x.dtype) @ x).to(y.dtype).view_as(y) for x, y in zip(summaries, like, strict=True))


def _gather(summaries: Sequence[Tensor], blocks: BlocksOfRank, dtype: torch.dtype) -> list[Tensor]:
    """Join summaries [B, H, m, ...] of all ranks to [B, H, M, F], parts of a block summed, then round the first."""
    prefix, grids = blocks.whole.num_prefix_blocks, [blocks.held_block_grid(rank) for rank in range(blocks.ranks.size)]
    counts = [math.prod(grid) for grid in grids]
    counts[0] += prefix
    gathered = []
    for parts in blocks.ranks.all_gather([x.flatten(3) for x in summaries], counts, 2):
        first, parts[0] = parts[0].split([prefix, counts[0] - prefix], 2)
        parts = [part.unflatten(2, grid) for part, grid in zip(parts, grids, strict=True)]
        if blocks.are_shared:
            sums = accumulation_dtype(first.dtype)
            whole = first.new_zeros(*first.shape[:2], *blocks.block_grid, first.shape[-1], dtype=sums)
            for rank, part in enumerate(parts):
                blocks.narrow(whole, 2, rank).add_(part)
        else:
            whole = torch.cat(parts, 2 + blocks.axis)
        gathered.append(torch.cat([first, whole.flatten(2, -2)], 2) if prefix else whole.flatten(2, -2))
    return [gathered[0].to(dtype), *gathered[1:]]
