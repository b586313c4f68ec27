"""Launches the Triton kernels of the depthwise convolution: plans tiles and grids for each layout, allocates sums.

B batch, N tokens, C channels, K taps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headmix_vision.ops.grid_conv import triton_backward as backward
from headmix_vision.ops.grid_conv import triton_forward as forward
from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, planned
from headmix_vision.ops.token_grid import TokenGrid

# A thread has 4 channels of a token, which is as much as a weight of each tap leaves registers for.
TOKENS, CHANNELS, WARPS = 16, 64, 8
# Of a thread, so that two programs share a multiprocessor; float32 and extents of 5 would spill.
REGISTERS = {"maxnreg": 128}
MOST_STEPS = 8  # planes that a program makes: each tap's weight is read once for all of them
PART_ITEMS = 4  # segments of images whose weight gradients a program sums, whatever the device and the batch
SUM_ROWS, SUM_CHANNELS = 64, 32


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


class Planes(NamedTuple):
    """A grid as T planes of H rows of W places, and the extents of the kernel along them.

    Programs walk from plane to plane. Images are planes of one row; rows of images where no row is a neighbour of
    another are one row.
    """

    sizes: tuple[int, int, int]
    extents: tuple[int, int, int]
    repeats: int

    @classmethod
    def of(cls, grid: TokenGrid, extents: tuple[int, ...]) -> Planes:
        (*outer, W), (*outer_extents, KW) = grid.shape, extents
        (T, H), (KT, KH) = ((*axes, 1, 1)[:2] for axes in (outer, outer_extents))
        W *= grid.repeats
        if KH == KW == 1:
            H, W = 1, H * W
        return cls((T, H, W), (KT, KH, KW), grid.repeats)

    @property
    def taps(self) -> int:
        return math.prod(self.extents)

    def tiling(self, dtype: torch.dtype) -> tuple[int, tuple[int, int], dict[str, Any]]:
        """Return segments of T, tiles of a plane and of its rows, and constants of the kernels."""
        (T, H, W), (KT, KH, KW) = self.sizes, self.extents
        segments = _ceil(T, MOST_STEPS)
        BH = 4 if H > 1 else 1
        BW = TOKENS // BH
        tiles_w = _ceil(W, BW)
        constants = dict(
            KT=KT, KH=KH, KW=KW, REPEATS=self.repeats, STEPS=_ceil(T, segments), BH=BH, BW=BW, BC=CHANNELS,
            num_warps=WARPS,
        )  # fmt: skip
        if dtype != torch.float32 and max(self.extents) <= 3:
            constants |= REGISTERS
        return segments, (_ceil(H, BH) * tiles_w, tiles_w), constants


def _strides(align: int, *tensors: Layout) -> list[int]:
    return [stride // align for x in tensors for stride in x.strides[:2]]


def in_rows(x: Tensor) -> Tensor:
    """Copy a tensor whose channels are not contiguous."""
    return x if x.stride(2) == 1 else x.contiguous()


def taps_first(weight: Tensor) -> Tensor:
    """Copy [C, 1, *extents] to [K, C] in float32, where a tap's weights of neighbouring channels are neighbours."""
    return weight.new_empty(weight[0].numel(), len(weight), dtype=torch.float32).copy_(weight.flatten(1).T)


@planned
def _conv(
    x: Layout, d_out: Layout, out: Layout, bias: torch.dtype | None, planes: Planes, residual: bool, silu: bool,
    flip: bool,
) -> Launch:  # fmt: skip
    """Plan a launch; it is compiled for each type of the bias."""
    B, _, C = x.shape
    segments, tiles, constants = planes.tiling(x.dtype)
    align = alignment(x, d_out, out)
    grid = (_ceil(C, constants["BC"]) * tiles[0] * segments * B,)
    numbers = (*_strides(align, x, d_out, out), *planes.sizes, segments, *tiles)
    constants |= dict(C=C, RESIDUAL=residual, SILU=silu, FLIP=flip, ALIGN=align)
    return Launch(forward.conv_kernel, grid, numbers, constants)


def conv(
    x: Tensor, taps: Tensor, bias: Tensor | None, d_out: Tensor | None, out: Tensor, planes: Planes,
    residual: bool = False, silu: bool = False, flip: bool = False,
) -> None:  # fmt: skip
    """Fill ``out`` [B, N, C], of contiguous channels, from ``x``; see the kernel for ``d_out``."""
    bias = None if bias is None else bias.contiguous()
    layouts = layout(x), layout(out if d_out is None else d_out), layout(out)
    launch = _conv(*layouts, None if bias is None else bias.dtype, planes, residual, silu, flip)
    launch(x, taps, bias, d_out, out)


class WeightPlan(NamedTuple):
    """The launches that sum the weight gradient, and of how many parts."""

    launch: Launch
    total: Launch
    parts: int


@planned
def _weight_gradient(d_out: Layout, x: Layout, planes: Planes, weight: torch.dtype, bias: torch.dtype) -> WeightPlan:
    """Plan the launches; they are compiled for each type of the weight and of the bias."""
    B, _, C = x.shape
    segments, tiles, constants = planes.tiling(x.dtype)
    items = B * segments
    per_part = _ceil(items, _ceil(items, PART_ITEMS))
    parts = _ceil(items, per_part)
    align = alignment(d_out, x)
    grid = (_ceil(C, constants["BC"]) * planes.extents[1] * tiles[0] * parts,)
    numbers = (*_strides(align, d_out, x), *planes.sizes, segments, *tiles, items, parts, per_part)
    launch = Launch(backward.weight_gradient_kernel, grid, numbers, constants | dict(C=C, ALIGN=align))
    rows, K = parts * tiles[0], planes.taps
    total = Launch(
        backward.sum_parts_kernel,
        (_ceil(C, SUM_CHANNELS), K + 1),
        (rows, C),
        dict(K=K, BR=SUM_ROWS, BC=SUM_CHANNELS, num_warps=4),
    )
    return WeightPlan(launch, total, rows)


def weight_gradient(d_out: Tensor, x: Tensor, planes: Planes, d_weight: Tensor, d_bias: Tensor) -> None:
    """Fill ``d_weight`` [C, 1, *extents] and ``d_bias`` [C], contiguous tensors."""
    plan = _weight_gradient(layout(d_out), layout(x), planes, d_weight.dtype, d_bias.dtype)
    sums = x.new_empty(plan.parts, planes.taps + 1, x.shape[2], dtype=torch.float32)
    plan.launch(d_out, x, sums)
    plan.total(sums, d_weight, d_bias)
