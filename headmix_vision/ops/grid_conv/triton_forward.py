"""The kernel of the depthwise convolution, which also makes the gradient of its input; see ``triton_tiles``."""

import triton
import triton.language as tl

from headmix_vision.ops.grid_conv.triton_tiles import load_planes, places


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
