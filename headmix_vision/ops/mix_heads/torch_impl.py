"""Compute head mixing by batched products in plain PyTorch, on any device.

B batch, N tokens, H input heads, G output heads, D head dim, C inputs.
"""

from __future__ import annotations

from torch import Tensor

from headmix_vision.ops.numerics import accumulation_dtype, autocast_off


def mix_heads_torch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute :func:`headmix_vision.ops.mix_heads` of inputs and, last, weights by one product for each token."""
    *inputs, weights = tensors
    first = inputs[0]
    dtype = accumulation_dtype(first.dtype)
    with autocast_off(first):
        # A product of [G, H] with all of [B, N, H, D] copies it twice to put the heads in front, and takes six times
        # as long on a CPU.
        weights = weights.to(dtype)[:, None, None].expand(-1, *first.shape[:2], -1, -1)
        return tuple([(w @ x.to(dtype)).to(first.dtype) for w, x in zip(weights.unbind(), inputs, strict=True)])
