"""Compute MHLA's forward pass for up to 256 tokens on Hopper GPUs, in Gluon, Triton's language below Triton.

B batch, N tokens, H heads, M blocks, D and Dv head dims. A program takes one head after the other: 16 queries a warp,
all keys and values in shared memory, and those of the next head come in by asynchronous copies while it computes.
Tokens stay in raster order. The weight of each pair of tokens comes from one more product: the mixing rows of the
queries' blocks [queries, M] times the one-hot blocks of the keys [M, keys]. Absent keys have no block, so they weigh
nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from headmix_vision.ops.mhla.hopper.names import async_load, barrier, reinterpret
from headmix_vision.ops.mhla.hopper.tiles import features

KEYS = gl.constexpr(32)  # of a product


@gluon.constexpr_function
def _rows_layout(columns, num_warps):
    """Give each thread 8 columns of a row, and neighbouring threads those beside them."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _output_layout(columns, num_warps):
    """Give each thread 8 columns of the rows that its quad has in products, so that only quads exchange."""
    registers = [[0, 1], [0, 2], [0, 4], *([0, 1 << i] for i in range(5, int(columns).bit_length() - 1)), [8, 0]]
    lanes = [[0, 8], [0, 16] if columns > 16 else [0, 0], [1, 0], [2, 0], [4, 0]]
    warps = [[16 << i, 0] for i in range(int(num_warps).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * int(num_warps), int(columns)])


@gluon.constexpr_function
def _product_layout(columns, num_warps):
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, columns, 16])


@gluon.constexpr_function
def _shared_layout(rows, columns):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@gluon.jit
def _copy_part(rows, base, STRIDE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, START: gl.constexpr):
    layout: gl.constexpr = _rows_layout(rows.shape[1], gl.num_warps())
    row = gl.arange(0, rows.shape[0], gl.SliceLayout(1, layout))
    column = START + gl.arange(0, rows.shape[1], gl.SliceLayout(0, layout))
    present = (row < N)[:, None] & (column < D)[None, :]
    pointers = base + (row.to(gl.int64)[:, None] * STRIDE + column.to(gl.int64)[None, :])
    async_load(rows, pointers, present)


@gluon.jit
def _copy(parts, stage, base, STRIDE: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """Start to copy the rows of a head to shared memory; absent rows and columns become zero."""
    _copy_part(parts[0].index(stage), base, STRIDE, N, D, 0)
    if len(parts) == 2:
        _copy_part(parts[1].index(stage), base, STRIDE, N, D, parts[0].shape[2])


@gluon.jit
def _map_part(rows, mapped, eps, D: gl.constexpr, START: gl.constexpr, FEATURE_MAP: gl.constexpr):
    layout: gl.constexpr = _rows_layout(rows.shape[1], gl.num_warps())
    x = features(rows.load(layout), eps, FEATURE_MAP)
    if START + rows.shape[1] > D:
        column = START + gl.arange(0, rows.shape[1], gl.SliceLayout(0, layout))
        x = gl.where((column < D)[None, :], x, 0.0)
    mapped.store(x)


@gluon.jit
def _map(parts, mapped, eps, D: gl.constexpr, FEATURE_MAP: gl.constexpr):
    """Store the features of all rows; absent columns are zero."""
    _map_part(parts[0].index(0), mapped[0].index(0), eps, D, 0, FEATURE_MAP)
    if len(parts) == 2:
        _map_part(parts[1].index(0), mapped[1].index(0), eps, D, parts[0].shape[2], FEATURE_MAP)


@gluon.jit
def _store_ones(rows, column: gl.constexpr):
    """Put ones into a column that copies have left zero."""
    layout: gl.constexpr = _rows_layout(rows.shape[1], gl.num_warps())
    columns = gl.arange(0, rows.shape[1], gl.SliceLayout(0, layout))
    rows.store(gl.where((columns == column)[None, :], 1.0, rows.load(layout)).to(gl.bfloat16))


@gluon.jit
def _tile(part, stage, i, WIDTH: gl.constexpr):
    """View WIDTH rows from KEYS i on."""
    ROWS: gl.constexpr = part.shape[1]
    COLUMNS: gl.constexpr = part.shape[2]
    tiles = reinterpret(part.index(stage), gl.bfloat16, [ROWS // KEYS, KEYS, COLUMNS], part.layout)
    return tiles.index(i).slice(0, WIDTH, 0)


@gluon.jit
def _load_queries(parts, eps, FEATURE_MAP: gl.constexpr):
    """Load the features of all queries as the left operand of products."""
    layout: gl.constexpr = gl.DotOperandLayout(0, _product_layout(64, gl.num_warps()), 2)
    first = features(parts[0].index(0).load(layout), eps, FEATURE_MAP)
    if len(parts) == 1:
        return (first,)
    else:
        return (first, features(parts[1].index(0).load(layout), eps, FEATURE_MAP))


@gluon.jit
def _allocate(count: gl.constexpr, rows: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr):
    first = gl.allocate_shared_memory(gl.bfloat16, [count, rows, D1], _shared_layout(rows, D1))
    if D2 == 0:
        return (first,)
    else:
        return (first, gl.allocate_shared_memory(gl.bfloat16, [count, rows, D2], _shared_layout(rows, D2)))


@gluon.jit
def _store_blocks(tile, blocks, N: gl.constexpr):
    """Store the one-hot blocks of all tokens; absent tokens have none."""
    layout: gl.constexpr = _rows_layout(tile.shape[1], gl.num_warps())
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    block = gl.load(blocks + row, mask=row < N, other=-1)
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    tile.store((block[:, None] == column[None, :]).to(gl.bfloat16))


@gluon.jit
def _store_mixing(tile, blocks, mixing, stride_row, stride_column, N: gl.constexpr, M: gl.constexpr):
    """Store the mixing rows of the blocks of all tokens."""
    layout: gl.constexpr = _rows_layout(tile.shape[1], gl.num_warps())
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    block = gl.load(blocks + row, mask=row < N, other=0)
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    pointers = mixing + (block[:, None] * stride_row + column[None, :] * stride_column)
    tile.store(gl.load(pointers, mask=(column < M)[None, :], other=0.0).to(gl.bfloat16))


@gluon.jit
def _score(queries, mixing_rows, k_mapped, one_hot, i, WIDTH: gl.constexpr):
    """Start the products of all queries with a tile of keys, and of their mixing with the one-hot blocks of these."""
    layout: gl.constexpr = _product_layout(WIDTH, gl.num_warps())
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    zero = gl.zeros([16 * gl.num_warps(), WIDTH], gl.float32, layout)
    keys = _tile(k_mapped[0], 0, i, WIDTH).permute((1, 0))
    first = gl.convert_layout(queries[0], operand)
    scores = warpgroup_mma(first, keys, zero, use_acc=False, is_async=True)
    if len(queries) == 2:
        keys = _tile(k_mapped[1], 0, i, WIDTH).permute((1, 0))
        scores = warpgroup_mma(gl.convert_layout(queries[1], operand), keys, scores, is_async=True)
    blocks = _tile(one_hot, 0, i, WIDTH).permute((1, 0))
    return scores, warpgroup_mma(mixing_rows, blocks, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(weighted, v_rows, stage, i, accumulators):
    """Start to add weighted scores times values to the accumulators."""
    WIDTH: gl.constexpr = weighted.shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, _product_layout(v_rows[0].shape[2], gl.num_warps()), 2)
    values = _tile(v_rows[0], stage, i, WIDTH)
    first = warpgroup_mma(gl.convert_layout(weighted, operand), values, accumulators[0], is_async=True)
    if len(v_rows) == 1:
        return (first,)
    else:
        operand2: gl.constexpr = gl.DotOperandLayout(0, _product_layout(v_rows[1].shape[2], gl.num_warps()), 2)
        values = _tile(v_rows[1], stage, i, WIDTH)
        return (first, warpgroup_mma(gl.convert_layout(weighted, operand2), values, accumulators[1], is_async=True))


@gluon.jit
def _zeros(D1: gl.constexpr, D2: gl.constexpr):
    ROWS: gl.constexpr = 16 * gl.num_warps()
    first = warpgroup_mma_init(gl.zeros([ROWS, D1], gl.float32, _product_layout(D1, gl.num_warps())))
    if D2 == 0:
        return (first,)
    else:
        second = warpgroup_mma_init(gl.zeros([ROWS, D2], gl.float32, _product_layout(D2, gl.num_warps())))
        return (first, second)


@gluon.jit
def _finish(accumulators, operand):
    """Wait for products, and keep the registers of their operand until then."""
    if len(accumulators) == 1:
        first, operand = warpgroup_mma_wait(0, [accumulators[0], operand])
        return (first,)
    else:
        first, second, operand = warpgroup_mma_wait(0, [accumulators[0], accumulators[1], operand])
        return (first, second)


@gluon.jit
def _row_sums(x):
    return gl.convert_layout(gl.sum(x, 1), gl.SliceLayout(1, _product_layout(64, gl.num_warps())))


@gluon.jit
def _attend(queries, mixing_rows, k_mapped, v_rows, one_hot, stage, i, WIDTH: gl.constexpr, accumulators, denominator,
            weighted, SUM: gl.constexpr):  # fmt: skip
    """Add one more tile of keys to numerators and denominators; the products with values stay under way."""
    scores, weights = _score(queries, mixing_rows, k_mapped, one_hot, i, WIDTH)
    scores, weights = warpgroup_mma_wait(0, [scores, weights])
    accumulators = _finish(accumulators, weighted)
    scores *= weights
    if SUM:
        if WIDTH == KEYS:
            denominator += scores
        else:
            denominator = _row_sums(denominator) + _row_sums(scores)
    operand: gl.constexpr = gl.DotOperandLayout(0, scores.type.layout, 2)
    weighted = gl.convert_layout(scores.to(gl.bfloat16), operand)
    return _add_values(weighted, v_rows, stage, i, accumulators), denominator, weighted


@gluon.constexpr_function
def _rest(tokens):
    """Return the columns that products have for the keys after the last whole tile."""
    return max(16, 1 << (int(tokens) % KEYS.value - 1).bit_length())


@gluon.jit
def _store_part(out, x, factor, stride, N: gl.constexpr, DV: gl.constexpr, START: gl.constexpr):
    if factor is not None:
        x = x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]
    layout: gl.constexpr = _output_layout(x.shape[1], gl.num_warps())
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    column = START + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    rows = gl.convert_layout(x.to(gl.bfloat16), layout)
    present = (row < N)[:, None] & (column < DV)[None, :]
    gl.store(out + (row[:, None] * stride + column[None, :]), rows, mask=present)


@gluon.jit
def gluon_forward_kernel(
    q, k, v, mixing, out, inverse, blocks,
    q_b, q_h, k_b, k_h, v_b, v_h, mixing_h, mixing_i, mixing_j, heads, H, eps,
    Q_N: gl.constexpr, K_N: gl.constexpr, V_N: gl.constexpr, N: gl.constexpr, M: gl.constexpr, MB: gl.constexpr,
    D: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV1: gl.constexpr, DV2: gl.constexpr,
    NORMALIZER: gl.constexpr, FEATURE_MAP: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Fill ``out`` [B, N, H, Dv] and ``inverse`` [B, H, N]: 16 queries a warp, KEYS keys in a product.

    Strides of batch and heads come divided by 8; ``heads`` is B H. A column to spare in the padding of values holds
    ones: its products are the denominators.
    """
    ONES: gl.constexpr = NORMALIZER == "paper" and DV < DV1 + DV2
    SUM: gl.constexpr = NORMALIZER == "paper" and not ONES
    ROWS: gl.constexpr = 16 * gl.num_warps()
    REST: gl.constexpr = _rest(N)
    q_rows = _allocate(1, ROWS, D1, D2)
    k_rows = _allocate(1, ROWS, D1, D2)
    k_mapped = _allocate(1, ROWS, D1, D2)
    v_rows = _allocate(2, ROWS, DV1, DV2)
    one_hot = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, MB], _shared_layout(ROWS, MB))
    mixing_rows = gl.allocate_shared_memory(gl.bfloat16, [ROWS, MB], _shared_layout(ROWS, MB))
    head = gl.program_id(0)
    b, h = (head // H).to(gl.int64), (head % H).to(gl.int64)
    _copy(k_rows, 0, k + (b * k_b + h * k_h) * 8, K_N, N, D)
    _copy(q_rows, 0, q + (b * q_b + h * q_h) * 8, Q_N, N, D)
    _copy(v_rows, 0, v + (b * v_b + h * v_h) * 8, V_N, N, DV)
    async_copy.commit_group()
    _store_blocks(one_hot.index(0), blocks, N)
    if not PER_HEAD:
        _store_mixing(mixing_rows, blocks, mixing, mixing_i, mixing_j, N, M)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, _product_layout(64, gl.num_warps())))

    stage = 0
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        b, h = (head // H).to(gl.int64), (head % H).to(gl.int64)
        p_out = out + (b * N * H + h) * DV
        p_inverse = inverse + (b * H + h) * N
        if PER_HEAD:
            barrier()  # all warps are done with the last head's
            _store_mixing(mixing_rows, blocks, mixing + h * mixing_h, mixing_i, mixing_j, N, M)
        following = head + gl.num_programs(0)
        next_b, next_h = (following // H).to(gl.int64), (following % H).to(gl.int64)
        async_copy.wait_group(0)
        if following < heads:  # before a barrier: the compiler would put one between these and products of other values
            _copy(v_rows, 1 - stage, v + (next_b * v_b + next_h * v_h) * 8, V_N, N, DV)
        if ONES:
            _store_ones(v_rows[1].index(stage), DV - DV1)
        queries = _load_queries(q_rows, eps, FEATURE_MAP)
        _map(k_rows, k_mapped, eps, D, FEATURE_MAP)
        fence_async_shared()
        barrier()
        if following < heads:
            _copy(k_rows, 0, k + (next_b * k_b + next_h * k_h) * 8, K_N, N, D)
            _copy(q_rows, 0, q + (next_b * q_b + next_h * q_h) * 8, Q_N, N, D)
        async_copy.commit_group()
        if NORMALIZER == "given":
            b_inverse = gl.load(p_inverse + row, mask=row < N, other=0.0)

        accumulators = _zeros(DV1, DV2)
        denominator = gl.zeros([ROWS, KEYS], gl.float32, _product_layout(KEYS, gl.num_warps()))
        weighted = gl.zeros([ROWS, KEYS], gl.bfloat16, gl.DotOperandLayout(0, _product_layout(KEYS, gl.num_warps()), 2))
        for i in range(N // KEYS):
            accumulators, denominator, weighted = _attend(
                queries, mixing_rows, k_mapped, v_rows, one_hot, stage, i, KEYS, accumulators, denominator, weighted,
                SUM,
            )  # fmt: skip
        if N % KEYS != 0:
            accumulators, denominator, weighted = _attend(
                queries, mixing_rows, k_mapped, v_rows, one_hot, stage, N // KEYS, REST, accumulators, denominator,
                weighted, SUM,
            )  # fmt: skip
        out_rows = _finish(accumulators, weighted)
        if NORMALIZER == "paper":
            if ONES:
                columns = gl.arange(0, DV2, gl.SliceLayout(0, out_rows[1].type.layout))
                denominator = _row_sums(gl.where((columns == DV - DV1)[None, :], out_rows[1], 0.0))
            elif N % KEYS == 0 or REST == KEYS:
                denominator = _row_sums(denominator)
            b_inverse = 1.0 / gl.where(row < N, denominator, 1.0)
            gl.store(p_inverse + row, b_inverse, mask=row < N)
        elif NORMALIZER == "none":
            b_inverse = None
        _store_part(p_out, out_rows[0], b_inverse, H * DV, N, DV, 0)
        if DV2 != 0:
            _store_part(p_out, out_rows[1], b_inverse, H * DV, N, DV, DV1)
        stage = 1 - stage
