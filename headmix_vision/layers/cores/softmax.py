"""Computes softmax attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

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
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        dropout = self.attn_drop if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        return out.transpose(1, 2)
