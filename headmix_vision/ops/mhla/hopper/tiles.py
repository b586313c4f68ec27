"""Tiles of Gluon kernels: layouts, products, and the weights of pairs of tokens.

A head is an item of the batch and its head; a tensor is its address and strides over 8.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2, warpgroup_mma

from headmix_vision.ops.mhla import triton_tiles
from headmix_vision.ops.mhla.hopper.names import barrier, first_tile

feature = gluon.jit(triton_tiles.feature.fn)


@gluon.constexpr_function
def product_layout(rows, columns, warps):
    """Return the layout of a product whose rows all warps share, or whose columns too, if there are too few rows."""
    by_row = min(warps, rows // 16)
    return gl.NVMMADistributedLayout([3, 0], [by_row, warps // by_row], [16, columns // (warps // by_row), 16])


@gluon.constexpr_function
def small_product_layout(blocks, warps):
    """Return the layout of a product of blocks and blocks by the instructions of older GPUs, which take 16 rows."""
    return gl.NVMMADistributedLayout([2, 0], [blocks // 16, warps // (blocks // 16)], [16, 8])


@gluon.constexpr_function
def tile_layout(rows, columns, warps):
    """Return a layout that spreads a tile over all threads, up to 16 bytes of a row in each."""
    vector = min(8, max(1, rows * columns // (32 * warps)))
    threads = columns // vector
    return gl.BlockedLayout([1, vector], [32 // threads, threads], [warps, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(columns):
    """Return the layout of rows of bf16 that products read from shared memory."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16, 2)


@gluon.jit
def _relu_of_negative(shift):
    """Return the bf16 number before ``shift``, the feature of zero, which has slope one."""
    return (shift.to(gl.float32) * (1 - 2**-8)).to(gl.bfloat16)


@gluon.jit
def features(x, eps, FEATURE_MAP: gl.constexpr):
    """Map bf16 rows to features; relu in pairs."""
    if FEATURE_MAP == "relu":
        shift = gl.full(x.shape, eps, gl.bfloat16, x.type.layout)
        return gl.inline_asm_elementwise(
            "{.reg .b32 sum; add.rn.bf16x2 sum, $1, $2; max.bf16x2 $0, sum, $3;}",
            "=r,r,r,r", [x, shift, _relu_of_negative(shift)], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return feature(x, eps, FEATURE_MAP).to(gl.bfloat16)


@gluon.jit
def feature_gradient(tile, gradient, eps, FEATURE_MAP: gl.constexpr):
    """Compute the gradient of rows from that of their features, and from the features, a tile of shared memory.

    To relu negative numbers count as zero if ``eps`` rounds them away: those above -4e-9, if it is 1e-6, and above
    -3e-8, if it is HOPPER_EPS.
    """
    LAYOUT: gl.constexpr = gradient.type.layout
    if FEATURE_MAP == "relu":
        shift = gl.full(tile.shape, eps, gl.bfloat16, LAYOUT)
        return gl.where(tile.load(LAYOUT) > _relu_of_negative(shift), gradient, 0.0)
    elif FEATURE_MAP == "elu1":
        return gradient * gl.minimum(tile.load(LAYOUT).to(gl.float32) - eps, 1.0)
    else:
        return gradient


@gluon.jit
def rows_of_head(x, head):
    """Point to the rows of a head, an item of the batch and its head; a tensor is its address and strides over 8."""
    offset = gl.inline_asm_elementwise(  # the compiler would keep the signs of strides in registers
        "{mul.wide.s32 $0, $1, $2; mad.wide.s32 $0, $3, $4, $0;}", "=&l,r,r,r,r", [head[0], x[1], head[1], x[3]],
        dtype=gl.int64, is_pure=True, pack=1,
    )  # fmt: skip
    return x[0] + offset * 8


@gluon.jit
def later(head, step, H):
    """Return the head that follows after ``step`` others, both as an item of the batch and its head."""
    over = head[1] + step[1] >= H
    return head[0] + step[0] + over.to(gl.int32), head[1] + step[1] - gl.where(over, H, 0)


@gluon.jit
def choose(condition, a, b):
    return gl.where(condition, a[0], b[0]), gl.where(condition, a[1], b[1])


@gluon.jit
def opaque_zero():
    """Return a zero that compilers, ptxas included, take for another number each time.

    What depends on it is computed where it is used, by a vote in registers that a warp shares. Otherwise addresses and
    matrix descriptors are computed before the loop, or for several tiles, one register each, and spilled: there is no
    first-level cache left for local memory. No program has another second index than zero.
    """
    return gl.inline_asm_elementwise(
        "{.reg .pred p; mov.u32 $0, %ctaid.y; setp.ne.u32 p, $0, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def point_to_rows(base, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr, stride, rows):
    """Point to rows, and tell which of them exist: the first ``rows``."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) + opaque_zero()
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    return (base + row * stride)[:, None] + column[None, :], (row < rows)[:, None]


@gluon.jit
def load_rows(base, rows, stride, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Load rows, zero beyond ``rows`` of them."""
    pointers, mask = point_to_rows(base, ROWS, D, LAYOUT, stride, rows)
    return gl.load(pointers, mask=mask, other=0.0)


@gluon.jit
def start_product(a, b):
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(ROWS, COLUMNS, gl.num_warps()))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def weigh(s, dp, w, shift, d_scores, NORMALIZER: gl.constexpr):
    """Weigh scores and their gradients; also multiply them, and write the latter to shared memory, transposed.

    All three come as left operands of products.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, s.type.layout, 2)
    if NORMALIZER == "paper":
        dp += shift.load(gl.SliceLayout(0, dp.type.layout))[None, :]
    ds = (dp * w).to(gl.bfloat16)
    d_scores.permute((1, 0)).store(ds)
    p, x = (s * w).to(gl.bfloat16), (s * dp).to(gl.bfloat16)
    return gl.convert_layout(p, LEFT), gl.convert_layout(ds, LEFT), gl.convert_layout(x, LEFT)


@gluon.jit
def add_product(left, tile, total):
    operand = gl.convert_layout(left, gl.DotOperandLayout(0, total.type.layout, 2))
    return warpgroup_mma(operand, tile, total, is_async=True)


@gluon.jit
def rotate(block, M, SHIFT: gl.constexpr):
    """Number blocks as the mixing does, whose first SHIFT ones follow the others here."""
    return (block + SHIFT) % M if SHIFT != 0 else block


@gluon.jit
def spread_mixing(m_tiles, mixing, blocks, mixing_i, mixing_j, N, M, SHIFT: gl.constexpr = 0):
    """Write the weights of each key block, by query: [MB, queries] of each tile, zero for queries that do not exist."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    block = gl.arange(0, m_tiles.shape[1], gl.SliceLayout(1, LAYOUT))
    TILES: gl.constexpr = m_tiles.shape[0]
    weights = ()
    for t in gl.static_range(TILES):
        query = t * m_tiles.shape[2] + gl.arange(0, m_tiles.shape[2], gl.SliceLayout(0, LAYOUT))
        q_block = gl.load(blocks + query, mask=query < N, other=-1)
        rows, columns = rotate(q_block, M, SHIFT), rotate(block, M, SHIFT)
        pointers = mixing + columns[:, None] * mixing_j + rows[None, :] * mixing_i
        tile = gl.load(pointers, mask=(q_block >= 0)[None, :] & (block < M)[:, None], other=0.0)
        weights = weights + (tile.to(gl.bfloat16),)
    for t in gl.static_range(TILES):  # a barrier stands before each store, and loads would wait for one another there
        m_tiles.index(t).store(weights[t])


@gluon.jit
def sum_by_block(dm, d_scores, e_parts, first_part):
    """Sum over the keys of each block, each float32 as three bf16 numbers: [query blocks, key blocks]."""
    ROWS: gl.constexpr = dm[0].shape[0]
    MB: gl.constexpr = dm[0].shape[1]
    LAYOUT: gl.constexpr = small_product_layout(MB, gl.num_warps())
    total = gl.zeros([MB, MB], gl.float32, LAYOUT)
    for part in gl.static_range(len(dm)):
        transposed = first_tile(d_scores[part], MB, ROWS, shared_layout(ROWS))
        e_part = e_parts.index(first_part + part).load(gl.DotOperandLayout(1, LAYOUT, 2))
        rest = dm[part]
        for _ in gl.static_range(3):
            rounded = rest.to(gl.bfloat16)
            rest -= rounded.to(gl.float32)
            barrier()
            transposed.permute((1, 0)).store(rounded)
            barrier()
            total = mma_v2(transposed.load(gl.DotOperandLayout(0, LAYOUT, 2)), e_part, total)
    return total


@gluon.jit
def store_mixing_gradient(base, dm, d_scores, e_parts, first_part):
    """Store the gradient of the mixing, [query blocks, key blocks]."""
    total = sum_by_block(dm, d_scores, e_parts, first_part)
    MB: gl.constexpr = total.shape[0]
    row = gl.arange(0, MB, gl.SliceLayout(1, total.type.layout))
    column = gl.arange(0, MB, gl.SliceLayout(0, total.type.layout))
    gl.store(base + row[:, None] * MB + column[None, :], total)


@gluon.jit
def zeros(PARTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Make sums that start at zero here, and not where the compiler would set them, among products under way."""
    sums = ()
    for _ in gl.static_range(PARTS):
        zero = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(ROWS, COLUMNS, gl.num_warps()))
        zero = gl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [zero], dtype=gl.float32, is_pure=False, pack=1)
        sums = sums + (zero,)
    return sums
