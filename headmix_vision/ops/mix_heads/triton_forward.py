"""The kernel that mixes heads. One program makes all output heads of one tile of columns; see ``triton_tiles``."""

import triton
import triton.language as tl

from headmix_vision.ops.mix_heads.triton_tiles import dot_weights, load_tile, load_weights, pick, store_tile


@triton.jit
def mix_kernel(
    x0, x1, x2, weights, out0, out1, out2,
    x0_b, x0_n, x0_h, x1_b, x1_n, x1_h, x2_b, x2_n, x2_h, weight_c, weight_g, weight_h, N, tiles,
    C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SHARES: tl.constexpr, ALIGN: tl.constexpr,
    SPLIT: tl.constexpr, BG: tl.constexpr, BH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mix C tensors [B, N, H, D] by weights [C, G, H] into [B, N, G, D]."""
    c = tl.program_id(0) % C  # tensors are often parts of one: neighbouring programs read neighbouring memory
    tile = tl.program_id(0) // C % tiles
    b = (tl.program_id(0) // C // tiles).to(tl.int64)
    x = pick(c, x0, x1, x2) + b * pick(c, x0_b, x1_b, x2_b) * ALIGN
    x_n, x_h = pick(c, x0_n, x1_n, x2_n), pick(c, x0_h, x1_h, x2_h)
    out = pick(c, out0, out1, out2) + b * N * (G * D)
    if SHARES * H <= BH:
        # [BH, COLUMNS]
        all_heads = load_tile(x, x_n, x_h, tile, 0, N, H, SHARES, D, ALIGN, BH, COLUMNS)
    for g in tl.static_range(0, SHARES * G, BG):
        mixed = tl.zeros((BG, COLUMNS), tl.float32)
        for h in tl.static_range(0, SHARES * H, BH):
            if SHARES * H <= BH:
                heads = all_heads
            else:
                heads = load_tile(x, x_n, x_h, tile, h, N, H, SHARES, D, ALIGN, BH, COLUMNS)
            w = load_weights(weights + c * weight_c, weight_g, weight_h, g, h, G, H, SHARES, BG, BH)
            mixed = dot_weights(w, heads, mixed, SPLIT)
        store_tile(out, mixed, tile, g, N, G, SHARES, D, 1)
