"""Loads and stores the tiles of head mixing inside its Triton kernels, and multiplies them.

N tokens, C tensors, H or G heads, D head dim. A tile holds some heads of a stretch of one image. Its columns are the
places of the stretch, token by token and dim by dim, so that no head dim leaves columns empty. Its rows are heads;
where heads are few, a tile has several shares, each a stretch of its own with its own rows, and the weights between
rows of different shares are zero.
"""

import triton
import triton.language as tl


@triton.jit
def pick(c, first, second, third):
    """Return what belongs to tensor c."""
    return tl.where(c == 0, first, tl.where(c == 1, second, third))


@triton.jit
def locate(tile, first, N, HEADS: tl.constexpr, SHARES: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    """Return head [ROWS, 1], token and dim [ROWS, COLUMNS] of the entries of a tile, and which of them exist."""
    row = first + tl.arange(0, ROWS)[:, None]
    place = (tile * SHARES + row // HEADS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row % HEADS, (place // D).to(tl.int64), place % D, (row < SHARES * HEADS) & (place < N * D)


@triton.jit
def load_tile(base, stride_n, stride_h, tile, first, N, HEADS: tl.constexpr, SHARES: tl.constexpr, D: tl.constexpr,
              ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Load rows first .. first + ROWS, zero where nothing exists. Strides come divided by ALIGN, as multiples of it."""
    head, token, dim, exists = locate(tile, first, N, HEADS, SHARES, D, ROWS, COLUMNS)
    return tl.load(base + (token * stride_n + head * stride_h) * ALIGN + dim, mask=exists, other=0.0)


@triton.jit
def store_tile(base, x, tile, first, N, HEADS: tl.constexpr, SHARES: tl.constexpr, D: tl.constexpr,
               PACK: tl.constexpr):  # fmt: skip
    """Store rows of an image [N, PACK, HEADS, D], of which ``base`` is one part."""
    head, token, dim, exists = locate(tile, first, N, HEADS, SHARES, D, x.shape[0], x.shape[1])
    tl.store(base + (token * (PACK * HEADS) + head) * D + dim, x.to(base.dtype.element_ty), mask=exists)


@triton.jit
def load_weights(base, stride_row, stride_column, first_row, first_column, ROW_HEADS: tl.constexpr,
                 COLUMN_HEADS: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """Load the weights between rows of two tiles, zero between shares: [ROWS, COLUMNS] float32."""
    row = first_row + tl.arange(0, ROWS)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    exists = (row // ROW_HEADS == column // COLUMN_HEADS) & (row < SHARES * ROW_HEADS)
    pointers = base + row % ROW_HEADS * stride_row + column % COLUMN_HEADS * stride_column
    return tl.load(pointers, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def dot_weights(weights, x, accumulator, SPLIT: tl.constexpr):
    """Add weights times x to the accumulator. SPLIT: weights have more digits than x, and are a sum of two of x's type.

    A product of float32 is exact here: heads are so few that memory, not arithmetic, takes the time. It sums on its
    own what the accumulator then takes as one term.
    """
    if x.dtype == tl.float32:
        # Were it added, the compiler would let the product begin with the accumulator: one long sum.
        return accumulator - tl.dot(-weights, x, input_precision="ieee")
    high = weights.to(x.dtype)
    if SPLIT:
        accumulator = tl.dot((weights - high.to(tl.float32)).to(x.dtype), x, accumulator)
    return tl.dot(high, x, accumulator)


@triton.jit
def sum_parts_kernel(parts, out, rows, columns, share, BR: tl.constexpr, BC: tl.constexpr):
    """Sum each share of the rows of C matrices: float32 [C, rows, columns] -> [C, shares, columns]."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    c, first = tl.program_id(2).to(tl.int64), tl.program_id(0) * share
    end = tl.minimum(first + share, rows)
    total = tl.zeros((BR, BC), tl.float32)
    for start in range(first, end, BR):
        row = start + tl.arange(0, BR)
        pointers = parts + (c * rows + row[:, None]) * columns + column[None, :]
        total += tl.load(pointers, mask=(row < end)[:, None] & (column < columns)[None, :], other=0.0)
    p_out = out + (c * tl.num_programs(0) + tl.program_id(0)) * columns + column
    tl.store(p_out, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)
