"""MHLA from block summaries (equation 4), linear in N, in plain PyTorch for any device.

B batch, N tokens, H heads, D and Dv head dims, M blocks, n tokens in the largest block.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from headmix_vision.ops.feature_maps import apply_feature_map
from headmix_vision.ops.mhla.block_gather import source_block_denominator, to_blocks, to_tokens
from headmix_vision.ops.mhla.settings import Settings
from headmix_vision.ops.precision import accumulation_dtype, autocast_off


def mhla_torch(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, settings: Settings) -> Tensor:
    """Compute :func:`headmix_vision.ops.mhla`."""
    blocks, normalizer, feature_map, eps, _ = settings
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        q, k, v, mixing = (x.to(dtype) for x in (q, k, v, mixing))
        q, k = apply_feature_map(q, feature_map, eps), apply_feature_map(k, feature_map, eps)

        if normalizer == "paper":
            v = F.pad(v, (0, 1), value=1.0)  # the normaliser rides along as one more value

        tables = blocks.tables(q)
        q, k, v = (to_blocks(x, tables) for x in (q, k, v))  # [B, H, M, n, D], absent places zero

        # A batched product over B and H: the matrix product of a shared M x M with all of them is several times slower.
        mixing = mixing.expand(q.shape[0], q.shape[1], *mixing.shape[-2:])
        summaries = k.transpose(-1, -2) @ v  # [B, H, M, D, Dv]
        mixed = (mixing @ summaries.flatten(-2)).view_as(summaries)
        out = to_tokens(q @ mixed, tables)  # [B, N, H, Dv]
        if normalizer == "paper":
            out = out[..., :-1] / out[..., -1:]
        elif normalizer == "source_block":
            out = out / source_block_denominator(q, k, mixing, tables, eps)
        return out.to(out_dtype)
