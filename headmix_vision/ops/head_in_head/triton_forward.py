"""Forward kernels: the triangular system of every chunk, then the state from chunk to chunk. Derivation: README.md.

B batch, N tokens, H heads, C chunks of T tokens, Dk and Dv head dims, r sub-heads. Constants: D and DV the head dims,
KEYS and VALUES the columns of a tile of them, ALIGN see ``mhla.triton_tiles``.
"""

import triton
import triton.language as tl

from headmix_vision.ops.head_in_head.triton_tiles import (
    LEAST_LOG_DECAY,
    load_mask,
    load_matrix,
    load_tokens,
    own_columns,
    store_matrix,
    store_tokens,
    to_rows,
    token_index,
    unit_lower_inverse,
    vector_to_rows,
)


@triton.jit
def prepare_kernel(
    k, beta, log_decay, mask, order, decays, inverse,
    k_b, k_n, k_h, beta_b, beta_n, beta_h, decay_b, decay_n, decay_h, mask_b, mask_n, mask_h, N, H, C,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, ORDERED: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Log decays since the start of a chunk, [B, H, C, T], and (I + A)^-1 of its pairs (t, i), [B, H, C, r T, r T]."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program % C, program // C
    b, h = head // H, head % H
    ROWS: tl.constexpr = T * SUB_HEADS
    tokens, exists = token_index(order, chunk, N, T, ORDERED)
    key = load_tokens(k + (b * k_b + h * k_h) * ALIGN, tokens, exists, k_n, 0, D, KEYS, ALIGN)
    strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
    rate = tl.load(log_decay + b * decay_b + tokens * decay_n + h * decay_h, mask=exists, other=0.0).to(tl.float32)
    sums = tl.cumsum(tl.maximum(rate, LEAST_LOG_DECAY), 0)
    tl.store(decays + program * T + tl.arange(0, T), sums)

    rows = to_rows(key.to(tl.float32), SUB_HEADS)
    masked = rows * load_mask(mask + b * mask_b + h * mask_h, tokens, mask_n, KEYS, D, SUB_HEADS)
    own = tl.where(own_columns(ROWS, KEYS, D, SUB_HEADS), rows, 0.0)
    a = tl.dot(masked.to(COMPUTE), tl.trans(own.to(COMPUTE)), input_precision=PRECISION)
    time, sums = tl.arange(0, ROWS) // SUB_HEADS, vector_to_rows(sums, SUB_HEADS)
    before = time[None, :] < time[:, None]
    decay = tl.exp(tl.where(before, sums[:, None] - sums[None, :], -float("inf")))
    a *= decay * vector_to_rows(strength, SUB_HEADS)[:, None]
    store_matrix(
        inverse + program * ROWS * ROWS, 0, unit_lower_inverse(a, SUB_HEADS, PRECISION), ROWS, ROWS, ROWS, ROWS
    )


@triton.jit
def scan_kernel(
    q, k, v, beta, mask, initial, order, decays, inverse, out, final, states, corrections,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, beta_b, beta_n, beta_h, mask_b, mask_n, mask_h, N, H, C, scale,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr,
    VALUES: tl.constexpr, ORDERED: tl.constexpr, TOKEN_MASK: tl.constexpr, INITIAL: tl.constexpr, SAVE: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Outputs and the final state of one head and some value columns, chunk after chunk.

    To save are the state before each chunk, [B, H, C, Dk, Dv], and the corrections u, [B, H, C, r T, Dv].
    """
    PARTS: tl.constexpr = (DV + VALUES - 1) // VALUES
    program = tl.program_id(0).to(tl.int64)
    head, first = program // PARTS, program % PARTS * VALUES
    b, h = head // H, head % H
    ROWS: tl.constexpr = T * SUB_HEADS
    q += (b * q_b + h * q_h) * ALIGN
    k += (b * k_b + h * k_h) * ALIGN
    v += (b * v_b + h * v_h) * ALIGN
    mask += b * mask_b + h * mask_h
    out += b * N * H * DV + h * DV
    place, time = tl.arange(0, T), tl.arange(0, ROWS) // SUB_HEADS
    seen = time[None, :] <= place[:, None]
    own = own_columns(ROWS, KEYS, D, SUB_HEADS)
    if INITIAL:
        state = load_matrix(initial + head * D * DV, first, KEYS, D, DV, VALUES).to(tl.float32)
    else:
        state = tl.zeros((KEYS, VALUES), tl.float32)
    if not TOKEN_MASK:
        entries = load_mask(mask, place, 0, KEYS, D, SUB_HEADS)
    for chunk in range(C):
        at = head * C + chunk
        tokens, exists = token_index(order, chunk, N, T, ORDERED)
        key = load_tokens(k, tokens, exists, k_n, 0, D, KEYS, ALIGN)
        query = load_tokens(q, tokens, exists, q_n, 0, D, KEYS, ALIGN)
        value = load_tokens(v, tokens, exists, v_n, first, DV, VALUES, ALIGN)
        solve = load_matrix(inverse + at * ROWS * ROWS, 0, ROWS, ROWS, ROWS, ROWS)
        sums = tl.load(decays + at * T + place)
        total = tl.load(decays + at * T + T - 1)
        strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
        strength, row_sums = vector_to_rows(strength, SUB_HEADS), vector_to_rows(sums, SUB_HEADS)
        rows = to_rows(key, SUB_HEADS)
        if TOKEN_MASK:
            entries = load_mask(mask, tokens, mask_n, KEYS, D, SUB_HEADS)
        masked = (rows * entries).to(COMPUTE)
        write = tl.where(own, rows, 0.0)
        before = state.to(COMPUTE)
        if SAVE:
            store_matrix(states + at * D * DV, first, before, KEYS, D, DV, VALUES)

        read = tl.dot(masked, before, input_precision=PRECISION)
        error = strength[:, None] * (to_rows(value, SUB_HEADS).to(tl.float32) - tl.exp(row_sums)[:, None] * read)
        correction = tl.dot(solve, error.to(COMPUTE), input_precision=PRECISION).to(COMPUTE)
        if SAVE:
            store_matrix(corrections + at * ROWS * DV, first, correction, ROWS, ROWS, DV, VALUES)
        query = query.to(COMPUTE)
        scores = tl.dot(query, tl.trans(write.to(COMPUTE)), input_precision=PRECISION)
        scores *= tl.exp(tl.where(seen, sums[:, None] - row_sums[None, :], -float("inf")))
        result = tl.exp(sums)[:, None] * tl.dot(query, before, input_precision=PRECISION)
        result += tl.dot(scores.to(COMPUTE), correction, input_precision=PRECISION)
        store_tokens(out, tokens, exists, H * DV, first, scale * result, DV, VALUES)

        write = (write * tl.exp(total - row_sums)[:, None]).to(COMPUTE)
        state = tl.exp(total) * state + tl.dot(tl.trans(write), correction, input_precision=PRECISION)
    store_matrix(final + head * D * DV, first, state, KEYS, D, DV, VALUES)
