"""Runs the forward pass: each chunk without the state, then the state from chunk to chunk. README.md derives it.

B batch, N tokens, H heads, C chunks of T tokens, Dk and Dv head dims, r sub-heads, R = r T rows of a chunk. The
kernels keep and multiply states and corrections transposed, values first: then the left factor of each product is the
one that depends on the state, and stays in registers. Constants: D and DV are the head dims, KEYS and VALUES the
columns of a tile of them; for ALIGN see ``mhla.triton_tiles``.
"""

import triton
import triton.language as tl

from headmix_vision.ops.head_in_head.triton_tiles import (
    LEAST_LOG_DECAY,
    decay_between,
    decay_if,
    dot_over_tokens,
    load_decays,
    load_mask,
    load_matrix,
    load_tokens,
    masked_factor,
    masked_keys,
    store_matrix,
    store_tokens,
    token_index,
    unit_lower_inverse,
    vector_to_rows,
    write_keys,
)


@triton.jit
def prepare_kernel(
    q, k, beta, log_decay, mask, order, decays, scores, inverse, spread,
    q_b, q_n, q_h, k_b, k_n, k_h, beta_b, beta_n, beta_h, decay_b, decay_n, decay_h, mask_b, mask_n, mask_h,
    N, H, C, scale,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, ORDERED: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute all that a chunk needs and that does not depend on the state.

    It stores log decays since the start of the chunk and how many decays forgot everything, [B, H, C, 2, T]; decayed
    scores of queries and write keys, [B, H, C, T, R]; the inverse of the system of its pairs, [B, H, C, R, R]; and that
    inverse times beta, summed over sub-heads, which share a token's value: [B, H, C, R, T].
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program % C, program // C
    b, h = head // H, head % H
    ROWS: tl.constexpr = T * SUB_HEADS
    tokens, exists = token_index(order, chunk, N, T, ORDERED)
    key = load_tokens(k + (b * k_b + h * k_h) * ALIGN, tokens, exists, k_n, 0, D, KEYS, ALIGN).to(COMPUTE)
    query = load_tokens(q + (b * q_b + h * q_h) * ALIGN, tokens, exists, q_n, 0, D, KEYS, ALIGN).to(COMPUTE)
    strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
    rate = tl.load(log_decay + b * decay_b + tokens * decay_n + h * decay_h, mask=exists, other=0.0).to(tl.float32)
    place, time = tl.arange(0, T), tl.arange(0, ROWS) // SUB_HEADS
    sums = tl.cumsum(tl.where(rate < LEAST_LOG_DECAY, 0.0, rate).to(decays.dtype.element_ty), 0)
    resets = tl.cumsum(tl.where(rate < LEAST_LOG_DECAY, 1.0, 0.0).to(decays.dtype.element_ty), 0)
    tl.store(decays + program * 2 * T + place, sums)
    tl.store(decays + program * 2 * T + T + place, resets)
    row_sums, row_resets = vector_to_rows(sums, SUB_HEADS), vector_to_rows(resets, SUB_HEADS)
    write = tl.trans(write_keys(key, D, SUB_HEADS))
    score = tl.dot(query, write, input_precision=PRECISION)
    seen = time[None, :] <= place[:, None]
    score *= scale * decay_between(sums, resets, row_sums, row_resets, seen)
    store_matrix(scores + program * T * ROWS, 0, score, T, ROWS, T, ROWS)

    entries = load_mask(mask + b * mask_b + h * mask_h, tokens, mask_n, KEYS, D, SUB_HEADS)
    a = tl.dot(masked_keys(key, entries, SUB_HEADS), write, input_precision=PRECISION)
    factor = masked_factor(vector_to_rows(strength, SUB_HEADS), entries, SUB_HEADS)
    before = time[None, :] < time[:, None]
    a *= decay_between(row_sums, row_resets, row_sums, row_resets, before)
    a *= factor[:, None]
    solve = unit_lower_inverse(a, SUB_HEADS, PRECISION)
    store_matrix(inverse + program * ROWS * ROWS, 0, solve, ROWS, ROWS, ROWS, ROWS)
    if SUB_HEADS > 1:
        solve = tl.sum(tl.reshape(solve, (ROWS, T, SUB_HEADS)), axis=2)
    store_matrix(spread + program * ROWS * T, 0, solve * strength[None, :], ROWS, T, ROWS, T)


@triton.jit
def scan_kernel(
    q, k, v, beta, mask, initial, order, decays, scores, inverse, spread, out, final, states, corrections,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, beta_b, beta_n, beta_h, mask_b, mask_n, mask_h, N, H, C, scale,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr,
    VALUES: tl.constexpr, ORDERED: tl.constexpr, TOKEN_MASK: tl.constexpr, INITIAL: tl.constexpr, SAVE: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and the final state of one head and some value columns, chunk after chunk.

    With SAVE it stores the state before each chunk, [B, H, C, Dv, Dk], and the corrections u, [B, H, C, Dv, R].
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
    place = tl.arange(0, T)
    values, keys = first + tl.arange(0, VALUES), tl.arange(0, KEYS)
    of_state, in_state = keys[None, :] * DV + values[:, None], (keys < D)[None, :] & (values < DV)[:, None]
    if INITIAL:
        state = tl.load(initial + head * D * DV + of_state, mask=in_state, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((VALUES, KEYS), tl.float32)
    if not TOKEN_MASK:
        entries = load_mask(mask, place, 0, KEYS, D, SUB_HEADS)
    for chunk in range(C):
        at = head * C + chunk
        tokens, exists = token_index(order, chunk, N, T, ORDERED)
        key = load_tokens(k, tokens, exists, k_n, 0, D, KEYS, ALIGN).to(COMPUTE)
        query = load_tokens(q, tokens, exists, q_n, 0, D, KEYS, ALIGN).to(COMPUTE)
        value = load_tokens(v, tokens, exists, v_n, first, DV, VALUES, ALIGN).to(COMPUTE)
        solve = load_matrix(inverse + at * ROWS * ROWS, 0, ROWS, ROWS, ROWS, ROWS)
        of_value = load_matrix(spread + at * ROWS * T, 0, ROWS, T, ROWS, T)
        score = load_matrix(scores + at * T * ROWS, 0, T, ROWS, T, ROWS)
        sums, resets, total, all_resets = load_decays(decays, at, T)
        strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
        from_start = decay_if(sums, resets == 0)
        to_end = vector_to_rows(decay_if(total - sums, resets == all_resets), SUB_HEADS)
        if TOKEN_MASK:
            entries = load_mask(mask, tokens, mask_n, KEYS, D, SUB_HEADS)
        factor = masked_factor(vector_to_rows(strength * from_start, SUB_HEADS), entries, SUB_HEADS)
        before = state.to(COMPUTE)
        if SAVE:
            store_matrix(states + at * DV * D, first, before, DV, D, VALUES, KEYS)

        read = tl.dot(before, tl.trans(masked_keys(key, entries, SUB_HEADS)), input_precision=PRECISION)
        error = (read * -factor[None, :]).to(COMPUTE)
        correction = dot_over_tokens(tl.trans(value), tl.trans(of_value), PRECISION)
        correction += tl.dot(error, tl.trans(solve), input_precision=PRECISION)
        if SAVE:
            store_matrix(corrections + at * DV * ROWS, first, correction, DV, ROWS, VALUES, ROWS)
        result = tl.dot(before, tl.trans(query), input_precision=PRECISION) * (scale * from_start)[None, :]
        result += tl.dot(correction.to(COMPUTE), tl.trans(score), input_precision=PRECISION)
        store_tokens(out, tokens, exists, H * DV, first, tl.trans(result), DV, VALUES)

        correction = (correction * to_end[None, :]).to(COMPUTE)
        state *= decay_if(total, all_resets == 0)
        state += tl.dot(correction, write_keys(key, D, SUB_HEADS), input_precision=PRECISION)
    tl.store(final + head * D * DV + of_state, state, mask=in_state)
