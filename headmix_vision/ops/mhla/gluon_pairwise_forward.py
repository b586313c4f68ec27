"""Computes MHLA's forward pass for up to 256 tokens on Hopper GPUs, in Gluon, Triton's language below Triton.

B batch, N tokens, H heads, M blocks, D and Dv head dims. A program takes one head after the other. While it computes,
the keys and values of the next head come in by asynchronous copies, and so does each tile of queries once registers
hold the one before. Tokens stay in raster order. The weight of each pair of tokens comes from one more product: the
mixing rows of the queries' blocks [queries, M] times the one-hot blocks of the keys [M, keys]. Absent keys have no
block, so they weigh nothing.
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

from headmix_vision.ops.mhla import triton_tiles

_ROWS = gl.constexpr(256)  # that shared memory holds of a head
_QUERIES = gl.constexpr(128)  # of a tile: 16 for each of 8 warps
_KEYS = gl.constexpr(64)  # of a tile
_feature = gluon.jit(triton_tiles.feature.fn)


@gluon.constexpr_function
def _rows_layout(columns):
    """Give each thread 8 columns of a row, and neighbouring threads those beside them."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [8, 1], [1, 0])


@gluon.constexpr_function
def _product_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.constexpr_function
def _output_layout(columns):
    """Give each thread 8 columns of rows that its quad has in products, so that only quads exchange."""
    registers = [[0, 1], [0, 2], [0, 4], *([0, 1 << i] for i in range(5, int(columns).bit_length() - 1)), [8, 0]]
    lanes = [[0, 8], [0, 16] if columns > 16 else [0, 0], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0], [64, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [128, int(columns)])


@gluon.constexpr_function
def _shared_layout(rows, columns):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@gluon.constexpr_function
def _last_width(tokens):
    """Return the columns that products have for the keys after the last whole tile."""
    return max(16, 1 << (int(tokens) % 64 - 1).bit_length())


@gluon.jit
def _allocate(count: gl.constexpr, rows: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr):
    first = gl.allocate_shared_memory(gl.bfloat16, [count, rows, D1], _shared_layout(rows, D1))
    if D2 == 0:
        return (first,)
    else:
        return (first, gl.allocate_shared_memory(gl.bfloat16, [count, rows, D2], _shared_layout(rows, D2)))


@gluon.jit
def _copy_part(rows, base, first, STRIDE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, START: gl.constexpr):
    layout: gl.constexpr = _rows_layout(rows.shape[1])
    row = first + gl.arange(0, rows.shape[0], gl.SliceLayout(1, layout))
    column = START + gl.arange(0, rows.shape[1], gl.SliceLayout(0, layout))
    present = (row < N)[:, None] & (column < D)[None, :]
    pointers = base + (row.to(gl.int64)[:, None] * STRIDE + column.to(gl.int64)[None, :])
    async_copy.async_copy_global_to_shared(rows, pointers, present)


@gluon.jit
def _copy_rows(parts, place, base, first, STRIDE: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """Start to copy rows from ``first`` on to a place in shared memory; absent rows and columns become zero."""
    _copy_part(parts[0].index(place), base, first, STRIDE, N, D, 0)
    if len(parts) == 2:
        _copy_part(parts[1].index(place), base, first, STRIDE, N, D, parts[0].shape[2])


@gluon.jit
def _features(x, eps, FEATURE_MAP: gl.constexpr):
    """Map bf16 numbers to features; relu two at a time."""
    if FEATURE_MAP == "relu":
        shift = gl.full(x.shape, eps, gl.bfloat16, x.type.layout)
        return gl.inline_asm_elementwise(
            "{.reg .b32 zero; mov.b32 zero, 0; max.bf16x2 $0, $1, zero; add.rn.bf16x2 $0, $0, $2;}",
            "=r,r,r", [x, shift], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return _feature(x, eps, FEATURE_MAP).to(gl.bfloat16)


@gluon.jit
def _map_part(rows, eps, D: gl.constexpr, START: gl.constexpr, FEATURE_MAP: gl.constexpr):
    layout: gl.constexpr = _rows_layout(rows.shape[1])
    x = _features(rows.load(layout), eps, FEATURE_MAP)
    if START + rows.shape[1] > D:
        column = START + gl.arange(0, rows.shape[1], gl.SliceLayout(0, layout))
        x = gl.where((column < D)[None, :], x, 0.0)
    rows.store(x)


@gluon.jit
def _map_rows(parts, place, eps, D: gl.constexpr, FEATURE_MAP: gl.constexpr):
    """Map rows to features where they lie; absent columns stay zero."""
    if FEATURE_MAP != "identity":
        _map_part(parts[0].index(place), eps, D, 0, FEATURE_MAP)
        if len(parts) == 2:
            _map_part(parts[1].index(place), eps, D, parts[0].shape[2], FEATURE_MAP)


@gluon.jit
def _load_queries(parts, place, eps, FEATURE_MAP: gl.constexpr):
    """Load the features of a tile of queries as left operands of products."""
    layout: gl.constexpr = gl.DotOperandLayout(0, _product_layout(_KEYS), 2)
    first = _features(parts[0].index(place).load(layout), eps, FEATURE_MAP)
    if len(parts) == 1:
        return (first,)
    else:
        return (first, _features(parts[1].index(place).load(layout), eps, FEATURE_MAP))


@gluon.jit
def _store_blocks(one_hot, blocks, N: gl.constexpr):
    """Store the one-hot blocks of all tokens; absent tokens have none."""
    layout: gl.constexpr = _rows_layout(one_hot.shape[1])
    row = gl.arange(0, one_hot.shape[0], gl.SliceLayout(1, layout))
    block = gl.load(blocks + row, mask=row < N, other=-1)
    column = gl.arange(0, one_hot.shape[1], gl.SliceLayout(0, layout))
    one_hot.store((block[:, None] == column[None, :]).to(gl.bfloat16))


@gluon.jit
def _load_mixing(mixing, blocks, first, stride_row, stride_column, N: gl.constexpr, M: gl.constexpr,
                 MB: gl.constexpr):  # fmt: skip
    """Load the mixing rows of the blocks of a tile of queries from ``first`` on."""
    layout: gl.constexpr = _rows_layout(MB)
    row = first + gl.arange(0, _QUERIES, gl.SliceLayout(1, layout))
    block = gl.load(blocks + row, mask=row < N, other=0)
    column = gl.arange(0, MB, gl.SliceLayout(0, layout))
    pointers = mixing + (block[:, None] * stride_row + column[None, :] * stride_column)
    return gl.load(pointers, mask=(column < M)[None, :], other=0.0).to(gl.bfloat16)


@gluon.jit
def _tile(rows, place, i, WIDTH: gl.constexpr):
    """View the rows of tile ``i`` of the keys, or the first of them."""
    tiles: gl.constexpr = [_ROWS // _KEYS, _KEYS, rows.shape[2]]
    return rows.index(place)._reinterpret(gl.bfloat16, tiles, rows.layout).index(i).slice(0, WIDTH, 0)


@gluon.jit
def _score(queries, mixing_rows, k_rows, one_hot, place, i, WIDTH: gl.constexpr):
    """Start the products of a tile of queries with keys, and of their mixing with the one-hot blocks of the keys."""
    layout: gl.constexpr = _product_layout(WIDTH)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    zero = gl.zeros([_QUERIES, WIDTH], gl.float32, layout)
    keys = _tile(k_rows[0], place, i, WIDTH).permute((1, 0))
    scores = warpgroup_mma(gl.convert_layout(queries[0], operand), keys, zero, use_acc=False, is_async=True)
    if len(queries) == 2:
        keys = _tile(k_rows[1], place, i, WIDTH).permute((1, 0))
        scores = warpgroup_mma(gl.convert_layout(queries[1], operand), keys, scores, is_async=True)
    blocks = _tile(one_hot, 0, i, WIDTH).permute((1, 0))
    return scores, warpgroup_mma(mixing_rows, blocks, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(weighted, v_rows, place, i, accumulators):
    """Start to add weighted scores times values to the accumulators."""
    WIDTH: gl.constexpr = weighted.shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, _product_layout(v_rows[0].shape[2]), 2)
    values = _tile(v_rows[0], place, i, WIDTH)
    first = warpgroup_mma(gl.convert_layout(weighted, operand), values, accumulators[0], is_async=True)
    if len(v_rows) == 1:
        return (first,)
    else:
        operand2: gl.constexpr = gl.DotOperandLayout(0, _product_layout(v_rows[1].shape[2]), 2)
        values = _tile(v_rows[1], place, i, WIDTH)
        return (first, warpgroup_mma(gl.convert_layout(weighted, operand2), values, accumulators[1], is_async=True))


@gluon.jit
def _zeros(D1: gl.constexpr, D2: gl.constexpr):
    first = warpgroup_mma_init(gl.zeros([_QUERIES, D1], gl.float32, _product_layout(D1)))
    if D2 == 0:
        return (first,)
    else:
        return (first, warpgroup_mma_init(gl.zeros([_QUERIES, D2], gl.float32, _product_layout(D2))))


@gluon.jit
def _finish(accumulators, operand):
    """Wait for products; the compiler keeps the registers of their operand until then."""
    if len(accumulators) == 1:
        first, operand = warpgroup_mma_wait(0, [accumulators[0], operand])
        return (first,)
    else:
        first, second, operand = warpgroup_mma_wait(0, [accumulators[0], accumulators[1], operand])
        return (first, second)


@gluon.jit
def _row_sums(x):
    return gl.convert_layout(gl.sum(x, 1), gl.SliceLayout(1, _product_layout(_KEYS)))


@gluon.jit
def _attend(queries, mixing_rows, k_rows, v_rows, one_hot, place, i, WIDTH: gl.constexpr, accumulators, denominator,
            weighted, NORMALIZER: gl.constexpr):  # fmt: skip
    """Add one more tile of keys to numerators and denominators; the products with values stay under way.

    Denominators stay [queries, keys] up to the last tile: sums over a row would hold up the products after them.
    """
    scores, weights = _score(queries, mixing_rows, k_rows, one_hot, place, i, WIDTH)
    scores, weights = warpgroup_mma_wait(0, [scores, weights])
    accumulators = _finish(accumulators, weighted)
    scores *= weights
    if NORMALIZER == "paper":
        if WIDTH == _KEYS:
            denominator += scores
        else:
            denominator = _row_sums(denominator) + _row_sums(scores)
    operand: gl.constexpr = gl.DotOperandLayout(0, _product_layout(WIDTH), 2)
    weighted = gl.convert_layout(scores.to(gl.bfloat16), operand)
    return _add_values(weighted, v_rows, place, i, accumulators), denominator, weighted


@gluon.jit
def _store_part(out, x, factor, first, stride, N: gl.constexpr, DV: gl.constexpr, START: gl.constexpr):
    if factor is not None:
        x = x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]
    layout: gl.constexpr = _output_layout(x.shape[1])
    row = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
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
    NORMALIZER: gl.constexpr, FEATURE_MAP: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    """Fill ``out`` [B, N, H, Dv] and ``inverse`` [B, H, N]; ``heads`` is B H.

    Strides of batch and heads come divided by ALIGN; those of tokens are constants, or offsets would fill registers.
    """
    QUERY_TILES: gl.constexpr = (N + _QUERIES - 1) // _QUERIES
    LAST: gl.constexpr = _last_width(N)
    q_tiles = _allocate(QUERY_TILES, _QUERIES, D1, D2)
    k_rows = _allocate(2, _ROWS, D1, D2)
    v_rows = _allocate(2, _ROWS, DV1, DV2)
    one_hot = gl.allocate_shared_memory(gl.bfloat16, [1, _ROWS, MB], _shared_layout(_ROWS, MB))
    mixing_rows = gl.allocate_shared_memory(gl.bfloat16, [_QUERIES, MB], _shared_layout(_QUERIES, MB))
    first_head = gl.program_id(0)
    b, h = (first_head // H).to(gl.int64), (first_head % H).to(gl.int64)
    p_q, p_k, p_v = q + (b * q_b + h * q_h) * ALIGN, k + (b * k_b + h * k_h) * ALIGN, v + (b * v_b + h * v_h) * ALIGN
    _copy_rows(k_rows, 0, p_k, 0, K_N, N, D)
    async_copy.commit_group()
    _copy_rows(v_rows, 0, p_v, 0, V_N, N, DV)
    async_copy.commit_group()
    for tile in gl.static_range(QUERY_TILES):
        _copy_rows(q_tiles, tile, p_q, tile * _QUERIES, Q_N, N, D)
        async_copy.commit_group()
    _store_blocks(one_hot.index(0), blocks, N)

    place = 0
    for head in range(first_head, heads, gl.num_programs(0)):
        b, h = (head // H).to(gl.int64), (head % H).to(gl.int64)
        following = head + gl.num_programs(0)
        more = following < heads
        next_b, next_h = (following // H).to(gl.int64), (following % H).to(gl.int64)
        p_q = q + (next_b * q_b + next_h * q_h) * ALIGN
        p_k = k + (next_b * k_b + next_h * k_h) * ALIGN
        p_v = v + (next_b * v_b + next_h * v_h) * ALIGN
        p_out = out + (b * N * H + h) * DV
        p_inverse = inverse + (b * H + h) * N
        # Under way, oldest first: the keys of this head, its values and queries; then keys and values of the next one.
        async_copy.wait_group(QUERY_TILES + 1)
        _map_rows(k_rows, place, eps, D, FEATURE_MAP)
        fence_async_shared()
        if more:
            _copy_rows(k_rows, 1 - place, p_k, 0, K_N, N, D)
        async_copy.commit_group()
        if more:
            _copy_rows(v_rows, 1 - place, p_v, 0, V_N, N, DV)
        async_copy.commit_group()
        for t in range(QUERY_TILES):
            b_mixing = _load_mixing(mixing + h * mixing_h, blocks, t * _QUERIES, mixing_i, mixing_j, N, M, MB)
            async_copy.wait_group(QUERY_TILES + 1)
            mixing_rows.store(b_mixing)
            fence_async_shared()
            queries = _load_queries(q_tiles, t, eps, FEATURE_MAP)
            gl.thread_barrier()
            if more:
                _copy_rows(q_tiles, t, p_q, t * _QUERIES, Q_N, N, D)
            async_copy.commit_group()

            row = t * _QUERIES + gl.arange(0, _QUERIES, gl.SliceLayout(1, _product_layout(_KEYS)))
            if NORMALIZER == "given":
                b_inverse = gl.load(p_inverse + row, mask=row < N, other=0.0)
            accumulators = _zeros(DV1, DV2)
            denominator = gl.zeros([_QUERIES, _KEYS], gl.float32, _product_layout(_KEYS))
            weighted = gl.zeros([_QUERIES, _KEYS], gl.bfloat16, gl.DotOperandLayout(0, _product_layout(_KEYS), 2))
            for i in range(N // _KEYS):
                accumulators, denominator, weighted = _attend(
                    queries, mixing_rows, k_rows, v_rows, one_hot, place, i, _KEYS, accumulators, denominator, weighted,
                    NORMALIZER,
                )  # fmt: skip
            if N % _KEYS != 0:
                accumulators, denominator, weighted = _attend(
                    queries, mixing_rows, k_rows, v_rows, one_hot, place, N // _KEYS, LAST, accumulators, denominator,
                    weighted, NORMALIZER,
                )  # fmt: skip
            out_rows = _finish(accumulators, weighted)
            if NORMALIZER == "paper":
                if N % _KEYS == 0 or LAST == _KEYS:
                    denominator = _row_sums(denominator)
                b_inverse = 1.0 / gl.where(row < N, denominator, 1.0)
                gl.store(p_inverse + row, b_inverse, mask=row < N)
            elif NORMALIZER == "none":
                b_inverse = None
            _store_part(p_out, out_rows[0], b_inverse, t * _QUERIES, H * DV, N, DV, 0)
            if DV2 != 0:
                _store_part(p_out, out_rows[1], b_inverse, t * _QUERIES, H * DV, N, DV, DV1)
        place = 1 - place
