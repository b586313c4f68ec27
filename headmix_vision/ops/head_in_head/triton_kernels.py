"""Compute Head-in-Head in Triton kernels: each chunk without the state, then the state from chunk to chunk.

README.md derives the kernels. Their launches are planned for each layout.

B batch, N tokens, H heads, C chunks of T tokens, Dk and Dv head dims, r sub-heads, R = r T rows of a chunk. The
kernels keep and multiply states and corrections transposed, values first: then the left factor of each product is the
one that depends on the state, and stays in registers. Constants: D and DV are the head dims, KEYS and VALUES the
columns of a tile of them; for ALIGN see ``mhla.triton_tiles``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmix_vision.ops.head_in_head.torch_impl import Inputs
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
from headmix_vision.ops.runtime import (
    Launch,
    Layout,
    alignment,
    gpu_behind,
    layout,
    numerics,
    planned,
    storage_dtype,
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


Tiles = dict[str, int]
# These are the best of sweeps on an H200 for bfloat16, up to 64 rows and keys. More stages hide the latency of memory
# where they do not crowd out a second program on a processor. Scans of one sub-head take most shared memory: they get
# fewer stages, unless heads are so few that each program has a processor to itself.
PREPARE = Tiles(num_warps=1, num_stages=1)
SCAN = Tiles(VALUES=64, num_warps=4, num_stages=3)
CROWDED_SCAN = SCAN | Tiles(num_stages=2)
INPUTS_BACKWARD = Tiles(VALUES=64, num_warps=4, num_stages=1)

# Segments of a sequence are scanned at once, each twice: for what it does to the state, then for its results.
SEGMENT = 8  # chunks
LEAST_TOKENS = 16384  # of a sequence in segments
BLOCK_SHARE = 4.5  # of the backward pass: how many times the bytes of q the buffers of a block of segments may have


class Saved(NamedTuple):
    """The tensors that the forward pass saves for the backward pass.

    In S segments, ``inverse`` holds the transition of each segment, [B, H, S, Dk, Dk], and ``states`` the state before
    each segment, [B, H, S, Dv, Dk]. The other tensors have C = 0.

    Attributes:
        decays: [B, H, C, 2, T], log decay since the start of the chunk, and how many decays forgot everything; float64
            for float32 inputs, as differences of float32 sums would lose digits, else float32.
        scores: [B, H, C, T, R], of queries and keys of single sub-heads, decayed and scaled.
        inverse: [B, H, C, R, R], of the system of each chunk.
        states: [B, H, C, Dv, Dk], before each chunk.
        corrections: [B, H, C, Dv, R].
    """

    decays: Tensor
    scores: Tensor
    inverse: Tensor
    states: Tensor
    corrections: Tensor

    @property
    def segments(self) -> int:
        """The number of segments, 0 for a sequence that is scanned as one."""
        return 0 if self.decays.shape[2] else self.states.shape[2]


class Gradients(NamedTuple):
    """The gradients of the inputs; the last four are float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor
    mask: Tensor
    initial_state: Tensor


def chunk_tokens(r: int) -> int:
    """Return T, the tokens that make 64 rows."""
    return 64 // r


def pays_in_segments(q: Tensor, v: Tensor, mask: Tensor) -> bool:
    """Return whether to scan a sequence in segments: it is long, and its heads alone leave most of the GPU idle.

    Measured on an H200 in bf16 with 64 dims: 32 heads of 16,384 tokens are faster in segments at r = 1 and r = 4. With
    gradients, 32 heads of 2,048 or 4,096 tokens, 128 heads of 4,096 and 384 heads of 1,024 are slower.
    """
    if q.shape[1] < LEAST_TOKENS or mask.shape[-1] > 4:
        return False
    if q.dtype != torch.bfloat16 or max(q.shape[-1], v.shape[-1]) > SCAN["VALUES"]:
        return False
    gpu = gpu_behind(q.device)
    return gpu.capability == (9, 0) and 4 * q.shape[0] * q.shape[2] <= gpu.processors  # the batch may be a symbol


def count_segments(q: Tensor, v: Tensor, mask: Tensor) -> int:
    """Return the number of segments, whole blocks of them, of which the last may be empty; 0 to scan as one."""
    if not pays_in_segments(q, v, mask):
        return 0
    segments = -(-q.shape[1] // (chunk_tokens(mask.shape[-1]) * SEGMENT))
    count = block_segments(q, v, mask)
    return -(-segments // count) * count


def block_segments(q: Tensor | Layout, v: Tensor | Layout, mask: Tensor | Layout) -> int:
    """Choose how many segments the backward pass takes at a time, so that their buffers are small beside its results.

    A batch that is a symbol is compared, not computed with.
    """
    (B, N, H, Dk), Dv, r = q.shape, v.shape[-1], mask.shape[-1]
    T = chunk_tokens(r)
    numbers = 2 * T * r * T + r * T * (r * T + Dk) + 2 * Dv * (Dk + r * T)  # of a chunk
    chunks = BLOCK_SHARE * N * Dk * q.dtype.itemsize / (numbers * storage_dtype(q.dtype).itemsize)
    segments = -(-N // (T * SEGMENT))
    count = max(1, int(chunks / SEGMENT))
    while count < segments and B * H * count < gpu_behind(q.device).processors:
        count *= 2
    return -(-segments // -(-segments // count))


def saved(q: Tensor, v: Tensor, mask: Tensor, save: bool, inline: bool = False) -> Saved:
    """Allocate the buffers; without ``save`` the last two are left out, C = 0.

    A graph that launches the kernels itself, ``inline``, scans all sequences as one.
    """
    segments = 0 if inline else count_segments(q, v, mask)
    if segments:
        B, _, H, Dk = q.shape
        transitions = q.new_empty(B, H, segments, Dk, Dk, dtype=storage_dtype(q.dtype))
        states = q.new_empty(B, H, segments, v.shape[-1], Dk, dtype=storage_dtype(q.dtype))
        return chunk_buffers(q, v, mask, 0, 0, 0)._replace(inverse=transitions, states=states)
    C = -(-q.shape[1] // chunk_tokens(mask.shape[-1]))
    return chunk_buffers(q, v, mask, C, C, C if save else 0)


def chunk_buffers(q: Tensor, v: Tensor, mask: Tensor, C: int, inverses: int, states: int) -> Saved:
    """Allocate the buffers of C chunks, with so many inverses, and so many states and corrections."""
    (B, _, H, Dk), Dv, r = q.shape, v.shape[-1], mask.shape[-1]
    T, storage = chunk_tokens(r), storage_dtype(q.dtype)
    return Saved(
        q.new_empty(B, H, C, 2, T, dtype=torch.float64 if q.dtype == torch.float32 else torch.float32),
        q.new_empty(B, H, C, T, r * T, dtype=storage),
        q.new_empty(B, H, inverses, r * T, r * T, dtype=storage),
        q.new_empty(B, H, states, Dv, Dk, dtype=storage),
        q.new_empty(B, H, states, Dv, r * T, dtype=storage),
    )


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Copy the tensors whose rows are not contiguous."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _strides(align: int, *tensors: Layout) -> list[int]:
    return [stride // align for x in tensors for stride in x.strides[:3]]


def _mask_strides(mask: Layout) -> tuple[int, ...]:
    return (0, 0, mask.strides[0]) if len(mask.shape) == 3 else mask.strides[:3]


def _constants(k: Layout, mask: Layout, ordered: bool, align: int) -> dict[str, Any]:
    compute, precision = numerics(k.dtype, k.gpu, crowded=True)
    r, D = mask.shape[-1], k.shape[-1]
    return dict(
        T=chunk_tokens(r), SUB_HEADS=r, D=D, KEYS=_columns(D), ORDERED=ordered,
        COMPUTE=compute, PRECISION=precision, ALIGN=align,
    )  # fmt: skip


def _tiles(tiles: Tiles, k: Layout) -> Tiles:
    """Give the tiles fewer columns and more warps where a program would not fit."""
    wide = k.shape[-1] > 64
    if k.dtype == torch.bfloat16 and not wide:
        return tiles
    if "VALUES" not in tiles:
        return tiles | Tiles(num_warps=4)
    if k.dtype == torch.bfloat16:
        return tiles | Tiles(num_warps=4, num_stages=1)
    return tiles | Tiles(VALUES=32, num_warps=8 if wide else 4, num_stages=1)


def _columns(dim: int) -> int:
    """Count the columns of a tile that holds a head dim."""
    return max(16, triton.next_power_of_2(dim))


def _values(k: Layout, v: Layout, mask: Layout, tiles: Tiles) -> dict[str, Any]:
    tiles = _tiles(tiles, k)
    columns = min(_columns(v.shape[-1]), tiles["VALUES"])
    return dict(DV=v.shape[-1], TOKEN_MASK=len(mask.shape) == 5) | tiles | Tiles(VALUES=columns)


def _scan_tiles(heads: int, v: Layout, mask: Layout) -> Tiles:
    if v.gpu.has_tensor_memory or v.gpu.amd:
        # With stages Triton lets a product begin with the state before the decay has scaled it (triton #10993), where
        # sums are in tensor memory; AMD's GPUs have no shared memory for stages.
        return SCAN | Tiles(num_stages=1)
    if mask.shape[-1] > 1 or heads * -(-v.shape[-1] // SCAN["VALUES"]) <= v.gpu.processors:
        return SCAN
    return CROWDED_SCAN


@planned
def _plan(
    q: Layout, k: Layout, v: Layout, beta: Layout, log_decay: Layout, mask: Layout, d_out: Layout | None,
    given: torch.dtype | None, ordered: bool, save: bool, segments: int,
) -> list[dict[str, Launch]]:  # fmt: skip
    """Plan the launches of each block of segments by name, in the order of the pass; without segments one block is all.

    Args:
        d_out: layout of the output's gradient, None for the forward pass.
        given: type of the initial state, or of the final state's gradient; None for zeros.
        save: let the scan store states and corrections.
    """
    B, N, H, Dk = q.shape
    Dv, gradient = v.shape[-1], [] if d_out is None else [d_out]
    count = block_segments(q, v, mask) if segments and gradient else segments
    C = count * SEGMENT or -(-N // chunk_tokens(mask.shape[-1]))
    align = alignment(q, k, v, *gradient)
    constants = _constants(k, mask, ordered, align)
    values = _values(k, v, mask, _scan_tiles(B * H * (count or 1), v, mask))
    parts = -(-Dv // values["VALUES"])
    programs = B * H * (count or 1) * parts
    qk, qkv, d_strides = _strides(align, q, k), _strides(align, q, k, v), _strides(align, *gradient)
    gates, masks = (*beta.strides, *log_decay.strides), _mask_strides(mask)
    scanning = constants | values | dict(LENGTH=SEGMENT if segments else 0)
    begins = given is not None or segments > 0  # with a state that is not zero
    blocks = []
    for start in range(0, segments or 1, count or 1):
        sizes = (N, H, C, Dk**-0.5, start * SEGMENT if segments else None)
        numbers = (*qk, *gates, *masks, *sizes)
        block = {"prepare": Launch(prepare_kernel, (B * H * C,), numbers, constants | _tiles(PREPARE, k))}
        numbers = (*qkv, *beta.strides, *masks, *sizes, segments or None)
        forms = dict(INITIAL=begins, SAVE=save, SUMMARY=False)
        block["scan"] = Launch(scan_kernel, (programs,), numbers, scanning | forms)
        if segments and not gradient:
            summaries = B * H * count * -(-(Dv + Dk) // values["VALUES"])
            forms = dict(INITIAL=True, SAVE=False, SUMMARY=True)
            block["summarize"] = Launch(scan_kernel, (summaries,), numbers, scanning | forms)
        if gradient:
            numbers = (*qk, *beta.strides, *masks, *d_strides, *sizes)
            block["summarize"] = Launch(scan_backward_kernel, (programs,), numbers, scanning | dict(FINAL=False))
            block["scan_backward"] = Launch(scan_backward_kernel, (programs,), numbers, scanning | dict(FINAL=begins))
            numbers = (*qkv, *gates, *masks, *d_strides, *sizes)
            tiles = _values(k, v, mask, INPUTS_BACKWARD)
            block["inputs_backward"] = Launch(inputs_backward_kernel, (B * H * C,), numbers, constants | tiles)
        if segments:
            is_first = start + count == segments if gradient else start == 0
            same = {name: scanning[name] for name in ("D", "KEYS", "DV", "VALUES", "LENGTH", "COMPUTE", "PRECISION")}
            forms = dict(INITIAL=given is not None or not is_first, BACKWARD=bool(gradient))
            tiles = Tiles(num_warps=values["num_warps"], num_stages=1)
            numbers = (count, start * SEGMENT, segments)
            block["join"] = Launch(join_kernel, (B * H * parts,), numbers, same | forms | tiles)
        blocks.append(block)
    return blocks[::-1] if gradient else blocks


def forward_pass(inputs: Inputs, order: Tensor | None, buffers: Saved, out: Tensor, final: Tensor) -> None:
    """Fill ``out`` [B, N, H, Dv], ``final`` [B, H, Dk, Dv] and the buffers."""
    q, k, v, beta, log_decay, mask, initial = inputs
    q, k, v = _rows(q, k, v)
    mask, initial = mask.contiguous(), None if initial is None else initial.contiguous()
    layouts, given = map(layout, (q, k, v, beta, log_decay, mask)), None if initial is None else initial.dtype
    segments, states, inverse = buffers.segments, buffers.states, buffers.inverse
    save = not segments and states.shape[2] > 0
    (block,) = _plan(*layouts, None, given, order is not None, save, segments)
    features = (q, k, v, beta, mask)
    if not segments:
        chunks = (buffers.decays, buffers.scores, inverse, _for_values(buffers), None)
        block["prepare"](q, k, beta, log_decay, mask, order, *chunks)
        block["scan"](*features, initial, order, *chunks, out, final, states, buffers.corrections, None)
        return
    own = chunk_buffers(q, v, mask, segments * SEGMENT, 0, 0)
    chunks = (own.decays, own.scores, None, _for_values(own), _for_state(own, q))
    added = torch.empty_like(states, dtype=torch.float32)
    block["prepare"](q, k, beta, log_decay, mask, order, *chunks)
    block["summarize"](*features, None, order, *chunks, None, added, None, None, inverse)
    block["join"](initial, inverse, added, states, final)
    block["scan"](*features, states, order, *chunks, out, None, None, None, None)


def _for_values(buffers: Saved) -> Tensor:
    """Allocate the factors of the values in the corrections, [B, H, C, R, T]."""
    return buffers.scores.new_empty(buffers.scores.mT.shape)


def _for_state(buffers: Saved, q: Tensor) -> Tensor:
    """Allocate the factors of the state in the corrections, [B, H, C, R, Dk]."""
    B, H, C, _, R = buffers.scores.shape
    return buffers.scores.new_empty(B, H, C, R, q.shape[-1])


def backward_pass(
    inputs: Inputs, order: Tensor | None, buffers: Saved, d_out: Tensor, d_final: Tensor | None
) -> Gradients:
    """Compute the gradients; in segments block by block from the last, where all of the chunks is computed again."""
    q, k, v, beta, log_decay, mask, _ = inputs
    q, k, v, d_out = _rows(q, k, v, d_out)
    mask, d_final = mask.contiguous(), None if d_final is None else d_final.contiguous()
    (B, N, H, Dk), r, segments = q.shape, mask.shape[-1], buffers.segments
    layouts, given = map(layout, (q, k, v, beta, log_decay, mask, d_out)), None if d_final is None else d_final.dtype
    blocks = _plan(*layouts, given, order is not None, segments > 0, segments)

    own, for_values, for_state, d_ends = buffers, None, None, d_final
    if segments:
        C = segments // len(blocks) * SEGMENT
        own = chunk_buffers(q, v, mask, C, C, C)
        for_values, for_state = _for_values(own), _for_state(own, q)
        added, d_ends = (q.new_empty(B, H, C // SEGMENT, v.shape[-1], Dk, dtype=torch.float32) for _ in range(2))
    C = own.decays.shape[2]
    chunks = (own.decays, own.scores, own.inverse)
    d_states, d_errors = torch.empty_like(own.states), torch.empty_like(own.corrections)
    d_initial = q.new_empty(B, H, Dk, v.shape[-1], dtype=torch.float32)
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_beta, d_log_decay = (q.new_empty(B, N, H, dtype=torch.float32) for _ in range(2))
    per_token = mask.ndim == 5
    size = (B, N, H) if per_token else (len(blocks), B, H, C) if segments else (B, H, C)
    d_mask = q.new_empty(*size, r, r, dtype=torch.float32)
    features = (q, k, beta, mask, d_out)
    for i, block in enumerate(blocks):
        if segments:
            block["prepare"](q, k, beta, log_decay, mask, order, *chunks, for_values, for_state)
            block["scan"](
                q, k, v, beta, mask, buffers.states, order, *chunks, for_values, for_state, None, None, own.states,
                own.corrections, None,
            )  # fmt: skip
            block["summarize"](*features, None, order, *chunks[:2], None, for_state, None, None, added)
            block["join"](d_initial if i else d_final, buffers.inverse, added, d_ends, d_initial)
        first = None if segments else d_initial
        block["scan_backward"](*features, d_ends, order, *chunks, for_state, d_states, d_errors, first)
        block["inputs_backward"](
            q, k, v, beta, log_decay, mask, d_out, order, own.decays, own.states, own.corrections, d_states, d_errors,
            d_q, d_k, d_v, d_beta, d_log_decay, d_mask[i] if segments and not per_token else d_mask,
        )  # fmt: skip
    if not per_token:
        d_mask = d_mask.sum((0, 1, 3) if segments else (0, 2))
    return Gradients(d_q, d_k, d_v, d_beta, d_log_decay, d_mask, d_initial)
