"""Compute all gradients of MHLA for up to 256 tokens and heads of 64 to 80 dims in one kernel for Hopper, in Gluon.

B batch, N tokens, H heads, M blocks, D head dim of queries, keys and values. This is ``backward.py`` for
sums that would fill the registers: a pass takes KEYS keys and all queries, so that dk and dv of these keys fit. What
passes sum together, dq and the gradient of the mixing, waits in ``scratch`` between them; a thread reads there only
what it wrote itself.

Columns beyond 64 lie in tails of 16 columns: at the beginning of those of values and output gradients, at the end of
those of queries and keys. If there are 8 of them, a tail holds both: dv and dk are then sums in one tail, as neither
adds to the columns of the other.
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

from headmix_vision.ops.mhla.hopper.names import async_load, barrier, first_tile, reinterpret
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
    rows_of_head,
    shared_layout,
    spread_mixing,
    start_product,
    store_mixing_gradient,
    tile_layout,
    weigh,
    zeros,
)

WIDTH = gl.constexpr(64)  # columns before a tail
TAIL = gl.constexpr(16)


@gluon.constexpr_function
def copy_layout(columns, warps):
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def row_layout(columns, warps):
    """Return a layout of rows, or of their tails, that gives each row to the same 8 threads."""
    return gl.BlockedLayout([1, columns // 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def start_of(part, dims, at_end):
    """Return the column of a head with which a part begins: its first columns, or a tail that they begin or end."""
    return 0 if part == 0 else dims - TAIL.value if at_end else WIDTH.value


@gluon.jit
def _columns(base, ROWS: gl.constexpr, COLUMNS: gl.constexpr, START: gl.constexpr, D: gl.constexpr,
             LAYOUT: gl.constexpr, stride, rows):  # fmt: skip
    """Point to columns of rows, from START on, and tell which of them exist and belong to the part."""
    pointers, mask = point_to_rows(base + START, ROWS, COLUMNS, LAYOUT, stride, rows)
    if COLUMNS == TAIL and D < WIDTH + TAIL:
        column = START + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        mask = mask & ((column >= WIDTH) & (column < D))[None, :]
    return pointers, mask


@gluon.jit
def _copy_columns(target, base, rows, stride, START: gl.constexpr, D: gl.constexpr):
    LAYOUT: gl.constexpr = copy_layout(target.shape[1], gl.num_warps())
    pointers, mask = _columns(base, target.shape[0], target.shape[1], START, D, LAYOUT, stride, rows)
    async_load(target, pointers, mask)


@gluon.jit
def _copy_rows(target, base, rows, stride, D: gl.constexpr, AT_END: gl.constexpr):
    """Start to copy rows to shared memory, zero beyond ``rows`` of them."""
    for c in gl.static_range(len(target)):
        _copy_columns(target[c], base, rows, stride, start_of(c, D, AT_END), D)


@gluon.jit
def _store_columns(base, x, rows, stride, START: gl.constexpr, D: gl.constexpr):
    LAYOUT: gl.constexpr = x.type.layout
    pointers, mask = _columns(base, x.shape[0], x.shape[1], START, D, LAYOUT, stride, rows)
    gl.store(pointers, x.to(gl.bfloat16), mask=mask)


@gluon.jit
def _map_columns(raw, mapped, eps, D: gl.constexpr, FEATURE_MAP: gl.constexpr):
    LAYOUT: gl.constexpr = tile_layout(raw.shape[0], raw.shape[1], gl.num_warps())
    x = features(raw.load(LAYOUT), eps, FEATURE_MAP)
    if raw.shape[1] == TAIL and D < WIDTH + TAIL:
        column = gl.arange(0, TAIL, gl.SliceLayout(0, LAYOUT))
        x = gl.where((column >= WIDTH + TAIL - D)[None, :], x, 0.0)
    mapped.store(x)


@gluon.jit
def _map_rows(raw, mapped, eps, D: gl.constexpr, FEATURE_MAP: gl.constexpr):
    """Write the features of queries or keys; columns of a tail that are not theirs stay zero."""
    for c in gl.static_range(len(raw)):
        _map_columns(raw[c], mapped[c], eps, D, FEATURE_MAP)


@gluon.jit
def _move(source, target):
    for c in gl.static_range(len(source)):
        target[c].store(source[c].load(tile_layout(source[c].shape[0], source[c].shape[1], gl.num_warps())))


@gluon.jit
def _row_sums(x, y):
    sums = gl.sum(x.to(gl.float32) * y.to(gl.float32), 1)
    return gl.convert_layout(sums, gl.SliceLayout(1, row_layout(WIDTH, gl.num_warps())))


@gluon.jit
def _scale(x, factor):
    factor = gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))
    return (x.to(gl.float32) * factor[:, None]).to(gl.bfloat16)


@gluon.jit
def _load_tile(tile):
    x = ()
    for c in gl.static_range(len(tile)):
        x = x + (tile[c].load(row_layout(tile[c].shape[1], gl.num_warps())),)
    return x


@gluon.jit
def _prepare(raw, q_tile, g_tile, shift, inverse, p_scale, rows, eps, D: gl.constexpr, NORMALIZER: gl.constexpr,
             FEATURE_MAP: gl.constexpr):  # fmt: skip
    """Map queries to features, divide output gradients by the denominators, and compute the gradients of these."""
    _map_rows(raw[0], q_tile, eps, D, FEATURE_MAP)
    g = _load_tile(raw[1])
    if NORMALIZER != "none":
        output = _load_tile(raw[2])
        d_denominator = -_row_sums(g[0], output[0]) * inverse
        if len(g) == 2:
            d_denominator -= _row_sums(g[1], output[1]) * inverse
        if NORMALIZER == "paper":
            shift.store(d_denominator)
        else:
            row = gl.arange(0, shift.shape[0], gl.SliceLayout(1, row_layout(WIDTH, gl.num_warps())))
            gl.store(p_scale + row, d_denominator, mask=row < rows)
    for c in gl.static_range(len(g)):
        g_tile[c].index(0).store(g[c] if NORMALIZER == "none" else _scale(g[c], inverse))


@gluon.jit
def _at(tile, z):
    """View a tile at a place that the compiler does not know."""
    views = ()
    for c in gl.static_range(len(tile)):
        views = views + (tile[c].index(z),)
    return views


@gluon.jit
def _rows_at(tile, z, START: gl.constexpr, ROWS: gl.constexpr):
    views = ()
    for c in gl.static_range(len(tile)):
        views = views + (tile[c].index(z).slice(START, ROWS, 0),)
    return views


@gluon.jit
def _queries(q_tiles, z, PLACE: gl.constexpr, BQ: gl.constexpr):
    """View the features of a tile of queries; the first of a group is mapped while the one before is in use."""
    if PLACE == 0:
        return _at(q_tiles[0], z)
    else:
        return _rows_at(q_tiles[1], z, PLACE * BQ, BQ)


@gluon.jit
def _start_scores(a, b):
    """Start the products of rows of ``a`` and rows of ``b``."""
    product = start_product(a[0], b[0].permute((1, 0)))
    if len(a) == 2:
        product = warpgroup_mma(a[1], b[1].permute((1, 0)), product, is_async=True)
    return product


@gluon.jit
def _accumulate(left, q_tile, g_tile, e_tile, sums):
    """Start to add a tile of queries to the gradients of mixing, values and keys, and to their tails."""
    dm, dv = add_product(left[2], e_tile, sums[0]), add_product(left[0], g_tile[0], sums[1])
    dk = add_product(left[1], q_tile[0], sums[2])
    if len(sums) == 3:
        return dm, dv, dk
    else:
        tail = add_product(left[0], g_tile[1], sums[3])
        if len(sums) == 5:
            return dm, dv, dk, tail, add_product(left[1], q_tile[1], sums[4])
        else:
            operand = gl.convert_layout(left[1], gl.DotOperandLayout(0, sums[3].type.layout, 2))
            return dm, dv, dk, warpgroup_mma(operand, q_tile[1], tail, is_async=True)


@gluon.jit
def _finish(sums, left):
    """Wait for all sums; the compiler keeps the registers of left operands until then."""
    done = warpgroup_mma_wait(0, sums + left)
    return done[: len(sums)]


@gluon.jit
def _copy_next(t, head, next_head, B, raw, q, d_out, out, inverse, N, H, D: gl.constexpr, TILES: gl.constexpr,
               MORE: gl.constexpr, NORMALIZER: gl.constexpr):  # fmt: skip
    """Start to copy the tile of queries, output gradients and outputs after tile ``t``.

    With MORE it is of the same head; it is zero for a head that does not exist. Return its inverse denominators, and
    where it lies.
    """
    BQ: gl.constexpr = raw[0][0].shape[0]
    if MORE:
        h, first = head, (t + 1) * BQ
        rows = N - first
    else:
        h, first = choose(t + 1 < TILES, head, next_head), gl.where(t + 1 < TILES, t + 1, 0) * BQ
        rows = gl.where(h[0] < B, N, 0) - first
    _copy_rows(raw[0], rows_of_head(q, h) + first * q[2] * 8, rows, q[2] * 8, D, True)
    _copy_rows(raw[1], rows_of_head(d_out, h) + first * d_out[2] * 8, rows, d_out[2] * 8, D, False)
    token = (h[0].to(gl.int64) * H + h[1]) * N + first
    if NORMALIZER != "none":
        _copy_rows(raw[2], rows_of_head(out, h) + first * out[2] * 8, rows, out[2] * 8, D, False)
        row = gl.arange(0, BQ, gl.SliceLayout(1, row_layout(WIDTH, gl.num_warps())))
        b_inverse = gl.load(inverse + token + row, mask=row < rows, other=0.0)
    else:
        b_inverse = 0.0  # not read
    async_copy.commit_group()
    return b_inverse, token, rows


@gluon.jit
def _copy_keys(k_raw, v_raw, head, first, B, k, v, N, D: gl.constexpr):
    """Start to copy the keys and values of a pass, from key ``first`` on, zero for a head that does not exist."""
    for part in gl.static_range(len(k_raw)):
        row = first + part * k_raw[0][0].shape[0]
        rows = gl.where(head[0] < B, N, 0) - row
        _copy_rows(k_raw[part], rows_of_head(k, head) + row * k[2] * 8, rows, k[2] * 8, D, True)
        _copy_rows(v_raw[part], rows_of_head(v, head) + row * v[2] * 8, rows, v[2] * 8, D, False)
    async_copy.commit_group()


@gluon.jit
def _tile(
    t, head, next_head, first_part, B, memory, sums, q, out, d_out, inverse, d_scale, N, H, eps, D: gl.constexpr,
    TILES: gl.constexpr, PLACE: gl.constexpr, NORMALIZER: gl.constexpr, FEATURE_MAP: gl.constexpr,
):  # fmt: skip
    """Add a tile of queries, at a place in its group, to the sums of each part of the keys, and prepare the next tile.

    Tiles take turns with two places of output gradients.
    """
    k_parts, v_parts, raw, q_tiles, g_tiles, shifts, d_scores, e_parts, e_tiles, m_tiles = memory
    BQ: gl.constexpr = raw[0][0].shape[0]
    SLOT: gl.constexpr = PLACE % 2
    NEXT: gl.constexpr = (PLACE + 1) % (q_tiles[1][0].shape[1] // BQ)
    added = ()
    for part in gl.static_range(len(k_parts)):
        z = opaque_zero()
        q_tile, g_tile = _queries(q_tiles, z, PLACE, BQ), _at(g_tiles[SLOT], z)
        s, dp = _start_scores(_at(k_parts[part], z), q_tile), _start_scores(_at(v_parts[part], z), g_tile)
        w = start_product(e_parts.index(first_part + part + z), m_tiles.index(t + z))
        if part == 0:
            b_inverse, token, rows = _copy_next(
                t, head, next_head, B, raw, q, d_out, out, inverse, N, H, D, TILES, NEXT > 0, NORMALIZER
            )
        s, dp, w = warpgroup_mma_wait(0, [s, dp, w])
        left = weigh(s, dp, w, shifts[SLOT], d_scores[part].index(0).slice(PLACE * BQ, BQ, 0), NORMALIZER)
        current = _accumulate(left, q_tile, g_tile, e_tiles.index(t + z), sums[part])
        if part + 1 < len(k_parts):
            added = added + (_finish(current, left),)  # gives registers back
    if PLACE == 0 and FEATURE_MAP != "identity":
        _move(q_tile, _rows_at(q_tiles[1], 0, 0, BQ))
    async_copy.wait_group(0)
    _prepare(
        raw, _queries(q_tiles, 0, NEXT, BQ), g_tiles[1 - SLOT], shifts[1 - SLOT], b_inverse, d_scale + token, rows, eps,
        D, NORMALIZER, FEATURE_MAP,
    )  # fmt: skip
    fence_async_shared()
    added = added + (_finish(current, left),)
    barrier()
    return added


@gluon.jit
def _partial_sums(base, present, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Load what passes before have summed, or zeros."""
    LAYOUT: gl.constexpr = product_layout(ROWS, COLUMNS, gl.num_warps())
    return load_rows(base, gl.where(present, ROWS, 0), stride, ROWS, COLUMNS, LAYOUT)


@gluon.jit
def _store_partial_sums(base, sums, stride):
    LAYOUT: gl.constexpr = sums.type.layout
    pointers, _ = point_to_rows(base, sums.shape[0], sums.shape[1], LAYOUT, stride, 0)
    gl.store(pointers, sums)


@gluon.jit
def _query_gradients(d_scores, k_parts, q_group, partial, stride, turn, d_q, rows, d_n, eps, D: gl.constexpr,
                     PASSES: gl.constexpr, FEATURE_MAP: gl.constexpr):  # fmt: skip
    """Add the keys of a pass to the gradients of a group of tiles of queries, and store them after the last pass."""
    ROWS: gl.constexpr = d_scores[0].shape[1]
    z = opaque_zero()
    sums = ()
    for c in gl.static_range(len(q_group)):
        if PASSES == 1:
            total = zeros(1, ROWS, q_group[c].shape[2])[0]
        else:
            total = _partial_sums(partial + c * WIDTH, turn > 0, stride, ROWS, q_group[c].shape[2])
        for part in gl.static_range(len(k_parts)):
            total = warpgroup_mma(d_scores[part].index(z), k_parts[part][c].index(z), total, is_async=True)
        sums = sums + (total,)
    if len(sums) == 1:
        sums = (warpgroup_mma_wait(0, sums),)
    else:
        sums = warpgroup_mma_wait(0, sums)
    for c in gl.static_range(len(q_group)):
        if turn + 1 == PASSES:
            gradient = feature_gradient(q_group[c].index(z), sums[c], eps, FEATURE_MAP)
            _store_columns(d_q, gradient, rows, d_n, start_of(c, D, True), D)
        else:
            _store_partial_sums(partial + c * WIDTH, sums[c], stride)


@gluon.jit
def _store_through(memory, x, base, rows, stride, D: gl.constexpr):
    """Store gradients by way of shared memory, so that threads write whole rows."""
    tile = first_tile(memory, x.shape[0], x.shape[1], shared_layout(x.shape[1]))
    tile.store(x.to(gl.bfloat16))
    _store_columns(base, tile.load(tile_layout(x.shape[0], x.shape[1], gl.num_warps())), rows, stride, 0, D)


@gluon.jit
def _key_gradients(k_part, sums, eps, FEATURE_MAP: gl.constexpr):
    """Compute the gradients of keys from the gradients of their features."""
    gradients = (feature_gradient(k_part[0].index(0), sums[2], eps, FEATURE_MAP).to(gl.bfloat16),)
    if len(sums) > 3:
        tail = feature_gradient(k_part[1].index(0), sums[len(sums) - 1], eps, FEATURE_MAP)
        gradients = gradients + (tail.to(gl.bfloat16),)
    return gradients


@gluon.jit
def _store_key_gradients(memory, dk, sums, d_k, d_v, rows, stride, D: gl.constexpr):
    _store_through(memory, dk[0], d_k, rows, stride, D)
    _store_through(memory, sums[1], d_v, rows, stride, D)
    if len(dk) > 1:
        _store_columns(d_k, dk[1], rows, stride, start_of(1, D, True), D)
        _store_columns(d_v, sums[3], rows, stride, start_of(1, D, False), D)


@gluon.jit
def _first_sums(p_mixing_sums, present, PARTS: gl.constexpr, ROWS: gl.constexpr, MB: gl.constexpr, D: gl.constexpr):
    """Return the sums with which a pass starts, for each part of its keys: of mixing, values, keys, and their tails."""
    TAILS: gl.constexpr = (D > WIDTH) + (D > WIDTH + TAIL // 2)
    dv, dk = zeros(PARTS, ROWS, WIDTH), zeros(PARTS, ROWS, WIDTH)
    sums = ()
    for part in gl.static_range(PARTS):
        dm = _partial_sums(p_mixing_sums + part * (ROWS * MB), present, MB, ROWS, MB)
        sums = sums + ((dm, dv[part], dk[part]) + zeros(TAILS, ROWS, TAIL),)
    return sums


@gluon.jit
def _sum_mixing_gradient(base, p_mixing_sums, d_scores, e_parts, first_part):
    """Sum the gradient of the mixing over the keys of a pass."""
    ROWS: gl.constexpr = e_parts.shape[1]
    MB: gl.constexpr = e_parts.shape[2]
    dm = ()
    for part in gl.static_range(len(d_scores)):
        dm = dm + (_partial_sums(p_mixing_sums + part * (ROWS * MB), True, MB, ROWS, MB),)
    store_mixing_gradient(base, dm, d_scores, e_parts, first_part)


@gluon.jit
def _allocate(ROWS: gl.constexpr, D: gl.constexpr):
    """Allocate shared memory for rows, as arrays of one, to be indexed by an opaque zero."""
    tile = (gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, WIDTH], shared_layout(WIDTH)),)
    if D > WIDTH:
        tile = tile + (gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, TAIL], shared_layout(TAIL)),)
    return tile


@gluon.jit
def _allocate_tiles(COUNT: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """Allocate some tiles; they do not lie in one array, so that the compiler tells them apart."""
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles = tiles + (_allocate(ROWS, D),)
    return tiles


@gluon.jit
def _raw(tiles):
    """View tiles where copies arrive."""
    raw = ()
    for i in gl.static_range(len(tiles)):
        raw = raw + (_at(tiles[i], 0),)
    return raw


@gluon.jit
def gluon_wide_backward_kernel(
    q, k, v, mixing, out, inverse, d_out, d_q, d_k, d_v, d_mixing, d_scale, blocks, scratch,
    q_b, q_h, k_b, k_h, v_b, v_h, o_b, o_h, g_b, g_h, mixing_h, mixing_i, mixing_j, B, eps,
    q_n: gl.constexpr, k_n: gl.constexpr, v_n: gl.constexpr, o_n: gl.constexpr, g_n: gl.constexpr,
    N: gl.constexpr, H: gl.constexpr, M: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, BQ: gl.constexpr,
    MB: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr, NORMALIZER: gl.constexpr,
    FEATURE_MAP: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Take one head after the other; strides of rows come divided by 8.

    ``d_mixing`` [programs, passes, MB, MB], or [B, passes, H, MB, MB], are parts of the gradient of the mixing.
    ``scratch`` is [programs, padded tokens, WIDTH + TAIL + MB]. With AHEAD, keys and values are copied while the pass
    before computes.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = min(KEYS, 16 * WARPS)  # keys that are computed at a time
    PARTS: gl.constexpr = KEYS // ROWS
    GROUP: gl.constexpr = max(2, ROWS // BQ)  # tiles whose query gradients are one product
    PASSES: gl.constexpr = (N + KEYS - 1) // KEYS
    TILES: gl.constexpr = PASSES * KEYS // BQ
    WIDE: gl.constexpr = WIDTH + TAIL
    dtype: gl.constexpr = gl.bfloat16
    k_parts, v_parts = _allocate_tiles(PARTS, ROWS, D), _allocate_tiles(PARTS, ROWS, D)
    if AHEAD:
        k_raw, v_raw = _raw(_allocate_tiles(PARTS, ROWS, D)), _raw(_allocate_tiles(PARTS, ROWS, D))
    else:
        k_raw, v_raw = _raw(k_parts), _raw(v_parts)
    raw = _raw(_allocate_tiles(2 if NORMALIZER == "none" else 3, BQ, D))
    q_tiles, g_tiles = (_allocate(BQ, D), _allocate(GROUP * BQ, D)), _allocate_tiles(2, BQ, D)
    shifts, d_scores = (), ()
    for _ in gl.static_range(2):
        shifts = shifts + (gl.allocate_shared_memory(gl.float32, [BQ], gl.SwizzledSharedLayout(1, 1, 1, [0])),)
    for _ in gl.static_range(PARTS):
        d_scores = d_scores + (gl.allocate_shared_memory(dtype, [1, GROUP * BQ, ROWS], shared_layout(ROWS)),)
    e_parts = gl.allocate_shared_memory(dtype, [PASSES * PARTS, ROWS, MB], shared_layout(MB))
    e_tiles = reinterpret(e_parts, dtype, [TILES, BQ, MB], shared_layout(MB))
    m_tiles = gl.allocate_shared_memory(dtype, [TILES, MB, BQ], shared_layout(BQ))
    memory = (k_parts, v_parts, raw, q_tiles, g_tiles, shifts, d_scores, e_parts, e_tiles, m_tiles)
    q, k, v = (q, q_b, q_n, q_h), (k, k_b, k_n, k_h), (v, v_b, v_n, v_h)
    out, d_out = (out, o_b, o_n, o_h), (d_out, g_b, g_n, g_h)
    stride = H * PACK * D

    first, count = gl.program_id(0), gl.num_programs(0)
    p_partial = scratch + first.to(gl.int64) * (TILES * BQ * (WIDE + MB))
    p_mixing_sums = p_partial + TILES * BQ * WIDE
    head, step = (first // H, first % H), (count // H, count % H)
    next_head = later(head, step, H)
    _copy_keys(k_raw, v_raw, head, 0, B, k, v, N, D)
    b_inverse, token, rows = _copy_next(
        -1, head, head, B, raw, q, d_out, out, inverse, N, H, D, TILES, True, NORMALIZER
    )
    LAYOUT: gl.constexpr = tile_layout(ROWS, MB, WARPS)
    for part in gl.static_range(PASSES * PARTS):
        key = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        block = gl.load(blocks + key, mask=key < N, other=-1)
        e_parts.index(part).store((block[:, None] == gl.arange(0, MB, gl.SliceLayout(0, LAYOUT))[None, :]).to(dtype))
    if not PER_HEAD:
        spread_mixing(m_tiles, mixing, blocks, mixing_i, mixing_j, N, M)
    async_copy.wait_group(0)
    _prepare(
        raw, _queries(q_tiles, 0, 0, BQ), g_tiles[0], shifts[0], b_inverse, d_scale + token, rows, eps, D, NORMALIZER,
        FEATURE_MAP,
    )  # fmt: skip

    for place in range(first, B * H, count):
        if PER_HEAD:
            spread_mixing(m_tiles, mixing + head[1].to(gl.int64) * mixing_h, blocks, mixing_i, mixing_j, N, M)
        offset = (head[0].to(gl.int64) * N * H * PACK + head[1]) * D
        for turn in range(opaque_zero() + PASSES):  # Triton 3.6 fails to compile a loop of one turn here
            next_pass = choose(turn + 1 < PASSES, head, next_head)
            next_keys = gl.where(turn + 1 < PASSES, turn + 1, 0) * KEYS
            async_copy.wait_group(0)
            for part in gl.static_range(PARTS):
                _map_rows(k_raw[part], _at(k_parts[part], 0), eps, D, FEATURE_MAP)
                if AHEAD:
                    _move(v_raw[part], _at(v_parts[part], 0))
            fence_async_shared()
            barrier()
            if AHEAD:
                _copy_keys(k_raw, v_raw, next_pass, next_keys, B, k, v, N, D)
            p_dm = p_mixing_sums + turn * (KEYS * MB)
            sums = _first_sums(p_dm, place > (B * H if PER_HEAD else first), PARTS, ROWS, MB, D)
            for group in range(TILES // GROUP):
                for t in gl.static_range(GROUP):
                    sums = _tile(
                        GROUP * group + t, head, next_pass, turn * PARTS, B, memory, sums, q, out, d_out, inverse,
                        d_scale, N, H, eps, D, TILES, t, NORMALIZER, FEATURE_MAP,
                    )  # fmt: skip
                row = group * GROUP * BQ
                _query_gradients(
                    d_scores, k_parts, q_tiles[1], p_partial + row * WIDE, WIDE, turn, d_q + offset + row * stride,
                    N - row, stride, eps, D, PASSES, FEATURE_MAP,
                )  # fmt: skip
            dk = ()
            for part in gl.static_range(PARTS):
                dk = dk + (_key_gradients(k_parts[part], sums[part], eps, FEATURE_MAP),)
            barrier()  # all warps are done with keys, values and gradients of scores
            if not AHEAD:
                _copy_keys(k_raw, v_raw, next_pass, next_keys, B, k, v, N, D)
            for part in gl.static_range(PARTS):
                row = turn * KEYS + part * ROWS
                _store_key_gradients(
                    d_scores[part], dk[part], sums[part], d_k + offset + row * stride, d_v + offset + row * stride,
                    N - row, stride, D,
                )  # fmt: skip
                _store_partial_sums(p_dm + part * (ROWS * MB), sums[part][0], MB)
            if PER_HEAD:
                parts = d_mixing + ((head[0] * PASSES + turn).to(gl.int64) * H + head[1]) * (MB * MB)
                _sum_mixing_gradient(parts, p_dm, d_scores, e_parts, turn * PARTS)
        head, next_head = next_head, later(next_head, step, H)
    if not PER_HEAD:
        for turn in range(PASSES):
            parts = d_mixing + (first * PASSES + turn) * (MB * MB)
            _sum_mixing_gradient(parts, p_mixing_sums + turn * (KEYS * MB), d_scores, e_parts, turn * PARTS)
