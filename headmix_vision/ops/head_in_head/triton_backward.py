"""Backward kernels: the gradient of the state from chunk to chunk, then those of the inputs. Derivation: README.md.

Shapes and constants as in ``triton_forward``.
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
    sub_head_of,
    sum_rows,
    sum_vector_rows,
    to_rows,
    token_index,
    vector_to_rows,
)


@triton.jit
def scan_backward_kernel(
    q, k, beta, mask, d_out, d_final, order, decays, inverse, d_states, d_errors, d_initial,
    q_b, q_n, q_h, k_b, k_n, k_h, beta_b, beta_n, beta_h, mask_b, mask_n, mask_h, g_b, g_n, g_h, N, H, C, scale,
    T: tl.constexpr, SUB_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr,
    VALUES: tl.constexpr, ORDERED: tl.constexpr, TOKEN_MASK: tl.constexpr, FINAL: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Gradients of one head and some value columns, from the last chunk to the first.

    Of the state after each chunk, [B, H, C, Dk, Dv], of the errors which the system is solved for, [B, H, C, r T, Dv],
    and of the initial state.
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
    place, time = tl.arange(0, T), tl.arange(0, ROWS) // SUB_HEADS
    seen = time[:, None] <= place[None, :]
    own = own_columns(ROWS, KEYS, D, SUB_HEADS)
    if FINAL:
        d_state = load_matrix(d_final + head * D * DV, first, KEYS, D, DV, VALUES).to(tl.float32)
    else:
        d_state = tl.zeros((KEYS, VALUES), tl.float32)
    if not TOKEN_MASK:
        entries = load_mask(mask, place, 0, KEYS, D, SUB_HEADS)
    for back in range(C):
        chunk = C - 1 - back
        at = head * C + chunk
        tokens, exists = token_index(order, chunk, N, T, ORDERED)
        key = load_tokens(k, tokens, exists, k_n, 0, D, KEYS, ALIGN)
        query = load_tokens(q, tokens, exists, q_n, 0, D, KEYS, ALIGN)
        gradient = load_tokens(d_out, tokens, exists, g_n, first, DV, VALUES, ALIGN).to(COMPUTE)
        solve = load_matrix(inverse + at * ROWS * ROWS, 0, ROWS, ROWS, ROWS, ROWS)
        sums = tl.load(decays + at * T + place)
        total = tl.load(decays + at * T + T - 1)
        strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
        strength, row_sums = vector_to_rows(strength, SUB_HEADS), vector_to_rows(sums, SUB_HEADS)
        rows = to_rows(key, SUB_HEADS)
        write = tl.where(own, rows, 0.0)
        after = d_state.to(COMPUTE)
        store_matrix(d_states + at * D * DV, first, after, KEYS, D, DV, VALUES)

        scores = tl.dot(write.to(COMPUTE), tl.trans(query.to(COMPUTE)), input_precision=PRECISION)
        scores *= scale * tl.exp(tl.where(seen, sums[None, :] - row_sums[:, None], -float("inf")))
        write = (write * tl.exp(total - row_sums)[:, None]).to(COMPUTE)
        d_correction = tl.dot(scores.to(COMPUTE), gradient, input_precision=PRECISION)
        d_correction += tl.dot(write, after, input_precision=PRECISION)
        d_error = tl.dot(tl.trans(solve), d_correction.to(COMPUTE), input_precision=PRECISION).to(COMPUTE)
        store_matrix(d_errors + at * ROWS * DV, first, d_error, ROWS, ROWS, DV, VALUES)

        query = (query * (scale * tl.exp(sums))[:, None]).to(COMPUTE)
        if TOKEN_MASK:
            entries = load_mask(mask, tokens, mask_n, KEYS, D, SUB_HEADS)
        masked = (rows * entries * (strength * tl.exp(row_sums))[:, None]).to(COMPUTE)
        d_state *= tl.exp(total)
        d_state += tl.dot(tl.trans(query), gradient, input_precision=PRECISION)
        d_state -= tl.dot(tl.trans(masked), d_error, input_precision=PRECISION)
    store_matrix(d_initial + head * D * DV, first, d_state, KEYS, D, DV, VALUES)


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
    """Gradients of the inputs of one chunk of a head.

    That of the mask is [B, N, H, r, r] for a mask of tokens, else [B, H, C, r, r], still to be summed.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program % C, program // C
    b, h = head // H, head % H
    ROWS: tl.constexpr = T * SUB_HEADS
    tokens, exists = token_index(order, chunk, N, T, ORDERED)
    v += (b * v_b + h * v_h) * ALIGN
    d_out += (b * g_b + h * g_h) * ALIGN
    place, time = tl.arange(0, T), tl.arange(0, ROWS) // SUB_HEADS
    sums = tl.load(decays + program * T + place)
    total = tl.load(decays + program * T + T - 1)
    strength = tl.load(beta + b * beta_b + tokens * beta_n + h * beta_h, mask=exists, other=0.0).to(tl.float32)
    strength, row_sums = vector_to_rows(strength, SUB_HEADS), vector_to_rows(sums, SUB_HEADS)

    d_system = tl.zeros((ROWS, ROWS), tl.float32)
    d_scores = tl.zeros((T, ROWS), tl.float32)
    d_masked = tl.zeros((ROWS, KEYS), tl.float32)  # of the masked keys, over beta
    d_write = tl.zeros((ROWS, KEYS), tl.float32)
    d_query = tl.zeros((T, KEYS), tl.float32)
    d_strength = tl.zeros((ROWS,), tl.float32)
    of_states = tl.zeros((KEYS,), tl.float32)
    for part in range((DV + VALUES - 1) // VALUES):
        first = part * VALUES
        d_error = load_matrix(d_errors + program * ROWS * DV, first, ROWS, ROWS, DV, VALUES)
        correction = load_matrix(corrections + program * ROWS * DV, first, ROWS, ROWS, DV, VALUES)
        state = load_matrix(states + program * D * DV, first, KEYS, D, DV, VALUES)
        d_state = load_matrix(d_states + program * D * DV, first, KEYS, D, DV, VALUES)
        gradient = load_tokens(d_out, tokens, exists, g_n, first, DV, VALUES, ALIGN).to(COMPUTE)
        value = load_tokens(v, tokens, exists, v_n, first, DV, VALUES, ALIGN)
        d_system += tl.dot(d_error, tl.trans(correction), input_precision=PRECISION)
        d_scores += tl.dot(gradient, tl.trans(correction), input_precision=PRECISION)
        d_masked += tl.dot(d_error, tl.trans(state), input_precision=PRECISION)
        d_write += tl.dot(correction, tl.trans(d_state), input_precision=PRECISION)
        d_query += tl.dot(gradient, tl.trans(state), input_precision=PRECISION)
        of_states += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
        d_error = d_error.to(tl.float32)
        d_strength += tl.sum(d_error * to_rows(value, SUB_HEADS).to(tl.float32), 1)
        d_value = sum_rows(d_error * strength[:, None], SUB_HEADS)
        store_tokens(d_v + b * N * H * DV + h * DV, tokens, exists, H * DV, first, d_value, DV, VALUES)

    own = own_columns(ROWS, KEYS, D, SUB_HEADS)
    query = load_tokens(q + (b * q_b + h * q_h) * ALIGN, tokens, exists, q_n, 0, D, KEYS, ALIGN)
    key = load_tokens(k + (b * k_b + h * k_h) * ALIGN, tokens, exists, k_n, 0, D, KEYS, ALIGN)
    rows = to_rows(key.to(tl.float32), SUB_HEADS)
    entries = load_mask(mask + b * mask_b + h * mask_h, tokens, mask_n, KEYS, D, SUB_HEADS)
    masked = rows * entries
    write = tl.where(own, rows, 0.0)

    d_scores *= scale * tl.exp(
        tl.where(time[None, :] <= place[:, None], sums[:, None] - row_sums[None, :], -float("inf"))
    )
    d_query *= (scale * tl.exp(sums))[:, None]
    d_query += tl.dot(d_scores.to(COMPUTE), write.to(COMPUTE), input_precision=PRECISION)
    d_write *= tl.exp(total - row_sums)[:, None]
    d_write = tl.where(own, d_write, 0.0)
    of_total = tl.exp(total) * tl.sum(of_states, 0) + tl.sum(tl.sum(write * d_write, 1), 0)
    d_write += tl.dot(tl.trans(d_scores.to(COMPUTE)), query.to(COMPUTE), input_precision=PRECISION)
    d_system *= -tl.exp(tl.where(time[None, :] < time[:, None], row_sums[:, None] - row_sums[None, :], -float("inf")))
    d_masked *= -tl.exp(row_sums)[:, None]
    d_masked += tl.dot(d_system.to(COMPUTE), write.to(COMPUTE), input_precision=PRECISION)
    d_strength += tl.sum(d_masked * masked, 1)
    d_system *= strength[:, None]
    d_masked *= strength[:, None]
    d_write += tl.dot(tl.trans(d_system.to(COMPUTE)), masked.to(COMPUTE), input_precision=PRECISION)
    d_write = tl.where(own, d_write, 0.0)

    d_key = sum_rows(d_masked * entries + d_write, SUB_HEADS)
    store_tokens(d_q + b * N * H * D + h * D, tokens, exists, H * D, 0, d_query, D, KEYS)
    store_tokens(d_k + b * N * H * D + h * D, tokens, exists, H * D, 0, d_key, D, KEYS)
    d_sums = sum_vector_rows(tl.sum(d_masked * masked - d_write * write, 1), SUB_HEADS)
    d_sums += tl.sum(query.to(tl.float32) * d_query, 1)
    d_sums = tl.where(place == T - 1, d_sums + of_total, d_sums)
    d_rate = tl.cumsum(d_sums, 0, reverse=True)
    rate = tl.load(log_decay + b * decay_b + tokens * decay_n + h * decay_h, mask=exists, other=0.0).to(tl.float32)
    gates = b * N * H + tokens * H + h
    tl.store(d_log_decay + gates, tl.where(rate < LEAST_LOG_DECAY, 0.0, d_rate), mask=exists)
    tl.store(d_beta + gates, sum_vector_rows(d_strength, SUB_HEADS), mask=exists)

    sub_head, products = sub_head_of(KEYS, D, SUB_HEADS), d_masked * rows
    row = tl.arange(0, ROWS) % SUB_HEADS
    for other in tl.static_range(SUB_HEADS):
        entry = tl.sum(tl.where(sub_head[None, :] == other, products, 0.0), 1)  # [r T]
        if TOKEN_MASK:
            places = vector_to_rows(gates, SUB_HEADS) * SUB_HEADS * SUB_HEADS + row * SUB_HEADS + other
            tl.store(d_mask + places, entry, mask=vector_to_rows(exists, SUB_HEADS))
        else:
            entry = tl.sum(tl.reshape(entry, (T, SUB_HEADS)), 0)
            places = program * SUB_HEADS * SUB_HEADS + tl.arange(0, SUB_HEADS) * SUB_HEADS + other
            tl.store(d_mask + places, entry)
