"""Choose one of the two algorithms of the Triton MHLA by a cost model that ``benchmarks/fit_mhla_regimes.py`` fits."""

from __future__ import annotations

from collections.abc import Sequence

from headmix_vision.ops.token_blocks import TokenBlocks

# Tokens in a part of a block, whatever the device and the batch: results of summaries do not depend on these.
PART_TOKENS = 512
# Nanoseconds per batch item and head for each of the terms below: forward and backward on an H200, bf16.
PAIRWISE_NS = (5.84e-3, 3.32e-5)
SUMMARY_NS = (6.8e-3, 4.31e-2, 4.22e-3, 6.93e-5)


def pairwise_terms(blocks: TokenBlocks, dim: int, value_dim: int) -> tuple[float, ...]:
    """Count the entries of the tokens' rows, and the products over all pairs of tokens."""
    columns = dim + value_dim
    return blocks.num_tokens * columns, blocks.num_tokens**2 * columns


def summary_terms(blocks: TokenBlocks, dim: int, value_dim: int) -> tuple[float, ...]:
    """Count the entries of the tokens' rows, of one summary, of all summaries, and the products that mix summaries."""
    entries, M = dim * value_dim, blocks.num_blocks
    return blocks.num_tokens * (dim + value_dim), entries, M * entries, M * M * entries


def cost(constants: Sequence[float], terms: Sequence[float]) -> float:
    """Estimate the time in nanoseconds per batch item and head."""
    return sum(a * b for a, b in zip(constants, terms, strict=True))


def _causal(blocks: TokenBlocks, dim: int, value_dim: int) -> tuple[float, float]:
    """Estimate both regimes of causal attention from the same constants, by counting.

    On an H200 the faster one was chosen at every shape of ``benchmarks/bench_mhla.py --causal --shapes model``.

    Pairwise kernels compute half of all pairs, and summary kernels half of those in each part of a block besides.
    """
    entries, products = pairwise_terms(blocks, dim, value_dim)
    own = products * min(blocks.max_block_size, PART_TOKENS) / blocks.num_tokens
    summary = cost(SUMMARY_NS, summary_terms(blocks, dim, value_dim))
    return cost(PAIRWISE_NS, (entries, products / 2)), summary + cost(PAIRWISE_NS, (0, own / 2))


def choose(pairwise_ns: float, summary_ns: float) -> str:
    return "pairwise" if pairwise_ns <= summary_ns else "summary"


def choose_regime(blocks: TokenBlocks, dim: int, value_dim: int, causal: bool = False) -> str:
    """Return "pairwise" or "summary", whichever is estimated faster."""
    if causal:
        return choose(*_causal(blocks, dim, value_dim))
    return choose(
        cost(PAIRWISE_NS, pairwise_terms(blocks, dim, value_dim)),
        cost(SUMMARY_NS, summary_terms(blocks, dim, value_dim)),
    )
