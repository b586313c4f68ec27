"""Runs the backward pass: gradients of the state from chunk to chunk, then those of the inputs. README.md derives it.

``triton_forward`` explains shapes and constants.
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
    store_matrix,
    store_tokens,
    sum_rows,
    sum_sub_heads,
    sum_vector_rows,
    to_columns,
    to_rows,
    token_index,
    vector_to_rows,
    write_keys,
)


@triton.jit
def scan_backward_kernel(
    q, k, beta, mask, d_out, d_final, order, decays, scores, inverse, d_states, d_errors, d_initial,
    q_b, q_n, q_h, k_b, k_n, k_h, beta_b, beta_n, beta_h, mask_b, mask_n, mask_h, g_b, g_n, g_h, N, H, C, scale,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr,
    VALUES: tl.constexpr, ORDERED: tl.constexpr, TOKEN_MASK: tl.constexpr, FINAL: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute gradients of one head and some value columns, from the last chunk to the first.

    They are those of the state after each chunk, [B, H, C, Dv, Dk], of the errors which the system is solved for,
    [B, H, C, Dv, R], and of the initial state.
    """
    PARTS: tl.constexpr = (DV + VALUES - 1) // VALUES
    program = tl.program_id(0).to(tl.int64)
    head, first = program // PARTS, program % PARTS * VALUES
    b, h = head // H, head % H
    ROWS: tl.constexpr = T * SUB_HEADS
    q += (b * q_b + h * q_h) * ALIGN
    k += (b * k_b + h * k_h) * ALIGN
    d_out += (b * g_b + h * g_h) * ALIGN
    mask += b * mask_b + h * mask_h
    place = tl.arange(0, T)
    values, keys = first + tl.arange(0, VALUES), tl.arange(0, KEYS)
    of_state, in_state = keys[None, :] * DV + values[:, None], (keys < D)[None, :] & (values < DV)[:, None]
    if FINAL:
        d_state = tl.load(d_final + head * D * DV + of_state, mask=in_state, other=0.0).to(tl.float32)
    else:
        d_state = tl.zeros((VALUES, KEYS), tl.float32)
    if not TOKEN_MASK:
        entries = load_mask(mask, place, 0, KEYS, D, SUB_HEADS)
    for back in range(C):
        chunk = C - 1 - back
        at = head * C + chunk
        tokens, exists = token_index(order, chunk, N, T, ORDERED)
        key = load_tokens(k, tokens, exists, k_n, 0, D, KEYS, ALIGN).to(COMPUTE)
        query = load_tokens(q, tokens, exists, q_n, 0, D, KEYS, ALIGN)
        gradient = tl.trans(load_tokens(d_out, tokens, exists, g_n, first, DV, VALUES, ALIGN).to(COMPUTE))
        solve = load_matrix(inverse + at * ROWS * ROWS, 0, ROWS, ROWS, ROWS, ROWS)
        score = load_matrix(scores + at * T * ROWS, 0, T, ROWS, T, ROWS)
        sums, resets, total, all_resets = load_decays(decays, at, T)
        strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
        from_start = decay_if(sums, resets == 0)
        to_end = vector_to_rows(decay_if(total - sums, resets == all_resets), SUB_HEADS)
        if TOKEN_MASK:
            entries = load_mask(mask, tokens, mask_n, KEYS, D, SUB_HEADS)
        factor = masked_factor(vector_to_rows(strength * from_start, SUB_HEADS), entries, SUB_HEADS)
        after = d_state.to(COMPUTE)
        store_matrix(d_states + at * DV * D, first, after, DV, D, VALUES, KEYS)

        d_correction = tl.dot(after, tl.trans(write_keys(key, D, SUB_HEADS)), input_precision=PRECISION)
        d_correction *= to_end[None, :]
        d_correction += dot_over_tokens(gradient, score, PRECISION)
        d_error = tl.dot(d_correction.to(COMPUTE), solve, input_precision=PRECISION)
        store_matrix(d_errors + at * DV * ROWS, first, d_error, DV, ROWS, VALUES, ROWS)
        query = (query * (scale * from_start)[:, None]).to(COMPUTE)
        d_error = (d_error * -factor[None, :]).to(COMPUTE)
        d_state *= decay_if(total, all_resets == 0)
        d_state += dot_over_tokens(gradient, query, PRECISION)
        d_state += tl.dot(d_error, masked_keys(key, entries, SUB_HEADS), input_precision=PRECISION)
    tl.store(d_initial + head * D * DV + of_state, d_state, mask=in_state)


@triton.jit
def inputs_backward_kernel(
    q, k, v, beta, log_decay, mask, d_out, order, decays, states, corrections, d_states, d_errors,
    d_q, d_k, d_v, d_beta, d_log_decay, d_mask,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, beta_b, beta_n, beta_h, decay_b, decay_n, decay_h,
    mask_b, mask_n, mask_h, g_b, g_n, g_h, N, H, C, scale,
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
    tokens, exists = token_index(order, chunk, N, T, ORDERED)
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
    d_key = sum_rows(d_masked, SUB_HEADS)
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
    d_key += sum_rows(d_write, SUB_HEADS)
    store_tokens(d_k, tokens, exists, H * D, 0, d_key, D, KEYS)
    d_sums = tl.where(place == T - 1, d_sums + of_total, d_sums)
    rate = tl.load(log_decay + b * decay_b + tokens * decay_n + h * decay_h, mask=exists, other=0.0).to(tl.float32)
    d_rate = tl.where(rate < LEAST_LOG_DECAY, 0.0, tl.cumsum(d_sums, 0, reverse=True))
    tl.store(d_log_decay + gates, d_rate, mask=exists)
