"""Loads, computes and stores the tiles of a chunk inside the Triton kernels.

A chunk of T tokens has r T rows (t, i), one for each token and sub-head, tokens first. They hold three kinds
of keys: the key of the token; the masked key m_ti, with which sub-head i reads the memory; and the write key, with
which it writes: the token's key in the columns of sub-head i, zero in all others.
"""

import triton
import triton.language as tl

# A decay below exp(-50) forgets everything: kernels count it and leave it out of the sums, which would lose digits.
LEAST_LOG_DECAY: tl.constexpr = tl.constexpr(-50.0)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def place_of(chunk, START):
    """Return the place in the sequence of a chunk of a block whose first chunk is START; None is a block of all."""
    if START is None:
        return chunk
    else:
        return chunk + START


@triton.jit
def segment_of(index, C, START, SEGMENTS, LENGTH: tl.constexpr):
    """Return the segment of a block of C chunks that comes at an index, LENGTH chunks long, by its place.

    Returns:
        The segment's place in [B, H, C / LENGTH] and in [B, H, SEGMENTS], its head, its first chunk and the one after.
    """
    count = C // LENGTH
    head, own = index // count, index % count
    return index, head * SEGMENTS + START // LENGTH + own, head, own * LENGTH, own * LENGTH + LENGTH


@triton.jit
def token_index(order, chunk, N, T: tl.constexpr, ORDERED: tl.constexpr):
    """Return the tokens of a chunk, int64 [T], and which of them exist; absent ones are named as one that exists."""
    place = chunk * T + tl.arange(0, T)
    exists = place < N
    if ORDERED:
        return tl.load(order + place, mask=exists, other=0), exists
    else:
        return tl.where(exists, place, 0).to(tl.int64), exists


@triton.jit
def load_tokens(base, tokens, exists, stride, first, D: tl.constexpr, SIZE: tl.constexpr, ALIGN: tl.constexpr):
    """Load columns first .. first + SIZE of token rows, zero beyond D and in absent tokens: [T, SIZE]."""
    columns = first + tl.arange(0, SIZE)
    pointers = base + (tokens * stride * ALIGN)[:, None] + columns[None, :]
    if D % SIZE == 0:
        return tl.load(pointers, mask=exists[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=exists[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def store_tokens(base, tokens, exists, stride, first, x, D: tl.constexpr, SIZE: tl.constexpr):
    columns = first + tl.arange(0, SIZE)
    pointers = base + (tokens * stride)[:, None] + columns[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=exists[:, None] & (columns < D)[None, :])


@triton.jit
def dot_over_tokens(x, y, precision: tl.constexpr):
    """Multiply [M, T] by [T, N]. Products have 16 terms at least: a chunk of 8 tokens is filled up with zeros."""
    if x.shape[1] < 16:
        x = tl.reshape(tl.join(x, tl.zeros_like(x)), (x.shape[0], 2 * x.shape[1]))
        y = tl.permute(tl.join(y, tl.zeros_like(y)), (0, 2, 1))
        y = tl.reshape(y, (2 * y.shape[0], y.shape[2]))
    return tl.dot(x, y, input_precision=precision)


@triton.jit
def _places(first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, stride):
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return rows, columns, rows[:, None] * stride + columns[None, :]


@triton.jit
def load_matrix(base, first, D1: tl.constexpr, D2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows first .. first + ROWS of a contiguous [D1, D2], zero outside: [ROWS, COLUMNS]."""
    rows, columns, places = _places(first, ROWS, COLUMNS, D2)
    if D1 % ROWS == 0 and D2 == COLUMNS:
        return tl.load(base + places)
    else:
        return tl.load(base + places, mask=(rows < D1)[:, None] & (columns < D2)[None, :], other=0.0)


@triton.jit
def store_matrix(base, first, x, D1: tl.constexpr, D2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns, places = _places(first, ROWS, COLUMNS, D2)
    if D1 % ROWS == 0 and D2 == COLUMNS:
        tl.store(base + places, x.to(base.dtype.element_ty))
    else:
        mask = (rows < D1)[:, None] & (columns < D2)[None, :]
        tl.store(base + places, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def to_rows(x, SUB_HEADS: tl.constexpr):
    """Repeat each token r times: [T, D] -> [r T, D]."""
    if SUB_HEADS == 1:
        return x
    else:
        T: tl.constexpr = x.shape[0]
        D: tl.constexpr = x.shape[1]
        return tl.reshape(tl.broadcast_to(x[:, None, :], (T, SUB_HEADS, D)), (T * SUB_HEADS, D))


@triton.jit
def vector_to_rows(x, SUB_HEADS: tl.constexpr):
    """Repeat each number r times: [T] -> [r T]."""
    if SUB_HEADS == 1:
        return x
    else:
        T: tl.constexpr = x.shape[0]
        return tl.reshape(tl.broadcast_to(x[:, None], (T, SUB_HEADS)), (T * SUB_HEADS,))


@triton.jit
def sum_rows(x, SUB_HEADS: tl.constexpr):
    """Sum over the sub-heads of each token: [r T, D] -> [T, D]."""
    if SUB_HEADS == 1:
        return x
    else:
        T: tl.constexpr = x.shape[0] // SUB_HEADS
        return tl.sum(tl.reshape(x, (T, SUB_HEADS, x.shape[1])), axis=1)


@triton.jit
def sum_vector_rows(x, SUB_HEADS: tl.constexpr):
    """Sum over the sub-heads of each token: [r T] -> [T]."""
    if SUB_HEADS == 1:
        return x
    else:
        T: tl.constexpr = x.shape[0] // SUB_HEADS
        return tl.sum(tl.reshape(x, (T, SUB_HEADS)), axis=1)


@triton.jit
def sub_head_of(SIZE: tl.constexpr, D: tl.constexpr, SUB_HEADS: tl.constexpr):
    """Return the sub-head of each key column, [SIZE]."""
    return tl.minimum(tl.arange(0, SIZE) // (D // SUB_HEADS), SUB_HEADS - 1)


@triton.jit
def _mask_rows(base, tokens, stride, SUB_HEADS: tl.constexpr):
    """Return pointers to the mask row of each row (t, i), [R, 1]. A static mask has stride 0, whatever the tokens."""
    row = tl.arange(0, tokens.shape[0] * SUB_HEADS) % SUB_HEADS
    return base + (vector_to_rows(tokens, SUB_HEADS) * stride + row * SUB_HEADS)[:, None]


@triton.jit
def load_entries(base, tokens, stride, SUB_HEADS: tl.constexpr):
    """Load the mask entries of all rows, M_t[i, :]: [R, r] float32."""
    pointers = _mask_rows(base, tokens, stride, SUB_HEADS)
    return tl.load(pointers + tl.arange(0, SUB_HEADS)[None, :]).to(tl.float32)


@triton.jit
def load_mask(base, tokens, stride, SIZE: tl.constexpr, D: tl.constexpr, SUB_HEADS: tl.constexpr):
    """Load for each row the entry of each key column's sub-head: [R, SIZE], or [T, 1] for one sub-head."""
    pointers = _mask_rows(base, tokens, stride, SUB_HEADS)
    if SUB_HEADS == 1:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers + sub_head_of(SIZE, D, SUB_HEADS)[None, :]).to(tl.float32)


@triton.jit
def to_columns(entries, D: tl.constexpr, SIZE: tl.constexpr, SUB_HEADS: tl.constexpr):
    """Repeat each entry in all columns of its sub-head: [R, r] -> [R, SIZE]."""
    rows: tl.constexpr = entries.shape[0]
    if SUB_HEADS == 1:
        return entries
    elif D == SIZE:
        wide = tl.broadcast_to(entries[:, :, None], (rows, SUB_HEADS, SIZE // SUB_HEADS))
        return tl.reshape(wide, (rows, SIZE))
    else:
        column, other = sub_head_of(SIZE, D, SUB_HEADS), tl.arange(0, SUB_HEADS)
        wide = tl.zeros((rows, SIZE), tl.float32)
        for i in tl.static_range(SUB_HEADS):
            entry = tl.sum(tl.where(other[None, :] == i, entries, 0.0), 1)
            wide = tl.where(column[None, :] == i, entry[:, None], wide)
        return wide


@triton.jit
def sum_sub_heads(x, D: tl.constexpr, SUB_HEADS: tl.constexpr):
    """Sum over the columns of each sub-head: [R, SIZE] -> [R, r]."""
    rows: tl.constexpr = x.shape[0]
    if x.shape[1] == D:
        return tl.sum(tl.reshape(x, (rows, SUB_HEADS, D // SUB_HEADS)), axis=2)
    else:
        column, other = sub_head_of(x.shape[1], D, SUB_HEADS), tl.arange(0, SUB_HEADS)
        sums = tl.zeros((rows, SUB_HEADS), tl.float32)
        for i in tl.static_range(SUB_HEADS):
            own = tl.sum(tl.where(column[None, :] == i, x, 0.0), 1)
            sums = tl.where(other[None, :] == i, own[:, None], sums)
        return sums


@triton.jit
def own_columns(rows, D: tl.constexpr, SUB_HEADS: tl.constexpr):
    """Set the columns of other sub-heads than the row's to zero: [r T, SIZE]."""
    if SUB_HEADS == 1:
        return rows
    else:
        own = (tl.arange(0, rows.shape[0]) % SUB_HEADS)[:, None] == sub_head_of(rows.shape[1], D, SUB_HEADS)[None, :]
        return tl.where(own, rows, tl.zeros_like(rows))


@triton.jit
def write_keys(key, D: tl.constexpr, SUB_HEADS: tl.constexpr):
    """Build the keys of single sub-heads: [T, SIZE] -> [r T, SIZE], zero in the columns of other sub-heads."""
    return own_columns(to_rows(key, SUB_HEADS), D, SUB_HEADS)


@triton.jit
def masked_keys(key, entries, SUB_HEADS: tl.constexpr):
    """Build the keys by which sub-heads read the memory, [T, SIZE] -> [r T, SIZE]; one sub-head's are not masked.

    Its only entry is a factor of the whole row, which `masked_factor` applies.
    """
    if SUB_HEADS == 1:
        return key
    else:
        return (to_rows(key, SUB_HEADS) * entries).to(key.dtype)


@triton.jit
def masked_factor(factor, entries, SUB_HEADS: tl.constexpr):
    """Multiply the factors of the rows, [r T], by the entry that `masked_keys` leaves out."""
    if SUB_HEADS == 1:
        return factor * tl.sum(entries, 1)
    else:
        return factor


@triton.jit
def load_decays(decays, at, T: tl.constexpr):
    """Load sums of log decays since a chunk's start, how many forgot everything, [T] each, and both at its end."""
    place = decays + at * 2 * T + tl.arange(0, T)
    end = decays + at * 2 * T + T - 1
    return tl.load(place), tl.load(place + T), tl.load(end), tl.load(end + T)


@triton.jit
def decay_if(log_decay, kept):
    """Compute exp(log_decay) where something is kept, else 0, in float32.

    For float64 it is exact to all digits of float32: ``tl.exp`` rounds the exponent of 2^x, which costs digits.
    """
    if log_decay.dtype == tl.float64:
        exponent = tl.where(kept, log_decay, 0.0) * LOG2_E
        rounded = exponent.to(tl.float32)
        rest = (exponent - rounded.to(tl.float64)).to(tl.float32)
        return tl.where(kept, tl.exp2(rounded) * (1.0 + rest * LN_2), 0.0)
    else:
        return tl.exp(tl.where(kept, log_decay, -float("inf")))


@triton.jit
def decay_between(later, later_resets, earlier, earlier_resets, is_later):
    """Compute the decay from an earlier token [None, :] to a later one [:, None], 0 where not ``is_later``."""
    kept = is_later & (later_resets[:, None] == earlier_resets[None, :])
    return decay_if(later[:, None] - earlier[None, :], kept)


@triton.jit
def _merge_pairs(x, a, precision: tl.constexpr):
    """Merge the inverses of the 2 n diagonal blocks of I + a of size s to the inverses of the n blocks of size 2 s.

    [[P, 0], [C, Q]]^-1 = [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]]

    Args:
        x: [2 n, s, s] float32.
        a: [2 n s, 2 n s] float32, which holds the blocks C.
    """
    n: tl.constexpr = x.shape[0] // 2
    s: tl.constexpr = x.shape[1]
    half, pair = tl.arange(0, 2), tl.arange(0, n)
    pairs = tl.reshape(x, (n, 2, s, s))
    p = tl.sum(tl.where(half[None, :, None, None] == 0, pairs, 0.0), axis=1)
    q = tl.sum(tl.where(half[None, :, None, None] == 1, pairs, 0.0), axis=1)
    c = tl.reshape(a, (n, 2 * s, n, 2 * s))
    c = tl.sum(tl.where(pair[:, None, None, None] == pair[None, None, :, None], c, 0.0), axis=2)
    row, column = half[None, :, None, None, None], half[None, None, None, :, None]
    c = tl.where((row == 1) & (column == 0), tl.reshape(c, (n, 2, s, 2, s)), 0.0)
    c = tl.sum(tl.sum(c, axis=3), axis=1)
    if n == 1:
        p, q, c = tl.reshape(p, (s, s)), tl.reshape(q, (s, s)), tl.reshape(c, (s, s))
        lower = tl.dot(tl.dot(q, c, input_precision=precision), p, input_precision=precision)
    else:
        lower = tl.dot(tl.dot(q, c, input_precision=precision), p, input_precision=precision)
    lower, diagonal = tl.reshape(lower, (n, 1, s, 1, s)), tl.reshape(x, (n, 2, s, 1, s))
    merged = tl.where((row == 1) & (column == 0), -lower, tl.where(row == column, diagonal, 0.0))
    return tl.reshape(merged, (n, 2 * s, 2 * s))


@triton.jit
def _merge_inside(x, a, s: tl.constexpr, precision: tl.constexpr):
    """Merge pairs of blocks of size s, as `_merge_pairs` does, inside each of the n matrices [n, 16, 16]."""
    row = tl.arange(0, 16)
    r, c = row[None, :, None], row[None, None, :]
    corner = tl.where((r // (2 * s) == c // (2 * s)) & (r // s != c // s), a, 0.0)
    return x - tl.dot(tl.dot(x, corner, input_precision=precision), x, input_precision=precision)


@triton.jit
def unit_lower_inverse(a, SUB_HEADS: tl.constexpr, precision: tl.constexpr):
    """Compute (I + a)^-1; a [n, n] float32 is zero on and above its diagonal blocks of r x r, n a power of two from 32.

    It inverts blocks of 16 first, then merges them two by two: powers of a would cancel, which costs all digits.
    """
    n: tl.constexpr = a.shape[0]
    blocks: tl.constexpr = n // 16
    block, row = tl.arange(0, blocks), tl.arange(0, 16)
    d = tl.reshape(a, (blocks, 16, blocks, 16))
    d = tl.sum(tl.where(block[:, None, None, None] == block[None, None, :, None], d, 0.0), axis=2)
    r, c = row[None, :, None], row[None, None, :]
    x = tl.where(r == c, 1.0, 0.0) - tl.where(r // (2 * SUB_HEADS) == c // (2 * SUB_HEADS), d, 0.0)
    for level in tl.static_range(3):
        if (2 << level) >= 2 * SUB_HEADS:
            x = _merge_inside(x, d, 2 << level, precision)
    for level in tl.static_range(3):
        if (16 << level) < n:
            x = _merge_pairs(x, a, precision)
    return tl.reshape(x, (n, n))
