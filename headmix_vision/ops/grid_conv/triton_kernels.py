"""Convolve each channel of tokens on their grid in Triton kernels: the kernels, and their launches for each layout.

B batch, N tokens, C channels, K taps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, planned
from headmix_vision.ops.token_grid import TokenGrid


@triton.jit
def places(tile, tiles_w, BH: tl.constexpr, BW: tl.constexpr):
    """Return row and place in the row, [BT, 1] each, of the tile of a plane."""
    token = tl.arange(0, BH * BW)[:, None]
    return tile // tiles_w * BH + token // BW, tile % tiles_w * BW + token % BW


@triton.jit
def load_planes(base, stride, row, place, allowed, first, T, H, W, COUNT: tl.constexpr, ALIGN: tl.constexpr):
    """Load the same places of COUNT planes in a row, float32, zero outside of the grid. ``base`` points to channels.

    ``stride`` lies between tokens, divided by ALIGN.
    """
    allowed = allowed & (row >= 0) & (row < H) & (place >= 0) & (place < W)
    pointers = base + (row * W + place).to(tl.int64) * stride * ALIGN
    planes = ()
    for i in tl.static_range(COUNT):
        t = first + i
        offset = t.to(tl.int64) * (H * W) * stride * ALIGN
        x = tl.load(pointers + offset, mask=allowed & (t >= 0) & (t < T), other=0.0)
        planes = planes + (x.to(tl.float32),)
    return planes


@triton.jit
def conv_kernel(
    x, weights, bias, d_out, out, x_b, x_n, d_out_b, d_out_n, out_b, out_n, T, H, W, segments, tiles, tiles_w,
    C: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, REPEATS: tl.constexpr,
    RESIDUAL: tl.constexpr, SILU: tl.constexpr, FLIP: tl.constexpr, ALIGN: tl.constexpr, STEPS: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Convolve tokens [B, T H W, C] by weights [KT KH KW, C], flipped for the adjoint.

    With ``d_out``, which SILU needs then, multiply it by the derivative of SiLU at the convolution instead.
    """
    blocks = tl.cdiv(C, BC)
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)[None, :]
    row, place = places(tl.program_id(0) // blocks % tiles, tiles_w, BH, BW)
    first = tl.program_id(0) // blocks // tiles % segments * STEPS
    b = (tl.program_id(0) // blocks // tiles // segments).to(tl.int64)
    weights += tl.zeros((BH * BW, 1), tl.int32)  # in the layout of the tiles
    x += b * x_b * ALIGN + c
    sums = ()
    for _ in tl.static_range(STEPS):
        start = tl.zeros((BH * BW, BC), tl.float32)
        if bias is not None:
            start += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
        sums = sums + (start,)
    for kh in range(KH):
        for kw in tl.static_range(KW):
            planes = load_planes(x, x_n, row + kh - KH // 2, place + (kw - KW // 2) * REPEATS, c < C, first - KT // 2,
                                 T, H, W, STEPS + KT - 1, ALIGN)  # fmt: skip
            for kt in tl.static_range(KT):
                tap = (kt * KH + kh) * KW + kw
                if FLIP:
                    tap = KT * KH * KW - 1 - tap
                w = tl.load(weights + tap * C + c, mask=c < C, other=0.0)
                if RESIDUAL and kt == KT // 2 and kw == KW // 2:
                    w += tl.where(kh == KH // 2, 1.0, 0.0)
                added = ()
                for i in tl.static_range(STEPS):
                    added = added + (sums[i] + w * planes[i + kt],)
                sums = added
    exists = (row < H) & (place < W) & (c < C)
    token = (row * W + place).to(tl.int64)
    for i in tl.static_range(STEPS):
        t = first + i
        y = sums[i]
        here = token + t.to(tl.int64) * (H * W)
        if SILU:
            gate = tl.sigmoid(y)
            if d_out is not None:
                d = tl.load(d_out + b * d_out_b * ALIGN + here * d_out_n * ALIGN + c, mask=exists & (t < T), other=0.0)
                y = d.to(tl.float32) * gate * (1 + y * (1 - gate))
            else:
                y *= gate
        p_out = out + b * out_b * ALIGN + here * out_n * ALIGN + c
        tl.store(p_out, y.to(out.dtype.element_ty), mask=exists & (t < T))


@triton.jit
def weight_gradient_kernel(
    d_out, x, sums, d_out_b, d_out_n, x_b, x_n, T, H, W, segments, tiles, tiles_w, items, parts, per_part,
    C: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, REPEATS: tl.constexpr,
    ALIGN: tl.constexpr, STEPS: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of weights and bias by parts: [parts * tiles, KT KH KW + 1, C] float32.

    A program takes one row of taps, kh, and the same tile of ``per_part`` items: segments of images.
    """
    blocks = tl.cdiv(C, BC)
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)[None, :]
    kh = tl.program_id(0) // blocks % KH
    tile = tl.program_id(0) // blocks // KH % tiles
    part = tl.program_id(0) // blocks // KH // tiles
    row, place = places(tile, tiles_w, BH, BW)
    inside = (c < C) & (row < H) & (place < W)  # beyond the grid a gradient of zero could meet a number that is none
    totals = ()
    for _ in tl.static_range(KT * KW + 1):
        totals = totals + (tl.zeros((BH * BW, BC), tl.float32),)
    for item in range(part * per_part, tl.minimum(part * per_part + per_part, items)):
        b, first = (item // segments).to(tl.int64), item % segments * STEPS
        gradients = load_planes(d_out + b * d_out_b * ALIGN + c, d_out_n, row, place, inside, first, T, H, W, STEPS,
                                ALIGN)  # fmt: skip
        added = ()
        for kw in tl.static_range(KW):
            planes = load_planes(x + b * x_b * ALIGN + c, x_n, row + kh - KH // 2, place + (kw - KW // 2) * REPEATS,
                                 inside, first - KT // 2, T, H, W, STEPS + KT - 1, ALIGN)  # fmt: skip
            for kt in tl.static_range(KT):
                total = totals[kw * KT + kt]
                for i in tl.static_range(STEPS):
                    total += gradients[i] * planes[i + kt]
                added = added + (total,)
        total = totals[KT * KW]
        for i in tl.static_range(STEPS):
            total += gradients[i]
        totals = added + (total,)
    column = tl.reshape(c, (BC,))
    sums += (part * tiles + tile).to(tl.int64) * (KT * KH * KW + 1) * C + column
    for kw in tl.static_range(KW):
        for kt in tl.static_range(KT):
            tap = (kt * KH + kh) * KW + kw
            tl.store(sums + tap * C, tl.sum(totals[kw * KT + kt], 0), mask=column < C)
    tl.store(sums + KT * KH * KW * C, tl.sum(totals[KT * KW], 0), mask=(column < C) & (kh == 0))


@triton.jit
def sum_parts_kernel(sums, d_weight, d_bias, parts, C, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Sum parts [parts, K + 1, C] into the gradients of weights [C, K] and of the bias [C]."""
    c, k = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    total = tl.zeros((BR, BC), tl.float32)
    for start in range(0, parts, BR):
        part = start + tl.arange(0, BR)[:, None]
        pointers = sums + (part.to(tl.int64) * (K + 1) + k) * C + c[None, :]
        total += tl.load(pointers, mask=(part < parts) & (c[None, :] < C), other=0.0)
    summed = tl.sum(total, 0)
    tl.store(d_weight + c * K + k, summed.to(d_weight.dtype.element_ty), mask=(c < C) & (k < K))
    tl.store(d_bias + c, summed.to(d_bias.dtype.element_ty), mask=(c < C) & (k == K))


# A thread has 4 channels of a token, which is as much as a weight of each tap leaves registers for.
TOKENS, CHANNELS, WARPS = 16, 64, 8
# Of a thread, so that two programs share a multiprocessor; float32 and extents of 5 would spill.
REGISTERS = {"maxnreg": 128}
MOST_STEPS = 8  # planes that a program makes: each tap's weight is read once for all of them
PART_ITEMS = 4  # segments of images whose weight gradients a program sums, whatever the device and the batch
SUM_ROWS, SUM_CHANNELS = 64, 32


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
        segments = triton.cdiv(T, MOST_STEPS)
        BH = 4 if H > 1 else 1
        BW = TOKENS // BH
        tiles_w = triton.cdiv(W, BW)
        constants = dict(
            KT=KT, KH=KH, KW=KW, REPEATS=self.repeats, STEPS=triton.cdiv(T, segments), BH=BH, BW=BW, BC=CHANNELS,
            num_warps=WARPS,
        )  # fmt: skip
        if dtype != torch.float32 and max(self.extents) <= 3:
            constants |= REGISTERS
        return segments, (triton.cdiv(H, BH) * tiles_w, tiles_w), constants


def _strides(align: int, *tensors: Layout) -> list[int]:
    return [stride // align for x in tensors for stride in x.strides[:2]]


def in_rows(x: Tensor) -> Tensor:
    """Copy a tensor whose channels are not contiguous."""
    return x if x.stride(2) == 1 else x.contiguous()


def taps_first(weight: Tensor) -> Tensor:
    """Copy [C, 1, *extents] to [K, C] in float32, where a tap's weights of neighbouring channels are neighbours."""
    return weight.new_empty(weight.shape[1:].numel(), len(weight), dtype=torch.float32).copy_(weight.flatten(1).T)


@planned
def _conv(
    x: Layout, d_out: Layout, out: Layout, bias: torch.dtype | None, planes: Planes, residual: bool, silu: bool,
    flip: bool,
) -> Launch:  # fmt: skip
    """Plan a launch; it is compiled for each type of the bias."""
    B, _, C = x.shape
    segments, tiles, constants = planes.tiling(x.dtype)
    align = alignment(x, d_out, out)
    grid = (triton.cdiv(C, constants["BC"]) * tiles[0] * segments * B,)
    numbers = (*_strides(align, x, d_out, out), *planes.sizes, segments, *tiles)
    constants |= dict(C=C, RESIDUAL=residual, SILU=silu, FLIP=flip, ALIGN=align)
    return Launch(conv_kernel, grid, numbers, constants)


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
    per_part = triton.cdiv(items, triton.cdiv(items, PART_ITEMS))
    parts = triton.cdiv(items, per_part)
    align = alignment(d_out, x)
    grid = (triton.cdiv(C, constants["BC"]) * planes.extents[1] * tiles[0] * parts,)
    numbers = (*_strides(align, d_out, x), *planes.sizes, segments, *tiles, items, parts, per_part)
    launch = Launch(weight_gradient_kernel, grid, numbers, constants | dict(C=C, ALIGN=align))
    rows, K = parts * tiles[0], planes.taps
    total = Launch(
        sum_parts_kernel,
        (triton.cdiv(C, SUM_CHANNELS), K + 1),
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
