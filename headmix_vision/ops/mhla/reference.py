"""Compute MHLA as the paper writes it, equation 5: the dense N x N form, which specifies the other implementations.

B batch, N tokens, H heads, D and Dv head dims, M blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headmix_vision.ops.mhla.torch_impl import Settings, apply_feature_map
from headmix_vision.ops.numerics import accumulation_dtype, autocast_off
from headmix_vision.ops.token_blocks import TokenBlocks


def mhla_reference(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, settings: Settings) -> Tensor:
    """Compute :func:`headmix_vision.ops.mhla` in its N x N form."""
    blocks, normalizer, feature_map, eps, _, causal, _ = settings
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        q, k, v, mixing = (x.to(dtype) for x in (q, k, v, mixing))
        q, k = apply_feature_map(q, feature_map, eps), apply_feature_map(k, feature_map, eps)

        block, _, slot, *_ = blocks.tables(q)
        token_mixing = mixing[..., block[:, None], block[None, :]]  # [(H,) N, N]
        if causal:
            token_mixing = token_mixing.where(slot[None, :] <= slot[:, None], 0)
        weights = token_mixing * torch.einsum("bihd,bjhd->bhij", q, k)
        out = torch.einsum("bhij,bjhe->bihe", weights, v)
        if normalizer == "paper":
            out = out / weights.sum(-1).transpose(1, 2)[..., None]
        elif normalizer == "source_block":
            out = out / (_source_block_denominator(q, k, mixing, blocks, causal) + eps).transpose(1, 2)[..., None]
        return out.to(out_dtype)


def _source_block_denominator(q: Tensor, k: Tensor, mixing: Tensor, blocks: TokenBlocks, causal: bool) -> Tensor:
    """Compute sum_b m[i, b] (q_b . z_b) for each token; q_b is at the token's place of block b: [B, H, N]."""
    tables = blocks.tables(q)
    rows = mixing.expand(q.shape[2], *mixing.shape[-2:])  # [H, M, M]
    denominator = torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=q.dtype, device=q.device)
    for source, members in enumerate(tables.tokens):
        z = k[:, members[members >= 0]].sum(1)  # [B, H, D]
        for place, token in enumerate(members.tolist()):
            if token < 0:
                continue
            score = (q[:, token] * z).sum(-1)  # [B, H]
            targets = tables.tokens[:, place]
            present = targets >= 0
            if causal:
                present = present & (torch.arange(len(targets), device=q.device) > source)
                own = (q[:, token] * k[:, members[(members >= 0) & (members <= token)]].sum(1)).sum(-1)
                denominator[..., token] += rows[:, source, source] * own
            contribution = rows[:, present, source] * score[..., None]  # [B, H, targets]
            denominator = denominator.index_add(2, targets[present], contribution)
    return denominator
