"""Compute head mixing as its definition says it, which specifies the other implementations.

B batch, N tokens, H input heads, G output heads, D head dim, C inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headmix_vision.ops.numerics import accumulation_dtype, autocast_off


def mix_heads_reference(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute :func:`headmix_vision.ops.mix_heads` of inputs and, last, weights head by head."""
    *inputs, weights = tensors
    first = inputs[0]
    dtype = accumulation_dtype(first.dtype)
    with autocast_off(first):
        outs = []
        for x, weight in zip(inputs, weights.to(dtype), strict=True):
            heads = x.to(dtype).unbind(2)
            mixed = [sum(w * head for w, head in zip(row.unbind(), heads, strict=True)) for row in weight]
            outs.append(torch.stack(mixed, 2).to(first.dtype))
        return tuple(outs)
