"""Computes softmax attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.layers.cores.base import CORES, AttentionCore
from headmix_vision.layers.spec import LayerSpec
from headmix_vision.ops import TokenGrid


@CORES.register("softmax")
class SoftmaxCore(AttentionCore):
    """Computes scaled dot-product attention; PyTorch picks the kernel."""

    forms_weights = True

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.attn_drop = spec.attn_drop

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid, *, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        _check_mask(attn_mask, q)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        dropout = self.attn_drop if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        return out.transpose(1, 2)


@torch.fx.wrap  # torch.fx records the call whole: the check needs real arguments
def _check_mask(attn_mask: Tensor | None, q: Tensor) -> None:
    if attn_mask is None:
        return
    batch, tokens, heads, _ = q.shape
    pairs = zip(reversed(attn_mask.shape), (tokens, tokens, heads, batch), strict=False)
    if not 2 <= attn_mask.ndim <= 4 or any(size not in (1, whole) for size, whole in pairs):
        raise InputError(
            f"attn_mask must be [N, N] or [B, H, N, N] (each 1 or as given) with B, H, N = {(batch, heads, tokens)}, "
            f"got shape {tuple(attn_mask.shape)}."
        )
