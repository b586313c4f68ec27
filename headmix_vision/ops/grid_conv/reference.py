"""Compute the depthwise convolution as its definition says it, which specifies the other implementations.

B batch, N tokens, C channels.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.ops.numerics import accumulation_dtype, autocast_off
from headmix_vision.ops.token_grid import TokenGrid


def grid_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: TokenGrid, residual: bool, silu: bool
) -> Tensor:
    """Compute :func:`headmix_vision.ops.grid_conv` tap by tap."""
    dtype, extents = accumulation_dtype(x.dtype), weight.shape[2:]
    with autocast_off(x):
        prefix, tokens = x.to(dtype).split_with_sizes(
            [grid.repeats * grid.num_prefix_tokens, grid.repeats * grid.num_grid_tokens], 1
        )
        places = tokens.unflatten(1, (*grid.shape, grid.repeats))  # [B, *shape, repeats, C]
        around = [n // 2 for extent in reversed(extents) for n in (extent, extent)]
        padded = F.pad(places, (0, 0, 0, 0, *around))
        total = places if residual else torch.zeros_like(places)
        taps = itertools.product(*map(range, extents))
        for tap, tap_weight in zip(taps, weight.to(dtype).flatten(1).unbind(1), strict=True):
            neighbours = padded
            for axis, (first, size) in enumerate(zip(tap, grid.shape, strict=True), 1):
                neighbours = neighbours.narrow(axis, first, size)
            total = total + tap_weight * neighbours
        if bias is not None:
            total = total + bias.to(dtype)
        out = torch.cat([prefix, total.flatten(1, -2)], 1)
        return (F.silu(out) if silu else out).to(x.dtype)
