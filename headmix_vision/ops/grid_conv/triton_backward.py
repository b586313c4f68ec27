"""The kernels of the gradients of weights and bias of the depthwise convolution; see ``triton_tiles``."""

import triton
import triton.language as tl

from headmix_vision.ops.grid_conv.triton_tiles import load_planes, places


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
