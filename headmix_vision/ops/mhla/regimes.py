"""Choose one of the two algorithms of the Triton MHLA by a cost model that ``benchmarks/fit_mhla_regimes.py`` fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from headmix_vision.ops.hardware import uses_mma_sync
from headmix_vision.ops.mhla.triton_tuning import fits_hopper
from headmix_vision.ops.token_blocks import TokenBlocks

# Tokens in a part of a block, whatever the device and the batch: results of summaries do not depend on these.
PART_TOKENS = 512
TILE = 64  # tokens that kernels compute at a time


class Costs(NamedTuple):
    """Nanoseconds per batch item and head for each of the terms below: forward and backward on an H200, bf16.

    Attributes:
        pairwise, summary: by term.
        rows: blocks are counted in tiles of so many tokens.
    """

    pairwise: tuple[float, float, float, float, float]
    summary: tuple[float, float, float, float]
    rows: int


# By the instruction for products: wgmma, on Hopper, or mma.sync. GPUs of other instructions take the former.
WGMMA = Costs((5.19e-3, 3.06e-5, 0, 6.31e-3, 6.03e-3), (4.6e-3, 3.2e-2, 6.75e-4, 8.08e-6), rows=64)
MMA_SYNC = Costs((8.37e-3, 0, 4.31e-5, 1.02e-2, 0), (8.02e-3, 3.19e-2, 4.25e-3, 4.07e-5), rows=16)


def costs_on(device: torch.device) -> Costs:
    """Return the costs of a device that the kernels can run on."""
    return MMA_SYNC if uses_mma_sync(device) else WGMMA


def pairwise_terms(
    blocks: TokenBlocks, dim: int, value_dim: int, on_hopper: bool = False
) -> tuple[float, float, float, float, float]:
    """Count entries of rows, products over all pairs, the same with padded columns, and pairs with own weights.

    Products are counted in whole tiles. Where the Gluon kernels run, only the last term counts: entries of rows.

    Args:
        blocks, dim, value_dim: of the call.
        on_hopper: whether the Gluon kernels run where they take the shape.
    """
    tokens, rows, columns = blocks.num_tokens, _whole(blocks.num_tokens, TILE), dim + value_dim
    if on_hopper and fits_hopper(blocks, dim, value_dim):
        return 0, 0, 0, 0, tokens * columns
    padded = rows**2 * (_padded(dim) + _padded(value_dim))
    return tokens * columns, rows**2 * columns, padded, tokens**2 if _are_single(blocks) else 0, 0


def summary_terms(blocks: TokenBlocks, dim: int, value_dim: int, rows: int = TILE) -> tuple[float, ...]:
    """Count the entries of the rows, of one summary, of all summaries, and the products that mix summaries.

    Each block has whole tiles of rows.
    """
    entries, M = dim * value_dim, blocks.num_blocks
    return M * _whole(blocks.max_block_size, rows) * (dim + value_dim), entries, M * entries, M * M * entries


def _padded(dim: int) -> int:
    """Return the columns that a pairwise kernel pays for: at least 64, and more where a head takes two tiles."""
    return 64 if dim <= 64 else dim + 24 if dim < 128 else 128


def _whole(number: int, step: int) -> int:
    """Round up to a multiple."""
    return -(-number // step) * step


def _are_single(blocks: TokenBlocks) -> bool:
    """Return whether the runs of the pairwise kernels have one token each: runs of two would need more tiles.

    Then each pair of tokens has a weight, and a gradient of it, in memory. A block of odd size needs one place more in
    runs of two. The count has no branches, each of which would be a guard of graphs for grids of all sizes.
    """
    odd_blocks = 1
    for tokens, count in zip(blocks.grid.shape, blocks.block_grid, strict=True):
        larger = tokens % count  # blocks with one token more along the axis
        odd_blocks *= larger + tokens // count % 2 * (count - 2 * larger)
    absent = blocks.grid.repeats % 2 * (odd_blocks + blocks.grid.num_prefix_tokens % 2)
    return _whole(blocks.num_tokens + absent, TILE) > _whole(blocks.num_tokens, TILE)


def cost(constants: Sequence[float], terms: Sequence[float]) -> float:
    """Estimate the time in nanoseconds per batch item and head."""
    return sum(a * b for a, b in zip(constants, terms, strict=True))


def _causal(blocks: TokenBlocks, dim: int, value_dim: int, costs: Costs) -> tuple[float, float]:
    """Estimate both regimes of causal attention from the same constants, by counting.

    On an H200 the faster one was chosen at every shape of ``benchmarks/bench_mhla.py --causal --shapes model``. With
    mma.sync causal regimes were not timed.

    Pairwise kernels compute half of all pairs, and summary kernels half of those in each part of a block besides.
    """
    entries, *products, single, _ = pairwise_terms(blocks, dim, value_dim)
    half = [x / 2 for x in products]
    own = [x * min(blocks.max_block_size, PART_TOKENS) / blocks.num_tokens for x in half]
    summary = cost(costs.summary, summary_terms(blocks, dim, value_dim, costs.rows))
    return cost(costs.pairwise, (entries, *half, single, 0)), summary + cost(costs.pairwise, (0, *own, 0, 0))


def choose(pairwise_ns: float, summary_ns: float) -> str:
    return "pairwise" if pairwise_ns <= summary_ns else "summary"


def choose_regime(
    blocks: TokenBlocks,
    dim: int,
    value_dim: int,
    causal: bool = False,
    on_hopper: bool = False,
    costs: Costs = WGMMA,
) -> str:
    """Return "pairwise" or "summary", whichever is estimated faster.

    Args:
        blocks, dim, value_dim, causal: of the call.
        on_hopper: whether the Gluon kernels run where they take the shape.
        costs: of the GPU, by :func:`costs_on`.
    """
    if causal:
        return choose(*_causal(blocks, dim, value_dim, costs))
    return choose(
        cost(costs.pairwise, pairwise_terms(blocks, dim, value_dim, on_hopper)),
        cost(costs.summary, summary_terms(blocks, dim, value_dim, costs.rows)),
    )
