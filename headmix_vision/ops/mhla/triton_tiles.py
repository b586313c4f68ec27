"""Hold what the Triton kernels share: functions on tiles of token rows, and kernels on mixing matrices.

A head dim that is not a power of two is cut into two parts, ``D1`` the largest power of two in it and ``D2`` the rest
(padded; 0 if there is none), so that 72 costs 64 + 16 columns and not 128. Rows are tuples with one tile per part.
The kernels spread mixing matrices from blocks to runs of places (``triton_launch.py``) and sum their gradients back.
"""

import triton
import triton.language as tl

from headmix_vision.ops.hardware import INTERPRETED

ADDS_BF16 = tl.constexpr(not INTERPRETED)  # the interpreter adds the bits


@triton.jit
def rows_of_head(base, b, h, stride_b, stride_h, ALIGN: tl.constexpr):
    """Point to the rows of one head, int64. Strides come divided by ALIGN, so the compiler knows them as multiples."""
    return base + (b * stride_b + h * stride_h) * ALIGN


@triton.jit
def load_columns(base, offsets, m_rows, stride, D: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr):
    """Load columns START .. START + SIZE of some rows, zero beyond D and in absent rows: [rows, SIZE]."""
    columns = START + tl.arange(0, SIZE)
    pointers = base + offsets[:, None] + columns[None, :] * stride
    if START + SIZE <= D:
        return tl.load(pointers, mask=m_rows[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=m_rows[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def load_rows(base, offsets, m_rows, stride, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    if D2 == 0:
        return (load_columns(base, offsets, m_rows, stride, D, 0, D1),)
    else:
        return (
            load_columns(base, offsets, m_rows, stride, D, 0, D1),
            load_columns(base, offsets, m_rows, stride, D, D1, D2),
        )


@triton.jit
def cast(rows, dtype: tl.constexpr):
    return [x.to(dtype) for x in rows]


@triton.jit
def scale_rows(rows, factor):
    """Multiply each row by its factor, in float32."""
    return [x.to(tl.float32) * factor[:, None] for x in rows]


@triton.jit
def store_rows(base, offsets, m_rows, stride, rows, D: tl.constexpr, D1: tl.constexpr):
    for part in tl.static_range(len(rows)):
        columns = part * D1 + tl.arange(0, rows[part].shape[1])
        pointers = base + offsets[:, None] + columns[None, :] * stride
        tl.store(pointers, rows[part].to(base.dtype.element_ty), mask=m_rows[:, None] & (columns < D)[None, :])


@triton.jit
def load_vector(base, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Load one contiguous row of D numbers as a tuple of vectors."""
    first = tl.arange(0, D1)
    if D2 == 0:
        return (tl.load(base + first, mask=first < D, other=0.0),)
    else:
        second = D1 + tl.arange(0, D2)
        return (tl.load(base + first, mask=first < D, other=0.0), tl.load(base + second, mask=second < D, other=0.0))


@triton.jit
def store_vector(base, parts, D: tl.constexpr, D1: tl.constexpr):
    for part in tl.static_range(len(parts)):
        columns = part * D1 + tl.arange(0, parts[part].shape[0])
        tl.store(base + columns, parts[part], mask=columns < D)


@triton.jit
def feature(x, eps, FEATURE_MAP: tl.constexpr):
    """Compute the feature map in float32."""
    x = x.to(tl.float32)
    if FEATURE_MAP == "relu":
        return tl.maximum(x, 0.0) + eps
    elif FEATURE_MAP == "elu1":
        return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0))) + eps
    else:
        return x


@triton.jit
def _rounded_feature(x, eps, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr):
    if ADDS_BF16 and FEATURE_MAP == "relu" and x.dtype == tl.bfloat16 and COMPUTE == tl.bfloat16:
        # Two numbers in one instruction, where float32 takes three for each and another to round.
        zero = tl.zeros(x.shape, tl.bfloat16)
        return tl.where(x > zero, x, zero) + (tl.zeros(x.shape, tl.float32) + eps).to(tl.bfloat16)
    else:
        return feature(x, eps, FEATURE_MAP).to(COMPUTE)


@triton.jit
def features(rows, eps, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr):
    """Map rows to features in the type of the products; absent rows and columns hold the feature of zero."""
    return [_rounded_feature(x, eps, FEATURE_MAP, COMPUTE) for x in rows]


@triton.jit
def _present(x, m_rows, eps, D: tl.constexpr, START: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr):
    present = m_rows[:, None]
    if START + x.shape[1] > D:
        present = present & (START + tl.arange(0, x.shape[1]) < D)[None, :]
    return tl.where(present, _rounded_feature(x, eps, FEATURE_MAP, COMPUTE), 0.0).to(COMPUTE)


@triton.jit
def present_features(
    rows, m_rows, eps, D: tl.constexpr, D1: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr
):
    """Map rows to features, zero in absent rows and columns."""
    if len(rows) == 1:
        return (_present(rows[0], m_rows, eps, D, 0, FEATURE_MAP, COMPUTE),)
    else:
        return (
            _present(rows[0], m_rows, eps, D, 0, FEATURE_MAP, COMPUTE),
            _present(rows[1], m_rows, eps, D, D1, FEATURE_MAP, COMPUTE),
        )


@triton.jit
def feature_gradient(x, gradient, FEATURE_MAP: tl.constexpr):
    """Compute the gradient of ``x`` from that of its features; at zero relu has slope one."""
    x = x.to(tl.float32)
    if FEATURE_MAP == "relu":
        return tl.where(x >= 0, gradient, 0.0)
    elif FEATURE_MAP == "elu1":
        return gradient * tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    else:
        return gradient


@triton.jit
def feature_gradients(rows, gradients, FEATURE_MAP: tl.constexpr):
    if len(rows) == 1:
        return (feature_gradient(rows[0], gradients[0], FEATURE_MAP),)
    else:
        return (
            feature_gradient(rows[0], gradients[0], FEATURE_MAP),
            feature_gradient(rows[1], gradients[1], FEATURE_MAP),
        )


@triton.jit
def zeros(ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    if D2 == 0:
        return (tl.zeros((ROWS, D1), tl.float32),)
    else:
        return (tl.zeros((ROWS, D1), tl.float32), tl.zeros((ROWS, D2), tl.float32))


@triton.jit
def dot_rows(a, b, accumulator, PRECISION: tl.constexpr):
    """Add a b^T, summed over the head dim, to the accumulator: rows of ``a`` by rows of ``b``."""
    for part in tl.static_range(len(a)):
        accumulator = tl.dot(a[part], tl.trans(b[part]), accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def dot_columns(a, b, accumulators, PRECISION: tl.constexpr):
    """Add a b, for a matrix ``a`` and rows ``b``, to the accumulators: rows."""
    if len(b) == 1:
        return (tl.dot(a, b[0], accumulators[0], input_precision=PRECISION),)
    else:
        return (
            tl.dot(a, b[0], accumulators[0], input_precision=PRECISION),
            tl.dot(a, b[1], accumulators[1], input_precision=PRECISION),
        )


@triton.jit
def row_sums(rows, vectors):
    """Multiply rows by one vector and sum over the head dim, in float32: [rows]."""
    total = tl.sum(rows[0].to(tl.float32) * vectors[0][None, :], 1)
    if len(rows) == 2:
        total += tl.sum(rows[1].to(tl.float32) * vectors[1][None, :], 1)
    return total


@triton.jit
def row_products(a, b):
    """Multiply two sets of rows and sum over the head dim, in float32: [rows]."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) == 2:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
def load_matrix(base, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr,
                DV2: tl.constexpr):  # fmt: skip
    """Load a contiguous D x Dv matrix as one set of rows (cut along Dv) per part of D."""
    first = tl.arange(0, D1)
    if D2 == 0:
        return (load_rows(base, first * DV, first < D, 1, DV, DV1, DV2),)
    else:
        second = D1 + tl.arange(0, D2)
        return (
            load_rows(base, first * DV, first < D, 1, DV, DV1, DV2),
            load_rows(base, second * DV, second < D, 1, DV, DV1, DV2),
        )


@triton.jit
def cast_matrix(matrix, dtype: tl.constexpr):
    return [cast(rows, dtype) for rows in matrix]


@triton.jit
def store_matrix(base, matrix, D: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr):
    """Store a matrix from its accumulators; see ``zero_matrix``."""
    first = tl.arange(0, D1)
    store_rows(base, first * DV, first < D, 1, matrix[0], DV, DV1)
    if len(matrix) == 2:
        second = D1 + tl.arange(0, matrix[1][0].shape[1])
        if len(matrix[1]) == 1:
            rows = (tl.trans(matrix[1][0]),)
        else:
            rows = (tl.trans(matrix[1][0]), matrix[1][1])
        store_rows(base, second * DV, second < D, 1, rows, DV, DV1)


@triton.jit
def zero_matrix(D1: tl.constexpr, D2: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr):
    """Return zeros for a D x Dv matrix. The tile of D2 rows and DV1 columns is transposed: products want many rows."""
    if D2 == 0:
        return (zeros(D1, DV1, DV2),)
    elif DV2 == 0:
        return (zeros(D1, DV1, 0), zeros(DV1, D2, 0))
    else:
        return (zeros(D1, DV1, DV2), (tl.zeros((DV1, D2), tl.float32), tl.zeros((D2, DV2), tl.float32)))


@triton.jit
def add_outer(a, b, matrix, PRECISION: tl.constexpr):
    """Add a^T b, summed over rows, to the matrix: D x Dv; see ``zero_matrix``."""
    if len(a) == 1:
        return (dot_columns(tl.trans(a[0]), b, matrix[0], PRECISION),)
    elif len(b) == 1:
        return (
            dot_columns(tl.trans(a[0]), b, matrix[0], PRECISION),
            (tl.dot(tl.trans(b[0]), a[1], matrix[1][0], input_precision=PRECISION),),
        )
    else:
        return (
            dot_columns(tl.trans(a[0]), b, matrix[0], PRECISION),
            (
                tl.dot(tl.trans(b[0]), a[1], matrix[1][0], input_precision=PRECISION),
                tl.dot(tl.trans(a[1]), b[1], matrix[1][1], input_precision=PRECISION),
            ),
        )


@triton.jit
def dot_matrix(rows, matrix, accumulators, PRECISION: tl.constexpr):
    """Add rows times matrix to the accumulators: rows of Dv."""
    for part in tl.static_range(len(rows)):
        accumulators = dot_columns(rows[part], matrix[part], accumulators, PRECISION)
    return accumulators


@triton.jit
def dot_matrix_transposed(rows, matrix, accumulators, PRECISION: tl.constexpr):
    """Add rows times matrix^T to the accumulators: rows of D."""
    if len(matrix) == 1:
        return (dot_rows(rows, matrix[0], accumulators[0], PRECISION),)
    else:
        return (
            dot_rows(rows, matrix[0], accumulators[0], PRECISION),
            dot_rows(rows, matrix[1], accumulators[1], PRECISION),
        )


@triton.jit
def column_sums(rows, sums):
    """Add the sum over rows to the sums, in float32: a tuple of vectors."""
    if len(rows) == 1:
        return (sums[0] + tl.sum(rows[0].to(tl.float32), 0),)
    else:
        return (sums[0] + tl.sum(rows[0].to(tl.float32), 0), sums[1] + tl.sum(rows[1].to(tl.float32), 0))


@triton.jit
def weighted_column_sums(rows, weights, sums):
    """Add the sum over rows, each times its weight, to the sums, in float32: a tuple of vectors."""
    if len(rows) == 1:
        return (sums[0] + tl.sum(rows[0].to(tl.float32) * weights[:, None], 0),)
    else:
        return (
            sums[0] + tl.sum(rows[0].to(tl.float32) * weights[:, None], 0),
            sums[1] + tl.sum(rows[1].to(tl.float32) * weights[:, None], 0),
        )


@triton.jit
def append_column(rows, x, D: tl.constexpr, D1: tl.constexpr):
    """Put a number for each row into column D, which is padding."""
    if len(rows) == 1:
        return (tl.where((tl.arange(0, D1) == D)[None, :], x[:, None], rows[0]),)
    else:
        return (rows[0], tl.where((D1 + tl.arange(0, rows[1].shape[1]) == D)[None, :], x[:, None], rows[1]))


@triton.jit
def _append_halves(rows, x, D: tl.constexpr, D1: tl.constexpr):
    high = x.to(rows[0].dtype)
    low = (x - high.to(tl.float32)).to(rows[0].dtype)
    return append_column(append_column(rows, high, D, D1), low, D + 1, D1)


@triton.jit
def append_halves(matrix, vectors, DV: tl.constexpr, DV1: tl.constexpr):
    """Put a vector of D into columns DV and DV + 1 of a matrix, which are padding and sum to it."""
    if len(matrix) == 1:
        return (_append_halves(matrix[0], vectors[0], DV, DV1),)
    else:
        return (_append_halves(matrix[0], vectors[0], DV, DV1), _append_halves(matrix[1], vectors[1], DV, DV1))


@triton.jit
def halves(x, dtype: tl.constexpr):
    """Return 16 columns of which the first two sum to ``x``, and the others are zero: [rows, 16]."""
    high = x.to(dtype)
    low = (x - high.to(tl.float32)).to(dtype)
    column = tl.arange(0, 16)[None, :]
    none = tl.zeros((x.shape[0], 16), dtype)
    return tl.where(column == 0, high[:, None], tl.where(column == 1, low[:, None], none))


@triton.jit
def columns_of(vectors, dtype: tl.constexpr):
    """Return a vector of D as a D x 16 matrix; see ``halves``."""
    return [(halves(x, dtype),) for x in vectors]


@triton.jit
def _sum_columns(x, FIRST: tl.constexpr, COUNT: tl.constexpr):
    column = tl.arange(0, x.shape[1])
    return tl.sum(tl.where(((column >= FIRST) & (column < FIRST + COUNT))[None, :], x, 0.0), 1)


@triton.jit
def sum_of_halves(rows, D: tl.constexpr, D1: tl.constexpr):
    """Add columns D and D + 1: [rows]."""
    if len(rows) == 1:
        return _sum_columns(rows[0], D, 2)
    else:
        return _sum_columns(rows[1], D - D1, 2)


@triton.jit
def store_column(base, matrix, D: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr):
    """Store column DV of a matrix, which is padding, from its accumulators; see ``zero_matrix``."""
    first = tl.arange(0, D1)
    if len(matrix[0]) == 1:
        x = _sum_columns(matrix[0][0], DV, 1)
    else:
        x = _sum_columns(matrix[0][1], DV - DV1, 1)
    tl.store(base + first, x, mask=first < D)
    if len(matrix) == 2:
        second = D1 + tl.arange(0, matrix[1][0].shape[1])
        if len(matrix[1]) == 1:
            y = _sum_columns(tl.trans(matrix[1][0]), DV, 1)
        else:
            y = _sum_columns(matrix[1][1], DV - DV1, 1)
        tl.store(base + second, y, mask=second < D)


@triton.jit
def zero_columns(D1: tl.constexpr, D2: tl.constexpr):
    """Return zeros for 16 columns of D."""
    if D2 == 0:
        return (tl.zeros((D1, 16), tl.float32),)
    else:
        return (tl.zeros((D1, 16), tl.float32), tl.zeros((D2, 16), tl.float32))


@triton.jit
def add_outer_columns(rows, b, columns, PRECISION: tl.constexpr):
    """Add rows^T b, for 16 columns ``b``, to columns of D."""
    if len(rows) == 1:
        return (tl.dot(tl.trans(rows[0]), b, columns[0], input_precision=PRECISION),)
    else:
        return (
            tl.dot(tl.trans(rows[0]), b, columns[0], input_precision=PRECISION),
            tl.dot(tl.trans(rows[1]), b, columns[1], input_precision=PRECISION),
        )


@triton.jit
def store_columns(base, columns, COUNT: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Store the sum of the first COUNT columns as a vector of D."""
    for part in tl.static_range(len(columns)):
        place = part * D1 + tl.arange(0, columns[part].shape[0])
        tl.store(base + place, _sum_columns(columns[part], 0, COUNT), mask=place < D)


@triton.jit
def zero_vector(D1: tl.constexpr, D2: tl.constexpr):
    if D2 == 0:
        return (tl.zeros((D1,), tl.float32),)
    else:
        return (tl.zeros((D1,), tl.float32), tl.zeros((D2,), tl.float32))


@triton.jit
def add_outer_vector(rows, weights, vectors):
    """Add one vector, times a weight for each row, to the rows."""
    if len(rows) == 1:
        return (rows[0] + weights[:, None] * vectors[0][None, :],)
    else:
        return (
            rows[0] + weights[:, None] * vectors[0][None, :],
            rows[1] + weights[:, None] * vectors[1][None, :],
        )


@triton.jit
def add_vector(rows, vectors):
    """Add one vector to all rows."""
    if len(rows) == 1:
        return (rows[0] + vectors[0][None, :],)
    else:
        return (rows[0] + vectors[0][None, :], rows[1] + vectors[1][None, :])


@triton.jit
def dot_exact(a, x, accumulator, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """Add a x to the accumulator, for ``a`` exact in COMPUTE; bf16 products take the float32 ``x`` as a sum of two."""
    if COMPUTE == tl.bfloat16:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(a, low, tl.dot(a, high, accumulator))
    else:
        return tl.dot(a, x, accumulator, input_precision=PRECISION)


@triton.jit
def expand_runs_kernel(
    mixing, weights, blocks, runs, padded, mixing_h, mixing_i, mixing_j, TILE: tl.constexpr
):  # fmt: skip
    """Spread mixing weights to each pair of runs: [H, M, M] -> [H, padded, padded]."""
    tiles = tl.cdiv(padded, TILE)
    row = tl.program_id(0) // tiles % tiles * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    head = (tl.program_id(0) // tiles // tiles).to(tl.int64)
    row_block = tl.load(blocks + row, mask=row < runs, other=0)
    column_block = tl.load(blocks + column, mask=column < runs, other=0)
    p_mixing = mixing + head * mixing_h + row_block[:, None] * mixing_i + column_block[None, :] * mixing_j
    p_weights = weights + (head * padded + row[:, None]) * padded + column[None, :]
    tl.store(p_weights, tl.load(p_mixing), mask=(row < padded)[:, None] & (column < padded)[None, :])


@triton.jit
def fold_runs_kernel(d_weights, d_mixing, blocks, runs, height, width, M, TILE: tl.constexpr, BM: tl.constexpr):
    """Sum over the runs of each pair of blocks: [H, height, width] -> [H, M, M], in float32."""
    tiles = tl.cdiv(M, BM)
    first = tl.program_id(0) // tiles % tiles * BM + tl.arange(0, BM)
    second = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    head = (tl.program_id(0) // tiles // tiles).to(tl.int64)
    total = tl.zeros((BM, BM), tl.float32)
    for row in range(0, runs, TILE):
        row_run = row + tl.arange(0, TILE)
        row_block = tl.load(blocks + row_run, mask=row_run < runs, other=-1)
        by_row = (first[:, None] == row_block[None, :]).to(tl.float32)
        for column in range(0, runs, TILE):
            column_run = column + tl.arange(0, TILE)
            column_block = tl.load(blocks + column_run, mask=column_run < runs, other=-1)
            by_column = (column_block[:, None] == second[None, :]).to(tl.float32)
            pointers = d_weights + (head * height + row_run[:, None]) * width + column_run[None, :]
            values = tl.load(pointers, mask=(row_run < runs)[:, None] & (column_run < runs)[None, :], other=0.0)
            rows = tl.dot(by_row, values, input_precision="ieee")
            total = tl.dot(rows, by_column, total, input_precision="ieee")
    pointers = d_mixing + (head * M + first[:, None]) * M + second[None, :]
    tl.store(pointers, total, mask=(first < M)[:, None] & (second < M)[None, :])


@triton.jit
def key_and_value_gradients(d_k, d_v, width):
    """Point to the gradients of keys and values; without ``d_v`` they follow the gradients of queries in one tensor."""
    if d_v is None:
        return d_k + width, d_k + 2 * width
    else:
        return d_k, d_v


@triton.jit
def sum_rows_kernel(x, out, rows, columns, share, BR: tl.constexpr, BC: tl.constexpr):
    """Sum each share of the rows of a float32 matrix: [rows, columns] -> [shares, columns]."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1) * share
    end = min(first + share, rows)
    total = tl.zeros((BR, BC), tl.float32)
    for row in range(first, end, BR):
        place = row + tl.arange(0, BR)
        pointers = x + place[:, None].to(tl.int64) * columns + column[None, :]
        total += tl.load(pointers, mask=(place < end)[:, None] & (column < columns)[None, :], other=0.0)
    tl.store(out + tl.program_id(1).to(tl.int64) * columns + column, tl.sum(total, 0), mask=column < columns)
