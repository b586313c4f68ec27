"""The settings of an MHLA call, and its form in plain PyTorch, from block summaries (equation 4): linear in N.

B batch, N tokens, H heads, D and Dv head dims, M blocks, n tokens in the largest block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.ops.mhla.exchange import mix_over_ranks
from headmix_vision.ops.numerics import accumulation_dtype, autocast_off
from headmix_vision.ops.symbolic_sizes import count_chunks
from headmix_vision.ops.token_blocks import BlocksOfRank, BlockTables, TokenBlocks, to_blocks, to_tokens
from headmix_vision.ops.token_grid import TokenGrid
from headmix_vision.ops.token_ranks import TokenRanks

CHUNK = 64  # tokens of a block that meet each other one by one, in causal attention
FEATURE_MAPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    # eps keeps the features, and so the normaliser, above zero.
    "relu": lambda x, eps: torch.where(x < 0, 0.0, x).add_(
        eps
    ),  # the slope of clamp at zero depends on torch's release
    "elu1": lambda x, eps: F.elu(x) + (1 + eps),
    "identity": lambda x, eps: x,
}


def apply_feature_map(x: Tensor, name: str, eps: float) -> Tensor:
    """Map features elementwise: ``relu(x) + eps``, ``elu(x) + 1 + eps`` or ``x``."""
    return FEATURE_MAPS[name](x, eps)


NORMALIZERS = ("paper", "source_block", None)
REGIMES = ("pairwise", "summary")
_MANTISSA = 2.0**53
_OF_RANK = -1  # begins packed settings of a rank; no index is negative


class Settings(NamedTuple):
    """The settings of an MHLA call: all that it takes beside tensors; see :func:`headmix_vision.ops.mhla`.

    ``regime`` names the algorithm of the kernels, and ``fallback`` says whether another form may take their place where
    one does not compile; other implementations read neither.
    """

    blocks: TokenBlocks
    normalizer: str | None = "paper"
    feature_map: str = "relu"
    eps: float = 1e-6
    regime: str = "summary"
    causal: bool = False
    fallback: bool = False

    def pack(self) -> list[int]:
        """Write the settings as integers: torch.library passes these, symbolic sizes of a grid included."""
        grid, (mantissa, exponent) = self.blocks.grid, math.frexp(self.eps)
        choices = (
            NORMALIZERS.index(self.normalizer),
            tuple(FEATURE_MAPS).index(self.feature_map),
            REGIMES.index(self.regime),
            int(self.causal),
            int(self.fallback),
        )
        sizes = (grid.num_prefix_tokens, grid.repeats, *grid.shape, *self.blocks.block_grid)
        ranks = self.blocks.ranks if isinstance(self.blocks, BlocksOfRank) else None
        of_rank = () if ranks is None else (_OF_RANK, ranks.rank, ranks.size, ranks.axis)
        return [*of_rank, *choices, int(mantissa * _MANTISSA), exponent, *sizes]


def unpack(packed: Sequence[int]) -> Settings:
    """Read what :meth:`Settings.pack` wrote; the group of ranks is left out, which work on tokens does not need."""
    if packed[0] == _OF_RANK:
        of_rank, settings = TokenRanks("", *packed[1:4]), unpack(packed[4:])
        return settings._replace(blocks=settings.blocks.of_rank(of_rank))
    normalizer, feature_map, regime, causal, fallback, mantissa, exponent, num_prefix_tokens, repeats, *axes = packed
    shape, block_grid = tuple(axes[: len(axes) // 2]), tuple(axes[len(axes) // 2 :])
    return Settings(
        TokenBlocks(TokenGrid(shape, num_prefix_tokens, repeats), block_grid),
        NORMALIZERS[normalizer],
        tuple(FEATURE_MAPS)[feature_map],
        math.ldexp(mantissa / _MANTISSA, exponent),
        REGIMES[regime],
        bool(causal),
        bool(fallback),
    )


def needs_output(packed: Sequence[int]) -> bool:
    """Return whether the backward pass of packed settings reads the output, without reading the rest."""
    return REGIMES[packed[2]] == "pairwise" or bool(packed[3])


@lru_cache(maxsize=256)
def _cached(packed: tuple[int, ...]) -> Settings:
    return unpack(packed)


def unpack_cached(packed: Sequence[int]) -> Settings:
    """Read packed settings without symbolic sizes, once for all calls with the same integers."""
    return _cached(tuple(packed))


def mhla_torch(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, settings: Settings, tables: BlockTables | None = None
) -> Tensor:
    """Compute :func:`headmix_vision.ops.mhla` from block summaries, with the tables of its blocks if they are given."""
    blocks, normalizer, feature_map, eps, _, causal, _ = settings
    tables = blocks.tables(q) if tables is None else tables
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        q, k, v, mixing = q.to(dtype), k.to(dtype), v.to(dtype), mixing.to(dtype)
        features = FEATURE_MAPS[feature_map]
        q, k = features(q, eps), features(k, eps)

        if normalizer == "paper":
            v = F.pad(v, (0, 1), value=1.0)  # one more value of 1 sums the denominator

        q, k, v = to_blocks(tables, q, k, v)  # [B, H, M, n, D], absent places zero

        if causal:
            out, _ = causal_sums(q, k, v, mixing.expand(q.shape[0], q.shape[1], *mixing.shape[-2:]))
        else:
            summaries = k.transpose(-1, -2) @ v  # [B, H, M, D, Dv]
            if isinstance(blocks, BlocksOfRank):
                (mixed,) = mix_over_ranks(mixing, blocks, dtype, summaries)
            else:
                # A batched product over B and H: that of a shared M x M with all of them is several times slower.
                mixing = mixing.expand(q.shape[0], q.shape[1], *mixing.shape[-2:])
                mixed = (mixing @ summaries.flatten(-2)).view_as(summaries)
            out = q @ mixed
        out = to_tokens(tables, out)  # [B, N, H, Dv]
        if normalizer == "paper":
            out = out[..., :-1] / out[..., -1:]
        elif normalizer == "source_block":
            out = out / source_block_denominator(q, k, mixing, tables, eps, causal)
        return out.to(out_dtype)


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, first: int = 0, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the undivided causal outputs of the blocks from ``first`` on, and the summaries of all blocks.

    Blocks are cut into chunks: a token reads the blocks before from their summaries, the chunks before of its own block
    from the running sum of theirs, and its own chunk token by token.

    Args:
        q, k, v: features and values of m blocks, [B, H, m, n, D].
        mixing: [B, H, M, M].
        memory: [B, H, M, D, Dv], the summaries of earlier tokens, including block ``first``; None is zero.

    Returns:
        [B, H, m, n, Dv] and [B, H, M, D, Dv].
    """
    m, n, M = *q.shape[2:4], mixing.shape[-1]
    chunks, size = count_chunks(n, CHUNK)
    # [B, H, m, chunks, size, D]
    q, k, v = (F.pad(x, (0, 0, 0, chunks * size - n)).unflatten(3, (chunks, size)) for x in (q, k, v))
    of_chunks = k.mT @ v
    begun = F.pad(of_chunks[:, :, :, :-1].cumsum(3), (0, 0, 0, 0, 1, 0))
    summaries = F.pad(of_chunks.sum(3), (0, 0, 0, 0, first, M - first - m))
    if memory is not None:
        summaries, begun = memory + summaries, memory[:, :, first : first + m, None] + begun
    before = mixing[..., first : first + m, :].tril(first - 1) @ summaries.flatten(-2)
    own = mixing.diagonal(dim1=-2, dim2=-1)[..., first : first + m, None, None, None]
    out = q @ (before.view_as(summaries[:, :, :m])[:, :, :, None] + own * begun) + own * ((q @ k.mT).tril() @ v)
    return out.flatten(3, 4)[..., :n, :], summaries


def source_block_denominator(
    q: Tensor, k: Tensor, mixing: Tensor, tables: BlockTables, eps: float, causal: bool
) -> Tensor:
    """Compute sum_b m[i, b] (q_b . z_b) + eps for each token; q_b is the query at its place of block b (released code).

    Args:
        q, k: features in blocks, [B, H, M, n, D].
        mixing: [B, H, M, M].

    Returns:
        [B, N, H, 1].
    """
    scores = (q * k.sum(-2, keepdim=True)).sum(-1)  # [B, H, M, n]
    if causal:
        own = (q * k.cumsum(-2)).sum(-1)
        scores = mixing.tril(-1) @ scores + mixing.diagonal(dim1=-2, dim2=-1)[..., None] * own
    else:
        scores = mixing @ scores
    return to_tokens(tables, scores[..., None]) + eps
