"""Computes MHLA from block summaries (equation 4) in plain PyTorch: linear in N, on any device.

B batch, N tokens, H heads, D and Dv head dims, M blocks, n tokens in the largest block.
"""

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor

from headmix_vision.ops.dispatch import IndexMap, apply_either, with_tangents
from headmix_vision.ops.mhla.exchange import mix_over_ranks
from headmix_vision.ops.mhla.settings import Settings, apply_feature_map
from headmix_vision.ops.runtime import accumulation_dtype, autocast_off
from headmix_vision.ops.token_blocks import BlocksOfRank, BlockTables

CHUNK = 64  # tokens of a block that meet each other one by one, in causal attention


def mhla_torch(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, settings: Settings) -> Tensor:
    """Compute :func:`headmix_vision.ops.mhla` from block summaries."""
    blocks, normalizer, feature_map, eps, _, causal, _ = settings
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        q, k, v, mixing = (x.to(dtype) for x in (q, k, v, mixing))
        q, k = apply_feature_map(q, feature_map, eps), apply_feature_map(k, feature_map, eps)

        if normalizer == "paper":
            v = F.pad(v, (0, 1), value=1.0)  # one more value of 1 sums the denominator

        tables = blocks.tables(q)
        q, k, v = (to_blocks(x, tables) for x in (q, k, v))  # [B, H, M, n, D], absent places zero

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
        out = to_tokens(out, tables)  # [B, N, H, Dv]
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
        memory: [B, H, M, D, Dv], the summaries of earlier tokens, those of block ``first`` included; None is zero.

    Returns:
        [B, H, m, n, Dv] and [B, H, M, D, Dv].
    """
    m, n, M = *q.shape[2:4], mixing.shape[-1]
    size = min(n, CHUNK)
    q, k, v = (F.pad(x, (0, 0, 0, -n % size)).unflatten(3, (-1, size)) for x in (q, k, v))  # [B, H, m, chunks, size, D]
    of_chunks = k.mT @ v
    begun = F.pad(of_chunks[:, :, :, :-1].cumsum(3), (0, 0, 0, 0, 1, 0))
    summaries = F.pad(of_chunks.sum(3), (0, 0, 0, 0, first, M - first - m))
    if memory is not None:
        summaries, begun = memory + summaries, memory[:, :, first : first + m, None] + begun
    before = mixing[..., first : first + m, :].tril(first - 1) @ summaries.flatten(-2)
    own = mixing.diagonal(dim1=-2, dim2=-1)[..., first : first + m, None, None, None]
    out = q @ (before.view_as(summaries[:, :, :m])[:, :, :, None] + own * begun) + own * ((q @ k.mT).tril() @ v)
    return out.flatten(3, 4)[..., :n, :], summaries


def to_blocks(x: Tensor, tables: BlockTables) -> Tensor:
    """Gather [B, N, H, D] into blocks [B, H, M, n, D], zero where a block has no token."""
    return _to_blocks(x, tables.tokens, tables.slot_of_token)


def to_tokens(x: Tensor, tables: BlockTables) -> Tensor:
    """Gather blocks [B, H, M, n, D] back into raster order [B, N, H, D]."""
    return _to_tokens(x, tables.tokens, tables.slot_of_token)


def _to_blocks(x: Tensor, tokens: Tensor, slot_of_token: Tensor) -> Tensor:
    return cast(Tensor, _apply_to_blocks(x, tokens, slot_of_token))


def _to_tokens(x: Tensor, tokens: Tensor, slot_of_token: Tensor) -> Tensor:
    return cast(Tensor, _apply_to_tokens(x, tokens, slot_of_token))


class _ToBlocks(IndexMap):
    """Gathers tokens into blocks; the adjoint of ``_ToTokens``."""

    @staticmethod
    def forward(x: Tensor, tokens: Tensor, slot_of_token: Tensor) -> Tensor:
        out = x.transpose(1, 2).index_select(2, tokens.clamp(min=0).flatten()).unflatten(2, tokens.shape)
        # Out of place: traced by torch.compile, an in-place fill here gives wrong gradients (torch 2.11).
        return out if tokens.numel() == slot_of_token.numel() else out.masked_fill((tokens < 0)[..., None], 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_tokens(grads[0], *ctx.saved_tensors), None, None


class _ToTokens(IndexMap):
    """Gathers blocks into tokens; the adjoint of ``_ToBlocks``."""

    @staticmethod
    def forward(x: Tensor, tokens: Tensor, slot_of_token: Tensor) -> Tensor:
        return x.flatten(2, 3).index_select(2, slot_of_token).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_blocks(grads[0], *ctx.saved_tensors), None, None


_apply_to_blocks = apply_either(_ToBlocks, with_tangents(_ToBlocks))
_apply_to_tokens = apply_either(_ToTokens, with_tangents(_ToTokens))


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
    return to_tokens(scores[..., None], tables) + eps
