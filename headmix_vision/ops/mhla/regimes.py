"""Which of the two algorithms of the Triton MHLA to run: a cost model, fitted by ``benchmarks/fit_mhla_regimes.py``."""

from __future__ import annotations

from headmix_vision.ops.token_blocks import TokenBlocks

# Time per batch item and head, forward and backward: nanoseconds on an H200, bf16.
PAIR_COLUMN_NS = 2.8e-5  # one pair of tokens, one column of the head dims
SUMMARY_TOKEN_COLUMN_NS = 3.3e-3  # one token, one column: the tokens' rows
SUMMARY_ENTRY_NS = 2e-3  # one entry of a block's summary: its traffic
MIXED_ENTRY_NS = 2e-5  # one entry of a block's summary, one source block: the mixing products


def pairwise_cost(blocks: TokenBlocks, dim: int, value_dim: int) -> float:
    """Estimated time of the pairwise regime, in nanoseconds per batch item and head."""
    return PAIR_COLUMN_NS * blocks.num_tokens**2 * (dim + value_dim)


def summary_cost(blocks: TokenBlocks, dim: int, value_dim: int) -> float:
    """Estimated time of the summary regime, in nanoseconds per batch item and head."""
    entries = blocks.num_blocks * dim * value_dim
    return (
        SUMMARY_TOKEN_COLUMN_NS * blocks.num_tokens * (dim + value_dim)
        + SUMMARY_ENTRY_NS * entries
        + MIXED_ENTRY_NS * entries * blocks.num_blocks
    )


def choose_regime(blocks: TokenBlocks, dim: int, value_dim: int) -> str:
    """ "pairwise" or "summary", whichever is estimated faster."""
    pairwise, summary = (cost(blocks, dim, value_dim) for cost in (pairwise_cost, summary_cost))
    return "pairwise" if pairwise <= summary else "summary"
