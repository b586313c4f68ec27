"""Take the tokens of causal MHLA one after the other; what it keeps of them are the block summaries.

B batch, N tokens, H heads, D and Dv head dims, M blocks, n new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.ops.mhla.api import validate_mhla
from headmix_vision.ops.mhla.torch_impl import Settings, apply_feature_map, causal_sums
from headmix_vision.ops.numerics import accumulation_dtype, autocast_off
from headmix_vision.ops.token_blocks import BlockTables, TokenBlocks, to_blocks, to_tokens

_CPU = torch.empty(0)


class MHLAState(NamedTuple):
    """State of causal MHLA after the tokens so far: B H M D (Dv + 1) numbers, whatever the number of tokens.

    Attributes:
        summaries: [B, H, M, D, Dv], or Dv + 1 for the normalizer ``"paper"``, whose last column is z: the sums over the
            tokens taken of each block, zero in blocks to come. float32, or float64 for float64 inputs.
        num_tokens: tokens taken.
    """

    summaries: Tensor
    num_tokens: int


class MHLAStep(NamedTuple):
    """The outputs [B, n, H, Dv] of the new tokens, and the state after them."""

    out: Tensor
    state: MHLAState


def mhla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    blocks: TokenBlocks,
    state: MHLAState | None = None,
    *,
    normalizer: str | None = "paper",
    feature_map: str = "relu",
    eps: float = 1e-6,
) -> MHLAStep:
    """Compute causal :func:`headmix_vision.ops.mhla` of the next tokens: one, a frame, or any number.

    Outputs are as for the whole sequence. A state is never changed: from one state, other tokens may be tried.

    Args:
        q, k, v: [B, n, H, D] and [B, n, H, Dv], the next n tokens in the order of :meth:`TokenBlocks.order`.
        mixing, blocks: of the whole sequence of N tokens, as in ``mhla``.
        state: that of the tokens before, or None to start.
        normalizer, feature_map, eps: as in ``mhla``, the same in all calls. ``"source_block"`` is refused: it needs the
            queries of earlier blocks.

    Raises:
        InputError: as ``mhla``; if more tokens are given than are left, or ``state`` is of other sizes.
    """
    settings = Settings(blocks, normalizer, feature_map, eps, causal=True)
    taken = 0 if state is None else state.num_tokens
    validate_mhla(q, k, v, mixing, settings, "torch", taken)
    B, n, H, D = q.shape
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        q, k, v, mixing = _features(q, k, v, mixing, normalizer, feature_map, eps)
        memory = None if state is None else state.summaries
        expected = (B, H, blocks.num_blocks, D, v.shape[-1])
        if memory is not None and (memory.shape != expected or memory.dtype != dtype):
            raise InputError(
                f"the state must hold {dtype} {expected}, got {memory.dtype} {tuple(memory.shape)}: of another call."
            )
        first, tables = _next_tables(blocks, taken, n, q.device)
        q, k, v = to_blocks(tables, q, k, v)
        out, summaries = causal_sums(q, k, v, mixing.expand(B, H, *mixing.shape[-2:]), first, memory)
        out = _divided(to_tokens(tables, out), normalizer)
        return MHLAStep(out.to(out_dtype), MHLAState(summaries, taken + n))


def mhla_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    blocks: TokenBlocks,
    memory: Tensor | None = None,
    *,
    normalizer: str | None = "paper",
    feature_map: str = "relu",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`headmix_vision.ops.mhla` of some blocks, whose tokens all see each other and blocks before them.

    Args:
        q, k, v: [B, N, H, D] and [B, N, H, Dv], the tokens of ``blocks`` in raster order.
        mixing: [K + M, K + M] or [H, K + M, K + M], of K blocks before and these M; the last M rows are read.
        blocks: these M blocks.
        memory: summaries of the K blocks before, [B, H, K, D, Dv (+ 1)]; None where there are none.
        normalizer, feature_map, eps: as in ``mhla``. ``"source_block"`` is refused: it needs the queries of all blocks.

    Returns:
        The outputs [B, N, H, Dv], and the summaries of all K + M blocks.
    """
    with autocast_off(q):
        out_dtype = v.dtype
        q, k, v, mixing = _features(q, k, v, mixing, normalizer, feature_map, eps)
        tables = blocks.tables(q)
        q, k, v = to_blocks(tables, q, k, v)
        own = k.mT @ v
        summaries = own if memory is None else torch.cat([memory, own], dim=2)
        mixing = mixing[..., -blocks.num_blocks :, :].expand(*summaries.shape[:2], -1, -1)
        out = _divided(to_tokens(tables, q @ (mixing @ summaries.flatten(-2)).view_as(own)), normalizer)
        return out.to(out_dtype), summaries


def _features(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, normalizer: str | None, feature_map: str, eps: float
) -> tuple[Tensor, ...]:
    """Return features, values with a column of ones for the denominators, and the mixing, in the type of the sums."""
    if normalizer == "source_block":
        raise InputError("normalizer 'source_block' needs the queries of earlier blocks, of which none are kept.")
    q, k, v, mixing = (x.to(accumulation_dtype(q.dtype)) for x in (q, k, v, mixing))
    q, k = apply_feature_map(q, feature_map, eps), apply_feature_map(k, feature_map, eps)
    return q, k, F.pad(v, (0, 1), value=1.0) if normalizer == "paper" else v, mixing


def _divided(out: Tensor, normalizer: str | None) -> Tensor:
    return out[..., :-1] / out[..., -1:] if normalizer == "paper" else out


def _next_tables(blocks: TokenBlocks, taken: int, count: int, device: torch.device) -> tuple[int, BlockTables]:
    """Return the first block that the next tokens lie in, and tables of them in this and the following blocks."""
    sizes = (blocks.tables(_CPU).tokens >= 0).sum(1)
    ends = sizes.cumsum(0)
    first, last = (int(torch.searchsorted(ends, place, right=True)) for place in (taken, taken + count - 1))
    start = (ends - sizes)[first : last + 1].clamp(min=taken)[:, None]
    end = ends[first : last + 1].clamp(max=taken + count)[:, None]
    token = start + torch.arange(int((end - start).max()))
    tokens = torch.where(token < end, token - taken, -1)
    slots = (tokens.flatten() >= 0).nonzero().flatten()
    return first, BlockTables.of(*(x.to(device) for x in (slots // tokens.shape[1], tokens, slots)))
