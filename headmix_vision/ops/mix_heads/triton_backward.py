"""The kernel of all gradients of head mixing, which reads each input and output gradient once; see ``triton_tiles``."""

import triton
import triton.language as tl

from headmix_vision.ops.mix_heads.triton_tiles import dot_weights, load_tile, load_weights, pick, store_tile


@triton.jit
def _store_part(base, total, part, first_g, first_h, G: tl.constexpr, H: tl.constexpr, SHARES: tl.constexpr):
    """Store the gradients of weights that each share of a part sums: [parts, SHARES, G, H]."""
    g_row = first_g + tl.arange(0, total.shape[0])[:, None]
    h_row = first_h + tl.arange(0, total.shape[1])[None, :]
    pointers = base + ((part * SHARES + g_row // G) * G + g_row % G) * H + h_row % H
    tl.store(pointers, total, mask=(g_row // G == h_row // H) & (g_row < SHARES * G))


@triton.jit
def mix_backward_kernel(
    g0, g1, g2, x0, x1, x2, weights, d_x0, d_x1, d_x2, d_weights,
    g0_b, g0_n, g0_h, g1_b, g1_n, g1_h, g2_b, g2_n, g2_h, x0_b, x0_n, x0_h, x1_b, x1_n, x1_h, x2_b, x2_n, x2_h,
    weight_c, weight_g, weight_h, N, tiles, parts, per_part,
    C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SHARES: tl.constexpr, ALIGN: tl.constexpr,
    SPLIT: tl.constexpr, PACK: tl.constexpr, BG: tl.constexpr, BH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the inputs [B, N, (PACK,) H, D], and of the weights by parts.

    A program makes one of the parts [C, B * parts, SHARES, G, H] from ``per_part`` tiles of columns of an image, or
    from one tile where heads need several tiles of rows.
    """
    c = tl.program_id(0) % C
    part = tl.program_id(0) // C % parts
    b = (tl.program_id(0) // C // parts).to(tl.int64)
    d_out = pick(c, g0, g1, g2) + b * pick(c, g0_b, g1_b, g2_b) * ALIGN
    g_n, g_h = pick(c, g0_n, g1_n, g2_n), pick(c, g0_h, g1_h, g2_h)
    x = pick(c, x0, x1, x2) + b * pick(c, x0_b, x1_b, x2_b) * ALIGN
    x_n, x_h = pick(c, x0_n, x1_n, x2_n), pick(c, x0_h, x1_h, x2_h)
    d_x = pick(c, d_x0, d_x1, d_x2) + b * N * (PACK * H * D)
    weights += c * weight_c
    d_weights += c.to(tl.int64) * (tl.num_programs(0) // C) * (SHARES * G * H)
    part_of_all = b * parts + part
    if SHARES * G <= BG and SHARES * H <= BH:
        w = load_weights(weights, weight_h, weight_g, 0, 0, H, G, SHARES, BH, BG)
        total = tl.zeros((BG, BH), tl.float32)
        for tile in range(part * per_part, tl.minimum(part * per_part + per_part, tiles)):
            # [BG, COLUMNS], [BH, COLUMNS]
            some_d_out = load_tile(d_out, g_n, g_h, tile, 0, N, G, SHARES, D, ALIGN, BG, COLUMNS)
            some_x = load_tile(x, x_n, x_h, tile, 0, N, H, SHARES, D, ALIGN, BH, COLUMNS)
            some_d_x = dot_weights(w, some_d_out, tl.zeros((BH, COLUMNS), tl.float32), SPLIT)
            store_tile(d_x, some_d_x, tile, 0, N, H, SHARES, D, PACK)
            total = tl.dot(some_d_out, tl.trans(some_x), total, input_precision="ieee")
        _store_part(d_weights, total, part_of_all, 0, 0, G, H, SHARES)
    else:
        for h in tl.static_range(0, SHARES * H, BH):
            some_x = load_tile(x, x_n, x_h, part, h, N, H, SHARES, D, ALIGN, BH, COLUMNS)
            some_d_x = tl.zeros((BH, COLUMNS), tl.float32)
            for g in tl.static_range(0, SHARES * G, BG):
                some_d_out = load_tile(d_out, g_n, g_h, part, g, N, G, SHARES, D, ALIGN, BG, COLUMNS)
                w = load_weights(weights, weight_h, weight_g, h, g, H, G, SHARES, BH, BG)
                some_d_x = dot_weights(w, some_d_out, some_d_x, SPLIT)
                total = tl.dot(some_d_out, tl.trans(some_x), input_precision="ieee")
                _store_part(d_weights, total, part_of_all, g, h, G, H, SHARES)
            store_tile(d_x, some_d_x, part, h, N, H, SHARES, D, PACK)
