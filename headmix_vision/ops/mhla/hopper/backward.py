"""Compute all gradients of MHLA for up to 256 tokens in one kernel for Hopper, written in Gluon.

B batch, N tokens, H heads, M blocks, D head dim of queries, keys and values. Scores are transposed, [keys, queries],
with all keys as rows and a tile of queries as columns; a program takes one head after the other and copies the tiles
of the next while it computes. Tokens stay in raster order: one more product, of the one-hot blocks of the keys with
the mixing rows of the queries, spreads the weights to each pair. Tokens that do not exist have neither, so their
weights are zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headmix_vision.ops.mhla.hopper.names import async_load, barrier, reinterpret
from headmix_vision.ops.mhla.hopper.tiles import (
    add_product,
    choose,
    feature_gradient,
    features,
    later,
    load_rows,
    opaque_zero,
    point_to_rows,
    product_layout,
    rotate,
    rows_of_head,
    shared_layout,
    spread_mixing,
    start_product,
    store_mixing_gradient,
    sum_by_block,
    tile_layout,
    weigh,
    zeros,
)

BQ = gl.constexpr(32)  # queries of a tile
GROUP = gl.constexpr(2)  # tiles whose query gradients are one product, as 64 rows are the fewest that it takes


@gluon.jit
def _copy_rows(target, base, rows, stride):
    """Start to copy rows to shared memory, zero beyond ``rows`` of them."""
    D: gl.constexpr = target.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    pointers, mask = point_to_rows(base, target.shape[0], D, LAYOUT, stride, rows)
    async_load(target, pointers, mask)


@gluon.jit
def _store_rows(base, x, rows, stride):
    LAYOUT: gl.constexpr = x.type.layout
    pointers, mask = point_to_rows(base, x.shape[0], x.shape[1], LAYOUT, stride, rows)
    gl.store(pointers, x.to(gl.bfloat16), mask=mask)


@gluon.jit
def _map_rows(raw, mapped, eps, FEATURE_MAP: gl.constexpr):
    x = raw.load(tile_layout(raw.shape[0], raw.shape[1], gl.num_warps()))
    mapped.store(features(x, eps, FEATURE_MAP))


@gluon.jit
def _prepare(q_raw, g_raw, q_tile, g_tile, shift, output, inverse, p_scale, rows, eps, NORMALIZER: gl.constexpr,
             FEATURE_MAP: gl.constexpr):  # fmt: skip
    """Map queries to features, divide output gradients by the denominators, and compute the gradients of these."""
    LAYOUT: gl.constexpr = tile_layout(BQ, q_raw.shape[1], gl.num_warps())
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    _map_rows(q_raw, q_tile, eps, FEATURE_MAP)
    g = g_raw.load(LAYOUT)
    if NORMALIZER != "none":
        d_denominator = -gl.sum(g.to(gl.float32) * output.to(gl.float32), 1) * inverse
        if NORMALIZER == "paper":
            shift.store(d_denominator)
        else:
            row = gl.arange(0, BQ, ROW)
            gl.store(p_scale + row, d_denominator, mask=row < rows)
        g = (g.to(gl.float32) * inverse[:, None]).to(gl.bfloat16)
    g_tile.index(0).store(g)


@gluon.jit
def _queries(q_tiles, z, SLOT: gl.constexpr):
    """View the features of a tile of queries; the first of a group is mapped while the one before is in use."""
    if SLOT == 0:
        return q_tiles[0].index(z)
    else:
        return q_tiles[1].index(z).slice(SLOT * BQ, BQ, 0)


@gluon.jit
def _scores(k_part, v_part, e_parts, part, q_tile, g_tile, m_tile):
    """Compute the products of keys and queries, values and output gradients, and the weights: [keys, queries]."""
    s = start_product(k_part, q_tile.permute((1, 0)))
    dp = start_product(v_part, g_tile.permute((1, 0)))
    COLUMNS: gl.constexpr = e_parts[0].shape[2]
    w = start_product(e_parts[0].index(part), m_tile.slice(0, COLUMNS, 0))
    if len(e_parts) == 2:
        w = warpgroup_mma(e_parts[1].index(part), m_tile.slice(COLUMNS, COLUMNS, 0), w, is_async=True)
    return s, dp, w


@gluon.jit
def _add_prefix(sums, s, dp, shift, t, PREFIX: gl.constexpr, NORMALIZER: gl.constexpr):
    """Add the gradients of the weights of all pairs with a prefix token as the query; these are in the first tile."""
    if t == 0:
        if NORMALIZER == "paper":
            dp += shift.load(gl.SliceLayout(0, dp.type.layout))[None, :]
        query = gl.arange(0, BQ, gl.SliceLayout(0, s.type.layout))
        sums += gl.sum(gl.where((query < PREFIX)[None, :], s * dp, 0.0), 1)
    return sums


@gluon.jit
def _accumulate(left, g_tile, q_tile, e_tile, dv, dk, dm):
    """Start to add a tile of queries to the gradients of values, keys and mixing."""
    return add_product(left[0], g_tile, dv), add_product(left[1], q_tile, dk), add_product(left[2], e_tile, dm)


@gluon.jit
def _finish(sums, left):
    """Wait for all sums; the compiler keeps the registers of left operands until then."""
    dv, dk, dm, _, _, _ = warpgroup_mma_wait(0, [sums[0], sums[1], sums[2], left[0], left[1], left[2]])
    return dv, dk, dm


@gluon.jit
def _load_next(t, head, next_head, B, out, inverse, N, H, D: gl.constexpr, TILES: gl.constexpr,
               NORMALIZER: gl.constexpr):  # fmt: skip
    """Load what prepares the tile of queries after tile ``t``: outputs, inverse denominators; tell where it lies."""
    LAYOUT: gl.constexpr = tile_layout(BQ, D, gl.num_warps())
    h, first = choose(t + 1 < TILES, head, next_head), gl.where(t + 1 < TILES, t + 1, 0) * BQ
    rows = gl.where(h[0] < B, N, 0) - first
    token = (h[0].to(gl.int64) * H + h[1]) * N + first
    if NORMALIZER != "none":
        row = gl.arange(0, BQ, gl.SliceLayout(1, LAYOUT))
        output = load_rows(rows_of_head(out, h) + first * out[2] * 8, rows, out[2] * 8, BQ, D, LAYOUT)
        b_inverse = gl.load(inverse + token + row, mask=row < rows, other=0.0)
    else:
        output, b_inverse = 0.0, 0.0  # not read
    return output, b_inverse, rows, token


@gluon.jit
def _copy_tile(t, q_raw, g_raw, head, B, q, d_out, N):
    """Start to copy a tile of queries and output gradients, zero for a head that does not exist."""
    first = t * BQ
    rows = gl.where(head[0] < B, N, 0) - first
    _copy_rows(q_raw, rows_of_head(q, head) + first * q[2] * 8, rows, q[2] * 8)
    _copy_rows(g_raw, rows_of_head(d_out, head) + first * d_out[2] * 8, rows, d_out[2] * 8)


@gluon.jit
def _copy_keys(parts, head, B, x, N):
    """Start to copy all keys or values of a head, zero for a head that does not exist."""
    n = gl.where(head[0] < B, N, 0)
    for part in gl.static_range(len(parts)):
        first = part * parts[0].shape[0]
        _copy_rows(parts[part], rows_of_head(x, head) + first * x[2] * 8, n - first, x[2] * 8)


@gluon.jit
def _copy_ahead(t, head, next_head, B, q_raw, g_raw, q, d_out, N, TILES: gl.constexpr, SLOT: gl.constexpr,
                ALONE: gl.constexpr):  # fmt: skip
    """Start to copy the tile after the next one to the place of tile ``t``."""
    if ALONE:
        _copy_tile(0, q_raw[0], g_raw[0], next_head, B, q, d_out, N)
        async_copy.commit_group()
        _copy_tile(1, q_raw[1], g_raw[1], next_head, B, q, d_out, N)
    elif TILES % 2 == 0:
        ahead = t + 2 < TILES
        _copy_tile(gl.where(ahead, t + 2, SLOT), q_raw[SLOT], g_raw[SLOT], choose(ahead, head, next_head), B, q,
                   d_out, N)  # fmt: skip
    elif t + 2 < TILES:
        _copy_tile(t + 2, q_raw[SLOT], g_raw[SLOT], head, B, q, d_out, N)
    async_copy.commit_group()


@gluon.jit
def _tile(
    t, head, next_head, B, memory, dv, dk, dm, dm_prefix, q, out, d_out, inverse, d_scale, N, H, eps,
    TILES: gl.constexpr, SLOT: gl.constexpr, ALONE: gl.constexpr, PREFIX: gl.constexpr, NORMALIZER: gl.constexpr,
    FEATURE_MAP: gl.constexpr,
):  # fmt: skip
    """Add a tile of queries to the gradients of keys, values and mixing, and prepare the next tile.

    Tiles take turns with two places of queries; ALONE is the last of an odd number, followed by one in the same place.
    """
    k_parts, v_parts, q_raw, g_raw, q_tiles, g_tiles, shifts, d_scores, e_tiles, e_parts, m_tiles = memory
    PARTS: gl.constexpr = len(k_parts)
    NEXT: gl.constexpr = 0 if ALONE else 1 - SLOT
    z = opaque_zero()
    q_tile, g_tile = _queries(q_tiles, z, SLOT), g_tiles[SLOT].index(z)
    m_tile, e_tile = m_tiles.index(t + z), e_tiles.index(t + z)
    s, dp, w = _scores(k_parts[0].index(z), v_parts[0].index(z), e_parts, z, q_tile, g_tile, m_tile)
    output, b_inverse, rows, token = _load_next(
        t, head, next_head, B, out, inverse, N, H, q_tile.shape[1], TILES, NORMALIZER
    )
    _copy_ahead(t, head, next_head, B, q_raw, g_raw, q, d_out, N, TILES, SLOT, ALONE)

    s, dp, w = warpgroup_mma_wait(0, [s, dp, w])
    sums = dm_prefix
    if PREFIX != 0:
        sums = (_add_prefix(dm_prefix[0], s, dp, shifts[SLOT], t, PREFIX, NORMALIZER),)
    left = weigh(s, dp, w, shifts[SLOT], d_scores[0].index(0).slice(SLOT * BQ, BQ, 0), NORMALIZER)
    first = _accumulate(left, g_tile, q_tile, e_tile, dv[0], dk[0], dm[0])
    if PARTS == 2:
        first = _finish(first, left)  # gives registers back
        z = opaque_zero()
        s, dp, w = _scores(k_parts[1].index(z), v_parts[1].index(z), e_parts, 1 + z, q_tile, g_tile, m_tile)
        s, dp, w = warpgroup_mma_wait(0, [s, dp, w])
        if PREFIX != 0:
            sums = sums + (_add_prefix(dm_prefix[1], s, dp, shifts[SLOT], t, PREFIX, NORMALIZER),)
        left = weigh(s, dp, w, shifts[SLOT], d_scores[1].index(0).slice(SLOT * BQ, BQ, 0), NORMALIZER)
        last = _accumulate(left, g_tile, q_tile, e_tile, dv[1], dk[1], dm[1])
    else:
        last = first
    if ALONE:
        last = _finish(last, left)
    if SLOT == 0 and FEATURE_MAP != "identity":
        q_tiles[1].index(0).slice(0, BQ, 0).store(q_tile.load(tile_layout(BQ, q_tile.shape[1], gl.num_warps())))
    async_copy.wait_group(1)
    _prepare(
        q_raw[NEXT], g_raw[NEXT], _queries(q_tiles, 0, NEXT), g_tiles[NEXT], shifts[NEXT], output, b_inverse,
        d_scale + token, rows, eps, NORMALIZER, FEATURE_MAP,
    )  # fmt: skip
    fence_async_shared()
    if not ALONE:
        last = _finish(last, left)
    barrier()
    if PARTS == 2:
        return (first[0], last[0]), (first[1], last[1]), (first[2], last[2]), sums
    else:
        return (last[0],), (last[1],), (last[2],), sums


@gluon.jit
def _query_gradients(d_scores, k_parts, q_group, d_q, rows, stride, eps, FEATURE_MAP: gl.constexpr):
    """Compute and store the gradients of a group of tiles of queries."""
    z = opaque_zero()
    dq = start_product(d_scores[0].index(z), k_parts[0].index(z))
    if len(k_parts) == 2:
        dq = warpgroup_mma(d_scores[1].index(z), k_parts[1].index(z), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    _store_rows(d_q, feature_gradient(q_group.index(z), dq, eps, FEATURE_MAP), rows, stride)


@gluon.jit
def _store_through(memory, gradient, base, rows, stride):
    """Store gradients by way of shared memory, so that threads write whole rows."""
    tile = memory.index(0)
    tile.store(gradient.to(gl.bfloat16))
    _store_rows(base, tile.load(tile_layout(tile.shape[0], tile.shape[1], gl.num_warps())), rows, stride)


@gluon.jit
def _store_blocks(base, total, first_row, first_column, M, MB: gl.constexpr):
    """Store gradients of weights between blocks, of which the last is the first one of the mixing."""
    LAYOUT: gl.constexpr = total.type.layout
    row = first_row + gl.arange(0, total.shape[0], gl.SliceLayout(1, LAYOUT))
    column = first_column + gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))
    pointers = base + rotate(row, M, 1)[:, None] * MB + rotate(column, M, 1)[None, :]
    gl.store(pointers, total, mask=(row < M)[:, None] & (column < M)[None, :])


@gluon.jit
def _store_mixing_gradient(base, dm, dm_prefix, d_scores, e_parts, M):
    """Store the gradients of the weights of all query blocks, the prefix block last."""
    if len(dm_prefix) == 0:
        store_mixing_gradient(base, dm, d_scores, e_parts[0], 0)
    else:
        LAYOUT: gl.constexpr = dm[0].type.layout
        COLUMNS: gl.constexpr = dm[0].shape[1]
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        apart = ()
        for part in gl.static_range(len(dm)):
            row_sums = gl.convert_layout(dm_prefix[part], gl.SliceLayout(1, LAYOUT))
            apart = apart + (gl.where((column == 0)[None, :], row_sums[:, None], 0.0),)
        for c in gl.static_range(2):
            _store_blocks(base, sum_by_block(dm, d_scores, e_parts[c], 0), 0, c * COLUMNS, M, 2 * COLUMNS)
            _store_blocks(base, sum_by_block(apart, d_scores, e_parts[c], 0), COLUMNS, c * COLUMNS, M, 2 * COLUMNS)


@gluon.jit
def _row_sums(COUNT: gl.constexpr, ROWS: gl.constexpr):
    """Make sums over the queries of each key that start at zero."""
    sums = ()
    for _ in gl.static_range(COUNT):
        sums = sums + (gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, product_layout(ROWS, BQ, gl.num_warps()))),)
    return sums


@gluon.jit
def _allocate(COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate shared memory for some rows; they do not lie in one array, so that the compiler tells them apart."""
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles = tiles + (gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], shared_layout(COLUMNS)),)
    return tiles


@gluon.jit
def _allocate_arrays(COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate rows as arrays of one, to be indexed by an opaque zero."""
    arrays = ()
    for _ in gl.static_range(COUNT):
        arrays = arrays + (gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, COLUMNS], shared_layout(COLUMNS)),)
    return arrays


@gluon.jit
def _first_of(arrays):
    tiles = ()
    for part in gl.static_range(len(arrays)):
        tiles = tiles + (arrays[part].index(0),)
    return tiles


@gluon.jit
def gluon_backward_kernel(
    q, k, v, mixing, out, inverse, d_out, d_q, d_k, d_v, d_mixing, d_scale, blocks,
    q_b, q_h, k_b, k_h, v_b, v_h, o_b, o_h, g_b, g_h, mixing_h, mixing_i, mixing_j, B, eps,
    q_n: gl.constexpr, k_n: gl.constexpr, v_n: gl.constexpr, o_n: gl.constexpr, g_n: gl.constexpr,
    N: gl.constexpr, H: gl.constexpr, M: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, MB: gl.constexpr,
    PACK: gl.constexpr, PER_HEAD: gl.constexpr, NORMALIZER: gl.constexpr, FEATURE_MAP: gl.constexpr,
    VALUES_AHEAD: gl.constexpr, PREFIX: gl.constexpr,
):  # fmt: skip
    """Run as many programs as a GPU holds at a time, of more than BQ tokens; strides of rows come divided by 8.

    With VALUES_AHEAD the next head's values are copied while this one's are used, to memory that others leave free.
    Where PREFIX is not zero, that many tokens in front are a block of their own beside 16 others, and ``blocks`` names
    it last: only its keys are among those of the products for the gradient of the mixing, its queries are summed apart.

    ``d_mixing`` [programs or heads, MB, MB] are parts of the gradient of the mixing.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = min(KEYS, 16 * WARPS)  # keys that are computed at a time
    PARTS: gl.constexpr = KEYS // ROWS
    TILES: gl.constexpr = (N + BQ - 1) // BQ
    dtype: gl.constexpr = gl.bfloat16
    k_raw, k_parts = _allocate(PARTS, ROWS, D), _allocate_arrays(PARTS, ROWS, D)
    v_parts = _allocate_arrays(PARTS, ROWS, D)
    if VALUES_AHEAD:
        v_raw = _allocate(PARTS, ROWS, D)
    else:
        v_raw = _first_of(v_parts)
    q_raw, g_raw = _allocate(2, BQ, D), _allocate(2, BQ, D)
    q_tiles = _allocate_arrays(1, BQ, D) + _allocate_arrays(1, GROUP * BQ, D)
    g_tiles = _allocate_arrays(2, BQ, D)
    shifts = ()
    for _ in gl.static_range(2):
        shifts = shifts + (gl.allocate_shared_memory(gl.float32, [BQ], gl.SwizzledSharedLayout(1, 1, 1, [0])),)
    d_scores = _allocate_arrays(PARTS, GROUP * BQ, ROWS)
    SHIFT: gl.constexpr = 1 if PREFIX != 0 else 0
    COLUMNS: gl.constexpr = MB // (1 + SHIFT)
    e_parts = ()
    for _ in gl.static_range(MB // COLUMNS):
        e_parts = e_parts + (gl.allocate_shared_memory(dtype, [PARTS, ROWS, COLUMNS], shared_layout(COLUMNS)),)
    e_tiles = reinterpret(e_parts[0], dtype, [KEYS // BQ, BQ, COLUMNS], shared_layout(COLUMNS))
    m_tiles = gl.allocate_shared_memory(dtype, [TILES, MB, BQ], shared_layout(BQ))
    memory = (k_parts, v_parts, q_raw, g_raw, q_tiles, g_tiles, shifts, d_scores, e_tiles, e_parts, m_tiles)
    q, k, v = (q, q_b, q_n, q_h), (k, k_b, k_n, k_h), (v, v_b, v_n, v_h)
    out, d_out = (out, o_b, o_n, o_h), (d_out, g_b, g_n, g_h)
    stride = H * PACK * D

    first, count = gl.program_id(0), gl.num_programs(0)
    head, step = (first // H, first % H), (count // H, count % H)
    next_head = later(head, step, H)
    _copy_keys(k_raw, head, B, k, N)
    _copy_keys(v_raw, head, B, v, N)
    _copy_tile(0, q_raw[0], g_raw[0], head, B, q, d_out, N)
    async_copy.commit_group()
    _copy_tile(1, q_raw[1], g_raw[1], head, B, q, d_out, N)
    async_copy.commit_group()
    LAYOUT: gl.constexpr = tile_layout(ROWS, COLUMNS, WARPS)
    for part in gl.static_range(PARTS):
        key = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        block = gl.load(blocks + key, mask=key < N, other=-1)
        for columns in gl.static_range(len(e_parts)):
            column = columns * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
            e_parts[columns].index(part).store((block[:, None] == column[None, :]).to(dtype))
    if not PER_HEAD:
        spread_mixing(m_tiles, mixing, blocks, mixing_i, mixing_j, N, M, SHIFT)
    output, b_inverse, rows, token = _load_next(-1, head, head, B, out, inverse, N, H, D, TILES, NORMALIZER)
    async_copy.wait_group(1)
    _prepare(
        q_raw[0], g_raw[0], _queries(q_tiles, 0, 0), g_tiles[0], shifts[0], output, b_inverse, d_scale + token, rows,
        eps, NORMALIZER, FEATURE_MAP,
    )  # fmt: skip

    dm, dm_prefix = zeros(PARTS, ROWS, COLUMNS), _row_sums(PARTS * SHIFT, ROWS)
    for place in range(first, B * H, count):
        if not VALUES_AHEAD:
            async_copy.wait_group(0)
        for part in gl.static_range(PARTS):
            _map_rows(k_raw[part], k_parts[part].index(0), eps, FEATURE_MAP)
            if VALUES_AHEAD:
                _map_rows(v_raw[part], v_parts[part].index(0), eps, "identity")
        if PER_HEAD:
            spread_mixing(m_tiles, mixing + head[1].to(gl.int64) * mixing_h, blocks, mixing_i, mixing_j, N, M, SHIFT)
            dm, dm_prefix = zeros(PARTS, ROWS, COLUMNS), _row_sums(PARTS * SHIFT, ROWS)
        fence_async_shared()
        barrier()
        _copy_keys(k_raw, next_head, B, k, N)  # with the first tile that is copied
        if VALUES_AHEAD:
            _copy_keys(v_raw, next_head, B, v, N)
        dv, dk = zeros(PARTS, ROWS, D), zeros(PARTS, ROWS, D)
        offset = (head[0].to(gl.int64) * N * H * PACK + head[1]) * D
        for group in range(TILES // GROUP):
            for t in gl.static_range(GROUP):
                dv, dk, dm, dm_prefix = _tile(
                    GROUP * group + t, head, next_head, B, memory, dv, dk, dm, dm_prefix, q, out, d_out, inverse,
                    d_scale, N, H, eps, TILES, t, False, PREFIX if t == 0 else 0, NORMALIZER, FEATURE_MAP,
                )  # fmt: skip
            row = group * GROUP * BQ
            _query_gradients(
                d_scores, k_parts, q_tiles[1], d_q + offset + row * stride, N - row, stride, eps, FEATURE_MAP
            )  # fmt: skip
        if TILES % GROUP != 0:
            dv, dk, dm, dm_prefix = _tile(
                TILES - 1, head, next_head, B, memory, dv, dk, dm, dm_prefix, q, out, d_out, inverse, d_scale, N, H,
                eps, TILES, 0, True, 0, NORMALIZER, FEATURE_MAP,
            )  # fmt: skip
            LAST: gl.constexpr = (TILES - 1) * BQ
            _query_gradients(
                d_scores, k_parts, q_tiles[1], d_q + offset + LAST * stride, N - LAST, stride, eps, FEATURE_MAP
            )  # fmt: skip
        for part in gl.static_range(PARTS):
            row = part * ROWS
            gradient = feature_gradient(k_parts[part].index(0), dk[part], eps, FEATURE_MAP)
            _store_through(k_parts[part], gradient, d_k + offset + row * stride, N - row, stride)
            _store_through(v_parts[part], dv[part], d_v + offset + row * stride, N - row, stride)
        if PER_HEAD:
            p_dm = d_mixing + place.to(gl.int64) * (MB * MB)
            _store_mixing_gradient(p_dm, dm, dm_prefix, d_scores, e_parts, M)
        if not VALUES_AHEAD:
            barrier()  # all warps have read the gradients that took the place of values
            _copy_keys(v_raw, next_head, B, v, N)
            async_copy.commit_group()
        elif TILES == 2:
            async_copy.wait_group(0)
        head, next_head = next_head, later(next_head, step, H)
    if not PER_HEAD:
        _store_mixing_gradient(d_mixing + first * (MB * MB), dm, dm_prefix, d_scores, e_parts, M)
