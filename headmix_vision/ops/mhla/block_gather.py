"""Rows of tokens gathered into blocks and back, differentiable.

B batch, N tokens, H heads, D head dim, M blocks, n tokens in the largest block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.token_blocks import BlockTables


def to_blocks(x: Tensor, tables: BlockTables) -> Tensor:
    """Gather [B, N, H, D] into blocks [B, H, M, n, D], zero where a block has no token."""
    return _ToBlocks.apply(x, tables.tokens, tables.slot_of_token)


def to_tokens(x: Tensor, tables: BlockTables) -> Tensor:
    """Gather blocks [B, H, M, n, D] back into raster order [B, N, H, D]."""
    return _ToTokens.apply(x, tables.tokens, tables.slot_of_token)


class _ToBlocks(torch.autograd.Function):
    """Adjoint of ``_ToTokens``.

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
    """Adjoint of ``_ToBlocks``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, slot_of_token)
        return x.flatten(2, 3).index_select(2, slot_of_token).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _ToBlocks.apply(grads[0], *ctx.saved_tensors), None, None


def source_block_denominator(q: Tensor, k: Tensor, mixing: Tensor, tables: BlockTables, eps: float) -> Tensor:
    """sum_b m[i, b] (q_b . z_b) + eps for each token, q_b the query at its place of block b (released code).

    Args:
        q, k: features in blocks, [B, H, M, n, D].
        mixing: [B, H, M, M].

    Returns:
        [B, N, H, 1].
    """
    scores = (q * k.sum(-2, keepdim=True)).sum(-1)  # [B, H, M, n]
    return to_tokens((mixing @ scores)[..., None], tables) + eps
