"""Compute Head-in-Head in Triton kernels: each chunk without the state, then the state from chunk to chunk.

README.md derives the kernels; `triton_launch.py` launches them.

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
    load_entries,
    load_mask,
    load_matrix,
    load_tokens,
    masked_factor,
    masked_keys,
    own_columns,
    place_of,
    segment_of,
    store_matrix,
    store_tokens,
    sum_rows,
    sum_sub_heads,
    sum_vector_rows,
    to_columns,
    to_rows,
    token_index,
    unit_lower_inverse,
    vector_to_rows,
    write_keys,
)


@triton.jit
def prepare_kernel(
    q, k, beta, log_decay, mask, order, decays, scores, inverse, spread, reads,
    q_b, q_n, q_h, k_b, k_n, k_h, beta_b, beta_n, beta_h, decay_b, decay_n, decay_h, mask_b, mask_n, mask_h,
    N, H, C, scale, START,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, ORDERED: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute all that a chunk needs and that does not depend on the state.

    It stores log decays since the start of the chunk and how many decays forgot everything, [B, H, C, 2, T]; decayed
    scores of queries and write keys, [B, H, C, T, R]; the inverse of the system of its pairs, [B, H, C, R, R]; and that
    inverse times beta, summed over sub-heads, which share a token's value: [B, H, C, R, T]. For segments it stores the
    inverse times the masked keys, the factor of the state in the corrections, too: [B, H, C, R, Dk].
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program % C, program // C
    b, h = head // H, head % H
    ROWS: tl.constexpr = T * SUB_HEADS
    tokens, exists = token_index(order, place_of(chunk, START), N, T, ORDERED)
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
    if inverse is not None:
        store_matrix(inverse + program * ROWS * ROWS, 0, solve, ROWS, ROWS, ROWS, ROWS)
    of_value = solve
    if SUB_HEADS > 1:
        of_value = tl.sum(tl.reshape(solve, (ROWS, T, SUB_HEADS)), axis=2)
    store_matrix(spread + program * ROWS * T, 0, of_value * strength[None, :], ROWS, T, ROWS, T)
    if reads is not None:
        factor = vector_to_rows(strength * decay_if(sums, resets == 0), SUB_HEADS)
        factor = masked_factor(factor, entries, SUB_HEADS)
        read = (solve * -factor[None, :]).to(COMPUTE)
        read = tl.dot(read, masked_keys(key, entries, SUB_HEADS), input_precision=PRECISION)
        store_matrix(reads + program * ROWS * D, 0, read, ROWS, D, ROWS, KEYS)


@triton.jit
def scan_kernel(
    q, k, v, beta, mask, initial, order, decays, scores, inverse, spread, reads, out, final, states, corrections,
    transitions,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, beta_b, beta_n, beta_h, mask_b, mask_n, mask_h,
    N, H, C, scale, START, SEGMENTS,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr,
    VALUES: tl.constexpr, ORDERED: tl.constexpr, TOKEN_MASK: tl.constexpr, INITIAL: tl.constexpr, SAVE: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    LENGTH: tl.constexpr, SUMMARY: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and the final state of one head and some value columns, chunk after chunk.

    With SAVE it stores the state before each chunk, [B, H, C, Dv, Dk], and the corrections u, [B, H, C, Dv, R]. With
    LENGTH it does so for one segment of that many chunks, from the initial state of the segment, [B, H, S, Dv, Dk].
    With SUMMARY it computes what a segment does to a state instead: it begins with zeros, and with the identity in Dk
    more columns. It stores what the segment adds, [B, H, C / LENGTH, Dv, Dk], and its transition, [B, H, S, Dk, Dk].
    """
    WIDTH: tl.constexpr = DV + D if SUMMARY else DV
    PARTS: tl.constexpr = (WIDTH + VALUES - 1) // VALUES
    program = tl.program_id(0).to(tl.int64)
    head, first = program // PARTS, program % PARTS * VALUES
    begin, end = 0, C
    if LENGTH:
        here, segment, head, begin, end = segment_of(head, C, START, SEGMENTS, LENGTH)
    b, h = head // H, head % H
    ROWS: tl.constexpr = T * SUB_HEADS
    q += (b * q_b + h * q_h) * ALIGN
    k += (b * k_b + h * k_h) * ALIGN
    v += (b * v_b + h * v_h) * ALIGN
    mask += b * mask_b + h * mask_h
    if out is not None:
        out += b * N * H * DV + h * DV
    place = tl.arange(0, T)
    values, keys = first + tl.arange(0, VALUES), tl.arange(0, KEYS)
    of_final, in_state = keys[None, :] * DV + values[:, None], (keys < D)[None, :] & (values < DV)[:, None]
    if SUMMARY:
        state = tl.where(values[:, None] == DV + keys[None, :], 1.0, 0.0)
    elif LENGTH:
        state = load_matrix(initial + segment * DV * D, first, DV, D, VALUES, KEYS).to(tl.float32)
    elif INITIAL:
        state = tl.load(initial + head * D * DV + of_final, mask=in_state, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((VALUES, KEYS), tl.float32)
    if not TOKEN_MASK and not LENGTH:
        entries = load_mask(mask, place, 0, KEYS, D, SUB_HEADS)
    for chunk in range(begin, end):
        at = head * C + chunk
        tokens, exists = token_index(order, place_of(chunk, START), N, T, ORDERED)
        key = load_tokens(k, tokens, exists, k_n, 0, D, KEYS, ALIGN).to(COMPUTE)
        if out is not None:
            query = load_tokens(q, tokens, exists, q_n, 0, D, KEYS, ALIGN).to(COMPUTE)
        has_value = exists & (first < DV) if SUMMARY else exists
        value = load_tokens(v, tokens, has_value, v_n, first, DV, VALUES, ALIGN).to(COMPUTE)
        if LENGTH:
            of_state = load_matrix(reads + at * ROWS * D, 0, ROWS, D, ROWS, KEYS)
        else:
            solve = load_matrix(inverse + at * ROWS * ROWS, 0, ROWS, ROWS, ROWS, ROWS)
        of_value = load_matrix(spread + at * ROWS * T, 0, ROWS, T, ROWS, T)
        if out is not None:
            score = load_matrix(scores + at * T * ROWS, 0, T, ROWS, T, ROWS)
        sums, resets, total, all_resets = load_decays(decays, at, T)
        if not LENGTH:
            strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
        from_start = decay_if(sums, resets == 0)
        to_end = vector_to_rows(decay_if(total - sums, resets == all_resets), SUB_HEADS)
        if TOKEN_MASK and not LENGTH:
            entries = load_mask(mask, tokens, mask_n, KEYS, D, SUB_HEADS)
        if not LENGTH:
            factor = masked_factor(vector_to_rows(strength * from_start, SUB_HEADS), entries, SUB_HEADS)
        before = state.to(COMPUTE)
        if SAVE:
            store_matrix(states + at * DV * D, first, before, DV, D, VALUES, KEYS)

        if LENGTH:
            correction = dot_over_tokens(tl.trans(value), tl.trans(of_value), PRECISION)
            correction += tl.dot(before, tl.trans(of_state), input_precision=PRECISION)
        else:
            read = tl.dot(before, tl.trans(masked_keys(key, entries, SUB_HEADS)), input_precision=PRECISION)
            error = (read * -factor[None, :]).to(COMPUTE)
            correction = dot_over_tokens(tl.trans(value), tl.trans(of_value), PRECISION)
            correction += tl.dot(error, tl.trans(solve), input_precision=PRECISION)
        if SAVE:
            store_matrix(corrections + at * DV * ROWS, first, correction, DV, ROWS, VALUES, ROWS)
        if out is not None:
            result = tl.dot(before, tl.trans(query), input_precision=PRECISION) * (scale * from_start)[None, :]
            result += tl.dot(correction.to(COMPUTE), tl.trans(score), input_precision=PRECISION)
            store_tokens(out, tokens, exists, H * DV, first, tl.trans(result), DV, VALUES)

        correction = (correction * to_end[None, :]).to(COMPUTE)
        state *= decay_if(total, all_resets == 0)
        state += tl.dot(correction, write_keys(key, D, SUB_HEADS), input_precision=PRECISION)
    if SUMMARY:
        rows = values[:, None] * D + keys[None, :]
        has_key = (keys < D)[None, :]
        tl.store(final + here * DV * D + rows, state, mask=has_key & (values < DV)[:, None])
        is_transition = has_key & ((values >= DV) & (values < WIDTH))[:, None]
        moved = transitions + segment * D * D + rows - DV * D
        tl.store(moved, state.to(transitions.dtype.element_ty), mask=is_transition)
    elif not LENGTH:
        tl.store(final + head * D * DV + of_final, state, mask=in_state)


@triton.jit
def scan_backward_kernel(
    q, k, beta, mask, d_out, d_final, order, decays, scores, inverse, reads, d_states, d_errors, d_initial,
    q_b, q_n, q_h, k_b, k_n, k_h, beta_b, beta_n, beta_h, mask_b, mask_n, mask_h, g_b, g_n, g_h,
    N, H, C, scale, START,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr,
    VALUES: tl.constexpr, ORDERED: tl.constexpr, TOKEN_MASK: tl.constexpr, FINAL: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Compute gradients of one head and some value columns, from the last chunk to the first.

    They are those of the state after each chunk, [B, H, C, Dv, Dk], of the errors which the system is solved for,
    [B, H, C, Dv, R], and of the initial state. With LENGTH it does so for one segment of that many chunks, whose final
    state has the gradient `d_final`, [B, H, C / LENGTH, Dv, Dk]. Without `d_states` it stores what the segment adds to
    the gradient of its initial state, in the same shape, and nothing else.
    """
    PARTS: tl.constexpr = (DV + VALUES - 1) // VALUES
    program = tl.program_id(0).to(tl.int64)
    head, first = program // PARTS, program % PARTS * VALUES
    begin, end = 0, C
    if LENGTH:
        here, _, head, begin, end = segment_of(head, C, START, 0, LENGTH)
    b, h = head // H, head % H
    ROWS: tl.constexpr = T * SUB_HEADS
    q += (b * q_b + h * q_h) * ALIGN
    k += (b * k_b + h * k_h) * ALIGN
    d_out += (b * g_b + h * g_h) * ALIGN
    mask += b * mask_b + h * mask_h
    place = tl.arange(0, T)
    values, keys = first + tl.arange(0, VALUES), tl.arange(0, KEYS)
    of_state, in_state = keys[None, :] * DV + values[:, None], (keys < D)[None, :] & (values < DV)[:, None]
    if LENGTH and FINAL:
        d_state = load_matrix(d_final + here * DV * D, first, DV, D, VALUES, KEYS)
    elif FINAL:
        d_state = tl.load(d_final + head * D * DV + of_state, mask=in_state, other=0.0).to(tl.float32)
    else:
        d_state = tl.zeros((VALUES, KEYS), tl.float32)
    if not TOKEN_MASK and not LENGTH:
        entries = load_mask(mask, place, 0, KEYS, D, SUB_HEADS)
    for back in range(end - begin):
        chunk = end - 1 - back
        at = head * C + chunk
        tokens, exists = token_index(order, place_of(chunk, START), N, T, ORDERED)
        key = load_tokens(k, tokens, exists, k_n, 0, D, KEYS, ALIGN).to(COMPUTE)
        query = load_tokens(q, tokens, exists, q_n, 0, D, KEYS, ALIGN)
        gradient = tl.trans(load_tokens(d_out, tokens, exists, g_n, first, DV, VALUES, ALIGN).to(COMPUTE))
        if d_states is not None:
            solve = load_matrix(inverse + at * ROWS * ROWS, 0, ROWS, ROWS, ROWS, ROWS)
        score = load_matrix(scores + at * T * ROWS, 0, T, ROWS, T, ROWS)
        sums, resets, total, all_resets = load_decays(decays, at, T)
        if LENGTH:
            read = load_matrix(reads + at * ROWS * D, 0, ROWS, D, ROWS, KEYS)
        else:
            strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
        from_start = decay_if(sums, resets == 0)
        to_end = vector_to_rows(decay_if(total - sums, resets == all_resets), SUB_HEADS)
        if TOKEN_MASK and not LENGTH:
            entries = load_mask(mask, tokens, mask_n, KEYS, D, SUB_HEADS)
        if not LENGTH:
            factor = masked_factor(vector_to_rows(strength * from_start, SUB_HEADS), entries, SUB_HEADS)
        after = d_state.to(COMPUTE)
        if d_states is not None:
            store_matrix(d_states + at * DV * D, first, after, DV, D, VALUES, KEYS)

        d_correction = tl.dot(after, tl.trans(write_keys(key, D, SUB_HEADS)), input_precision=PRECISION)
        d_correction *= to_end[None, :]
        d_correction += dot_over_tokens(gradient, score, PRECISION)
        if d_states is not None:
            d_error = tl.dot(d_correction.to(COMPUTE), solve, input_precision=PRECISION)
            store_matrix(d_errors + at * DV * ROWS, first, d_error, DV, ROWS, VALUES, ROWS)
        query = (query * (scale * from_start)[:, None]).to(COMPUTE)
        if not LENGTH:
            d_error = (d_error * -factor[None, :]).to(COMPUTE)
        d_state *= decay_if(total, all_resets == 0)
        d_state += dot_over_tokens(gradient, query, PRECISION)
        if LENGTH:
            d_state += tl.dot(d_correction.to(COMPUTE), read, input_precision=PRECISION)
        else:
            d_state += tl.dot(d_error, masked_keys(key, entries, SUB_HEADS), input_precision=PRECISION)
    if not LENGTH:
        tl.store(d_initial + head * D * DV + of_state, d_state, mask=in_state)
    elif d_states is None:
        store_matrix(d_initial + here * DV * D, first, d_state, DV, D, VALUES, KEYS)


@triton.jit
def join_kernel(
    initial, transitions, added, states, final,
    COUNT, START, SEGMENTS,
    D: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr, LENGTH: tl.constexpr,
    INITIAL: tl.constexpr, BACKWARD: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the state before each of COUNT segments, of one head and some value columns, and the state after them.

    `added` [B, H, COUNT, Dv, Dk] is what each segment adds, `states` has the same shape, or [B, H, S, Dv, Dk]. With
    BACKWARD states are gradients, and go from the last segment to the first.
    """
    PARTS: tl.constexpr = (DV + VALUES - 1) // VALUES
    program = tl.program_id(0).to(tl.int64)
    head, first = program // PARTS, program % PARTS * VALUES
    values, keys = first + tl.arange(0, VALUES), tl.arange(0, KEYS)
    of_state, in_state = keys[None, :] * DV + values[:, None], (keys < D)[None, :] & (values < DV)[:, None]
    if INITIAL:
        state = tl.load(initial + head * D * DV + of_state, mask=in_state, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((VALUES, KEYS), tl.float32)
    for i in range(COUNT):
        here = head * COUNT + (COUNT - 1 - i if BACKWARD else i)
        segment = here + head * (SEGMENTS - COUNT) + START // LENGTH
        transition = load_matrix(transitions + segment * D * D, 0, D, D, KEYS, KEYS)
        more = load_matrix(added + here * DV * D, first, DV, D, VALUES, KEYS)
        at = here if BACKWARD else segment
        store_matrix(states + at * DV * D, first, state, DV, D, VALUES, KEYS)
        if BACKWARD:
            transition = tl.trans(transition)
        high = state.to(COMPUTE)
        if COMPUTE == tl.bfloat16:  # two numbers of bf16 hold the state
            more += tl.dot((state - high.to(tl.float32)).to(COMPUTE), transition, input_precision=PRECISION)
        state = more + tl.dot(high, transition, input_precision=PRECISION)
    tl.store(final + head * D * DV + of_state, state, mask=in_state)


@triton.jit
def inputs_backward_kernel(
    q, k, v, beta, log_decay, mask, d_out, order, decays, states, corrections, d_states, d_errors,
    d_q, d_k, d_v, d_beta, d_log_decay, d_mask,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, beta_b, beta_n, beta_h, decay_b, decay_n, decay_h,
    mask_b, mask_n, mask_h, g_b, g_n, g_h, N, H, C, scale, START,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr,
    VALUES: tl.constexpr, ORDERED: tl.constexpr, TOKEN_MASK: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the inputs of one chunk of a head.

    That of the mask is [B, N, H, r, r] for a mask of tokens, else [B, H, C, r, r], still to be summed. The kernel
    finishes one gradient after the other, so that it holds few at a time.
    """
    PARTS: tl.constexpr = (DV + VALUES - 1) // VALUES
    ROWS: tl.constexpr = T * SUB_HEADS
    at = tl.program_id(0).to(tl.int64)
    chunk, head = at % C, at // C
    b, h = head // H, head % H
    q += (b * q_b + h * q_h) * ALIGN
    k += (b * k_b + h * k_h) * ALIGN
    v += (b * v_b + h * v_h) * ALIGN
    d_out += (b * g_b + h * g_h) * ALIGN
    d_q += b * N * H * D + h * D
    d_k += b * N * H * D + h * D
    d_v += b * N * H * DV + h * DV
    mask += b * mask_b + h * mask_h
    place, time = tl.arange(0, T), tl.arange(0, ROWS) // SUB_HEADS
    tokens, exists = token_index(order, place_of(chunk, START), N, T, ORDERED)
    sums, resets, total, all_resets = load_decays(decays, at, T)
    strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
    row_sums, row_resets = vector_to_rows(sums, SUB_HEADS), vector_to_rows(resets, SUB_HEADS)
    from_start = decay_if(sums, resets == 0)
    to_end = vector_to_rows(decay_if(total - sums, resets == all_resets), SUB_HEADS)
    query = load_tokens(q, tokens, exists, q_n, 0, D, KEYS, ALIGN).to(COMPUTE)
    key = load_tokens(k, tokens, exists, k_n, 0, D, KEYS, ALIGN).to(COMPUTE)
    write = write_keys(key, D, SUB_HEADS)

    # Gradients of the values, the scores, the queries, the system, and the masked keys over beta.
    d_strength = tl.zeros((T,), tl.float32)
    d_score = tl.zeros((T, ROWS), tl.float32)
    d_query = tl.zeros((T, KEYS), tl.float32)
    d_system = tl.zeros((ROWS, ROWS), tl.float32)
    d_masked = tl.zeros((ROWS, KEYS), tl.float32)
    for part in range(PARTS):
        first = part * VALUES
        value = load_tokens(v, tokens, exists, v_n, first, DV, VALUES, ALIGN).to(tl.float32)
        gradient = load_tokens(d_out, tokens, exists, g_n, first, DV, VALUES, ALIGN).to(COMPUTE)
        correction = load_matrix(corrections + at * DV * ROWS, first, DV, ROWS, VALUES, ROWS)
        state = load_matrix(states + at * DV * D, first, DV, D, VALUES, KEYS)
        d_error = tl.trans(load_matrix(d_errors + at * DV * ROWS, first, DV, ROWS, VALUES, ROWS))
        d_score += tl.dot(gradient, correction, input_precision=PRECISION)
        d_query += tl.dot(gradient, state, input_precision=PRECISION)
        d_system += tl.dot(d_error, correction, input_precision=PRECISION)
        d_masked += tl.dot(d_error, state, input_precision=PRECISION)
        d_value = sum_rows(d_error.to(tl.float32), SUB_HEADS)
        d_strength += tl.sum(d_value * value, 1)
        store_tokens(d_v, tokens, exists, H * DV, first, d_value * strength[:, None], DV, VALUES)
    seen = time[None, :] <= place[:, None]
    d_score *= scale * decay_between(sums, resets, row_sums, row_resets, seen)
    d_query *= (scale * from_start)[:, None]
    d_query += tl.dot(d_score.to(COMPUTE), write, input_precision=PRECISION)
    store_tokens(d_q, tokens, exists, H * D, 0, d_query, D, KEYS)
    d_sums = tl.sum(query.to(tl.float32) * d_query, 1)
    before = time[None, :] < time[:, None]
    d_system *= -decay_between(row_sums, row_resets, row_sums, row_resets, before)
    d_masked *= -vector_to_rows(from_start, SUB_HEADS)[:, None]
    d_masked += tl.dot(d_system.to(COMPUTE), write, input_precision=PRECISION)
    row_strength = vector_to_rows(strength, SUB_HEADS)
    d_system = (d_system * row_strength[:, None]).to(COMPUTE)
    entries = load_entries(mask, tokens, mask_n, SUB_HEADS)
    products = sum_sub_heads(d_masked * to_rows(key, SUB_HEADS).to(tl.float32), D, SUB_HEADS)
    of_masked = tl.sum(products * entries, 1)
    d_strength += sum_vector_rows(of_masked, SUB_HEADS)
    d_sums += sum_vector_rows(of_masked * row_strength, SUB_HEADS)
    d_masked *= to_columns(entries, D, KEYS, SUB_HEADS) * row_strength[:, None]
    gates = b * N * H + tokens * H + h
    tl.store(d_beta + gates, d_strength, mask=exists)

    # Gradient of the mask.
    products *= row_strength[:, None]
    others = tl.arange(0, SUB_HEADS)
    if TOKEN_MASK:
        row = vector_to_rows(gates, SUB_HEADS) * SUB_HEADS + tl.arange(0, ROWS) % SUB_HEADS
        there = vector_to_rows(exists, SUB_HEADS)[:, None]
        tl.store(d_mask + row[:, None] * SUB_HEADS + others[None, :], products, mask=there)
    else:
        products = tl.sum(tl.reshape(products, (T, SUB_HEADS, SUB_HEADS)), axis=0)
        places = others[:, None] * SUB_HEADS + others[None, :]
        tl.store(d_mask + at * SUB_HEADS * SUB_HEADS + places, products)

    # Gradients of the write keys, of the decay to the end of the chunk and, from all parts, of the decays.
    d_write = tl.zeros((ROWS, KEYS), tl.float32)
    of_total = 0.0
    for part in range(PARTS):
        correction = tl.trans(load_matrix(corrections + at * DV * ROWS, part * VALUES, DV, ROWS, VALUES, ROWS))
        state = load_matrix(states + at * DV * D, part * VALUES, DV, D, VALUES, KEYS).to(tl.float32)
        d_state = load_matrix(d_states + at * DV * D, part * VALUES, DV, D, VALUES, KEYS)
        d_write += tl.dot(correction, d_state, input_precision=PRECISION)
        of_total += tl.sum(tl.sum(state * d_state.to(tl.float32), 1), 0)
    d_write *= to_end[:, None]
    of_total = decay_if(total, all_resets == 0) * of_total + tl.sum(tl.sum(write.to(tl.float32) * d_write, 1), 0)
    d_write += dot_over_tokens(tl.trans(d_score.to(COMPUTE)), query, PRECISION)
    masked = (to_rows(key, SUB_HEADS) * to_columns(entries, D, KEYS, SUB_HEADS)).to(COMPUTE)
    d_write += tl.dot(tl.trans(d_system), masked, input_precision=PRECISION)
    d_write = own_columns(d_write, D, SUB_HEADS)
    d_sums -= sum_vector_rows(tl.sum(write.to(tl.float32) * d_write, 1), SUB_HEADS)
    d_key = sum_rows(d_masked + d_write, SUB_HEADS)
    store_tokens(d_k, tokens, exists, H * D, 0, d_key, D, KEYS)
    d_sums = tl.where(place == T - 1, d_sums + of_total, d_sums)
    rate = tl.load(log_decay + b * decay_b + tokens * decay_n + h * decay_h, mask=exists, other=0.0).to(tl.float32)
    d_rate = tl.where(rate < LEAST_LOG_DECAY, 0.0, tl.cumsum(d_sums, 0, reverse=True))
    tl.store(d_log_decay + gates, d_rate, mask=exists)
