"""MHLA from block summaries (equation 4), linear in N, in plain PyTorch for any device.

B batch, N tokens, H heads, D and Dv head dims, M blocks, n tokens in the largest block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.ops.feature_maps import apply_feature_map
from headmix_vision.ops.precision import accumulation_dtype, autocast_off
from headmix_vision.ops.token_blocks import TokenBlocks


def mhla_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    blocks: TokenBlocks,
    normalizer: str | None,
    feature_map: str,
    eps: float,
) -> Tensor:
    """See :func:`headmix_vision.ops.mhla`."""
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        q, k, v, mixing = (x.to(dtype) for x in (q, k, v, mixing))
        q, k = apply_feature_map(q, feature_map, eps), apply_feature_map(k, feature_map, eps)

        if normalizer == "paper":
            v = F.pad(v, (0, 1), value=1.0)  # the normaliser rides along as one more value

        tables = blocks.tables(q)
        places = (tables.tokens, tables.slot_of_token)
        q, k, v = (_ToBlocks.apply(x, *places) for x in (q, k, v))  # [B, H, M, n, D], absent places zero

        # A batched product over B and H: the matrix product of a shared M x M with all of them is several times slower.
        mixing = mixing.expand(q.shape[0], q.shape[1], *mixing.shape[-2:])
        summaries = k.transpose(-1, -2) @ v  # [B, H, M, D, Dv]
        mixed = (mixing @ summaries.flatten(-2)).view_as(summaries)
        out = _ToTokens.apply(q @ mixed, *places)  # [B, N, H, Dv]
        if normalizer == "paper":
            out = out[..., :-1] / out[..., -1:]
        elif normalizer == "source_block":
            scores = (q * k.sum(-2, keepdim=True)).sum(-1)  # [B, H, M, n]
            out = out / (_ToTokens.apply((mixing @ scores)[..., None], *places) + eps)
        return out.to(out_dtype)


class _ToBlocks(torch.autograd.Function):
    """Gather [B, N, H, D] into blocks [B, H, M, n, D], zero where a block has no token; adjoint of ``_ToTokens``.

    As a pair both directions are gathers: autograd's own scatter-add is slow on a CPU and unordered on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, slot_of_token)
        out = x.transpose(1, 2).index_select(2, tokens.clamp(min=0).flatten()).unflatten(2, tokens.shape)
        # Out of place: traced by torch.compile, an in-place fill here gives wrong gradients (torch 2.11).
        return out if tokens.numel() == slot_of_token.numel() else out.masked_fill((tokens < 0)[..., None], 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _ToTokens.apply(grads[0], *ctx.saved_tensors), None, None


class _ToTokens(torch.autograd.Function):
    """Gather blocks [B, H, M, n, D] back into raster order [B, N, H, D]; adjoint of ``_ToBlocks``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, slot_of_token)
        return x.flatten(2, 3).index_select(2, slot_of_token).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _ToBlocks.apply(grads[0], *ctx.saved_tensors), None, None
