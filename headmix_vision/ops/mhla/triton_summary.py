"""Compute MHLA for long sequences: block summaries, their mixing, and queries times mixed summaries.

B batch, N tokens, H heads, M blocks, D and Dv head dims. Long blocks are cut into ``split`` parts each, C = M * split
parts in all; every part has a summary, and the summaries of a block's parts are summed.
A *summary* is a D x Dv matrix with a vector of D: of keys and values, S = sum phi(k) v^T and z = sum phi(k); of queries
and output gradients, in the backward pass, R = sum phi(q) g^T and r = sum phi(q) c (README.md).
Kernels take summaries in turn from the first and from the last (REVERSED) on: those just written are still in the L2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmix_vision.ops.mhla import triton_tuning as tuning
from headmix_vision.ops.mhla.regimes import PART_TOKENS
from headmix_vision.ops.mhla.torch_impl import Settings
from headmix_vision.ops.mhla.triton_launch import (
    Backward,
    Gradients,
    choose_tiles,
    kernel_constants,
    key_gradients,
    mixing_strides,
    normalizer_name,
    pack_size,
    parts,
    query_gradient,
    row_strides,
    sum_leading,
)
from headmix_vision.ops.mhla.triton_tiles import (
    add_outer,
    add_outer_columns,
    add_outer_vector,
    add_vector,
    append_column,
    append_halves,
    cast,
    cast_matrix,
    column_sums,
    columns_of,
    dot_exact,
    dot_matrix,
    dot_matrix_transposed,
    feature_gradients,
    features,
    halves,
    key_and_value_gradients,
    load_matrix,
    load_rows,
    load_vector,
    present_features,
    row_products,
    row_sums,
    rows_of_head,
    scale_rows,
    store_column,
    store_columns,
    store_matrix,
    store_rows,
    store_vector,
    sum_of_halves,
    weighted_column_sums,
    zero_columns,
    zero_matrix,
    zero_vector,
    zeros,
)
from headmix_vision.ops.numerics import numerics, storage_dtype
from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, planned


@triton.jit
def members(table, part, first, size, SIZE: tl.constexpr, FULL: tl.constexpr = False):
    """Load the tokens of a part from its row of the table, and tell which exist: all do if it is FULL."""
    place = first + tl.arange(0, SIZE)
    if FULL:
        return tl.load(table + part * size + place).to(tl.int64), tl.full((SIZE,), True, tl.int1)
    else:
        token = tl.load(table + part * size + place, mask=place < size, other=-1)
        return token.to(tl.int64), token >= 0


@triton.jit
def program(H, C, REVERSED: tl.constexpr = False):
    """Return item, head and part of a program, and the number of the head among [B, H]."""
    pid = tl.program_id(0)
    if REVERSED:
        pid = tl.num_programs(0) - 1 - pid
    pid_bh = (pid // C).to(tl.int64)
    return pid_bh // H, pid_bh % H, pid % C, pid_bh


@triton.jit
def summarize_kernel(
    k, v, summary, key_sum, table,
    k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d,
    H, C, size, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    BT: tl.constexpr, SINGLE: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    b, h, part, pid_bh = program(H, C)
    pid = pid_bh * C + part
    matrix = zero_matrix(D1, D2, DV1, DV2)
    vector = zero_columns(D1, D2) if DOTS else zero_vector(D1, D2)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    if STAGES == 0:
        next_token, next_present = members(table, part, 0, size, BT, FULL)
        k_next = load_rows(p_k, next_token * (k_n * ALIGN), next_present, k_d, D, D1, D2)
        v_next = load_rows(p_v, next_token * (v_n * ALIGN), next_present, v_d, DV, DV1, DV2)
    for first in tl.range(0, BT if SINGLE else size, BT, num_stages=STAGES if STAGES > 0 else 1):
        if STAGES == 0:
            present, k_rows, v_rows = next_present, k_next, v_next
            if not SINGLE:
                next_token, next_present = members(table, part, first + BT, size, BT)
                k_next = load_rows(p_k, next_token * (k_n * ALIGN), next_present, k_d, D, D1, D2)
                v_next = load_rows(p_v, next_token * (v_n * ALIGN), next_present, v_d, DV, DV1, DV2)
        else:
            token, present = members(table, part, first, size, BT, FULL)
            k_rows = load_rows(p_k, token * (k_n * ALIGN), present, k_d, D, D1, D2)
            v_rows = load_rows(p_v, token * (v_n * ALIGN), present, v_d, DV, DV1, DV2)
        v_rows = cast(v_rows, COMPUTE)
        if NORMALIZER == "paper" and not DOTS:
            k_rows = present_features(k_rows, present, eps, D, D1, FEATURE_MAP, COMPUTE)
            vector = column_sums(k_rows, vector)
        else:
            k_rows = features(k_rows, eps, FEATURE_MAP, COMPUTE)  # zeros multiply absent rows
            if NORMALIZER == "paper":
                if DV < DV1 + DV2:
                    v_rows = append_column(v_rows, present.to(COMPUTE), DV, DV1)
                else:
                    vector = add_outer_columns(
                        k_rows, tl.broadcast_to(present.to(COMPUTE)[:, None], (BT, 16)), vector, PRECISION
                    )
        matrix = add_outer(k_rows, v_rows, matrix, PRECISION)
    store_matrix(summary + pid * (D * DV), matrix, D, D1, DV, DV1)
    if NORMALIZER == "paper":
        if not DOTS:
            store_vector(key_sum + pid * D, vector, D, D1)
        elif DV < DV1 + DV2:
            store_column(key_sum + pid * D, matrix, D, D1, DV, DV1)
        else:
            store_columns(key_sum + pid * D, vector, 1, D, D1)


@triton.jit
def _mixing_weights(p_mixing, first, M, stride_source, m_rows, BC: tl.constexpr, COMPUTE: tl.constexpr):
    """Load the weights of rows for the blocks from ``first`` on: [rows, BC]."""
    block = first + tl.arange(0, BC)
    pointers = p_mixing + block[None, :] * stride_source
    return tl.load(pointers, mask=m_rows[:, None] & (block < M)[None, :], other=0.0).to(COMPUTE)


@triton.jit
def _summary_tile(base, first, columns, M, SIZE: tl.constexpr, BC: tl.constexpr):
    """Load columns of the summaries of the blocks from ``first`` on: [BC, columns]."""
    block = first + tl.arange(0, BC)
    pointers = base + block[:, None].to(tl.int64) * SIZE + columns[None, :]
    return tl.load(pointers, mask=(block < M)[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def mix_kernel(
    summary, vector, mixing, mixed, mixed_vector,
    mixing_h, mixing_row, mixing_source,
    H, M, row_tiles, shares,
    SIZE: tl.constexpr, VECTOR_SIZE: tl.constexpr, VECTOR_TILE: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr, NORMALIZER: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Mix matrices and vectors: mixed summary i is the sum over blocks b of mixing[i, b] times summary b.

    A program mixes every ``shares``-th tile of columns. It keeps its weights on chip in CHUNKS tiles of BC blocks;
    CHUNKS is 0 where they are too many. It mixes at most one tile of the vectors.
    """
    pid = tl.program_id(0)
    if REVERSED:
        pid = tl.num_programs(0) - 1 - pid
    rows = (pid % row_tiles) * BM + tl.arange(0, BM)
    m_rows = rows < M
    share = pid // row_tiles % shares
    pid_bh = (pid // row_tiles // shares).to(tl.int64)
    p_mixing = mixing + (pid_bh % H) * mixing_h + rows[:, None] * mixing_row
    p_summary = summary + pid_bh * M * SIZE
    p_mixed = mixed + (pid_bh * M + rows)[:, None] * SIZE
    weights = ()
    for chunk in tl.static_range(CHUNKS):
        weights = weights + (_mixing_weights(p_mixing, chunk * BC, M, mixing_source, m_rows, BC, COMPUTE),)
    for tile in range(share, tl.cdiv(SIZE, BF), shares):
        columns = tile * BF + tl.arange(0, BF)
        accumulator = tl.zeros((BM, BF), tl.float32)
        if CHUNKS > 0:
            for chunk in tl.static_range(CHUNKS):
                b_summary = _summary_tile(p_summary, chunk * BC, columns, M, SIZE, BC).to(COMPUTE)
                accumulator = tl.dot(weights[chunk], b_summary, accumulator, input_precision=PRECISION)
        else:
            for first in range(0, M, BC):
                b_weights = _mixing_weights(p_mixing, first, M, mixing_source, m_rows, BC, COMPUTE)
                b_summary = _summary_tile(p_summary, first, columns, M, SIZE, BC).to(COMPUTE)
                accumulator = tl.dot(b_weights, b_summary, accumulator, input_precision=PRECISION)
        m_mixed = m_rows[:, None] & (columns < SIZE)[None, :]
        tl.store(p_mixed + columns[None, :], accumulator.to(mixed.dtype.element_ty), mask=m_mixed)
    if NORMALIZER == "paper" and share * VECTOR_TILE < VECTOR_SIZE:
        columns = share * VECTOR_TILE + tl.arange(0, VECTOR_TILE)
        p_vector = vector + pid_bh * M * VECTOR_SIZE
        accumulator = tl.zeros((BM, VECTOR_TILE), tl.float32)
        for first in tl.range(0, M, BC, num_stages=1):
            b_weights = _mixing_weights(p_mixing, first, M, mixing_source, m_rows, BC, COMPUTE)
            b_vector = _summary_tile(p_vector, first, columns, M, VECTOR_SIZE, BC)
            accumulator = dot_exact(b_weights, b_vector, accumulator, COMPUTE, PRECISION)
        p_mixed_vector = mixed_vector + (pid_bh * M + rows)[:, None] * VECTOR_SIZE
        m_mixed = m_rows[:, None] & (columns < VECTOR_SIZE)[None, :]
        tl.store(p_mixed_vector + columns[None, :], accumulator, mask=m_mixed)


@triton.jit
def apply_kernel(
    q, mixed, mixed_key_sum, out, inverse, table,
    q_b, q_n, q_h, q_d,
    N, H, M, C, split, size, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    BT: tl.constexpr, SINGLE: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, FULL: tl.constexpr,
    DOTS: tl.constexpr,
):  # fmt: skip
    b, h, part, pid_bh = program(H, C)
    owner = pid_bh * M + part // split
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    next_token, next_present = members(table, part, 0, size, BT, FULL)
    q_next = load_rows(p_q, next_token * (q_n * ALIGN), next_present, q_d, D, D1, D2)
    matrix = load_matrix(mixed + owner * (D * DV), D, D1, D2, DV, DV1, DV2)
    if NORMALIZER == "paper":
        vector = load_vector(mixed_key_sum + owner * D, D, D1, D2)
    matrix = cast_matrix(matrix, COMPUTE)
    if DOTS and NORMALIZER == "paper":
        if DV + 2 <= DV1 + DV2:
            matrix = append_halves(matrix, vector, DV, DV1)
        else:
            columns = columns_of(vector, COMPUTE)
    for first in range(0, BT if SINGLE else size, BT):
        token, present, q_rows = next_token, next_present, q_next
        if not SINGLE:
            next_token, next_present = members(table, part, first + BT, size, BT)
            q_next = load_rows(p_q, next_token * (q_n * ALIGN), next_present, q_d, D, D1, D2)
        q_rows = features(q_rows, eps, FEATURE_MAP, COMPUTE)  # zeros multiply absent columns
        o_rows = dot_matrix(q_rows, matrix, zeros(BT, DV1, DV2), PRECISION)
        p_inverse = inverse + pid_bh * N + token
        if NORMALIZER == "paper":
            if not DOTS:
                denominator = row_sums(q_rows, vector)
            elif DV + 2 <= DV1 + DV2:
                denominator = sum_of_halves(o_rows, DV, DV1)
            else:
                denominator = sum_of_halves(dot_matrix(q_rows, columns, zeros(BT, 16, 0), PRECISION), 0, 16)
            b_inverse = 1.0 / tl.where(present, denominator, 1.0)
            tl.store(p_inverse, b_inverse, mask=present)
            o_rows = scale_rows(o_rows, b_inverse)
        elif NORMALIZER == "given":
            b_inverse = tl.load(p_inverse, mask=present, other=0.0)
            o_rows = scale_rows(o_rows, b_inverse)
        store_rows(out + (b * N * H + h) * DV, token * (H * DV), present, 1, o_rows, DV, DV1)


@triton.jit
def backward_query_kernel(
    q, mixed, mixed_key_sum, inverse, d_out, d_q, d_scale, summary, vector_sum, table,
    q_b, q_n, q_h, q_d, g_b, g_n, g_h, g_d,
    N, H, M, C, split, size, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    BT: tl.constexpr, SINGLE: tl.constexpr, PACK: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr, DOTS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and the summary R, r of queries and output gradients.

    Denominators divide the gradients, or with DIVIDE the queries: that takes fewer registers where one tile is a whole
    part, and so does storing R at once. R and r cancel where values are alike, so both are sums of the same rounded
    rows.

    PACK: see ``triton_launch.gradient``.
    """
    b, h, part, pid_bh = program(H, C)
    pid = pid_bh * C + part
    owner = pid_bh * M + part // split
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_g = rows_of_head(d_out, b, h, g_b, g_h, ALIGN)
    if STAGES == 0:
        next_token, next_present = members(table, part, 0, size, BT, FULL)
        q_next = load_rows(p_q, next_token * (q_n * ALIGN), next_present, q_d, D, D1, D2)
        g_next = load_rows(p_g, next_token * (g_n * ALIGN), next_present, g_d, DV, DV1, DV2)
    mixed_matrix = load_matrix(mixed + owner * (D * DV), D, D1, D2, DV, DV1, DV2)
    if NORMALIZER == "paper":
        mixed_vector = load_vector(mixed_key_sum + owner * D, D, D1, D2)
    mixed_matrix = cast_matrix(mixed_matrix, COMPUTE)
    matrix = zero_matrix(D1, D2, DV1, DV2)
    vector = zero_columns(D1, D2) if DOTS else zero_vector(D1, D2)
    for first in tl.range(0, BT if SINGLE else size, BT, num_stages=STAGES if STAGES > 0 else 1):
        if STAGES == 0:
            token, present, q_raw, g_rows = next_token, next_present, q_next, g_next
        else:
            token, present = members(table, part, first, size, BT, FULL)
            q_raw = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
            g_rows = load_rows(p_g, token * (g_n * ALIGN), present, g_d, DV, DV1, DV2)
        if NORMALIZER != "none":
            b_inverse = tl.load(inverse + pid_bh * N + token, mask=present, other=0.0)
        if STAGES == 0 and not SINGLE:
            next_token, next_present = members(table, part, first + BT, size, BT)
            q_next = load_rows(p_q, next_token * (q_n * ALIGN), next_present, q_d, D, D1, D2)
            g_next = load_rows(p_g, next_token * (g_n * ALIGN), next_present, g_d, DV, DV1, DV2)
        q_rows = features(q_raw, eps, FEATURE_MAP, COMPUTE)  # zero gradients multiply absent rows
        summed_rows = q_rows
        if NORMALIZER != "none":
            if DIVIDE:
                summed_rows = cast(scale_rows(q_rows, b_inverse), COMPUTE)
            else:
                g_rows = scale_rows(g_rows, b_inverse)
        g_rows = cast(g_rows, COMPUTE)
        matrix = add_outer(summed_rows, g_rows, matrix, PRECISION)
        if SINGLE:
            store_matrix(summary + pid * (D * DV), matrix, D, D1, DV, DV1)
        dq_rows = dot_matrix_transposed(g_rows, mixed_matrix, zeros(BT, D1, D2), PRECISION)
        if NORMALIZER != "none":
            if DIVIDE:
                dq_rows = scale_rows(dq_rows, b_inverse)
            # Gradient of the denominator, -(d_out . out) / denominator: out itself is not needed.
            products = -row_products(q_rows, dq_rows)
            d_denominator = products * b_inverse
            tl.store(d_scale + pid_bh * N + token, d_denominator, mask=present)
            if NORMALIZER == "paper":
                weights = products if DIVIDE else d_denominator
                if DOTS:
                    vector = add_outer_columns(summed_rows, halves(weights, COMPUTE), vector, PRECISION)
                else:
                    vector = weighted_column_sums(summed_rows, weights, vector)
                dq_rows = add_outer_vector(dq_rows, d_denominator, mixed_vector)
        dq_rows = feature_gradients(q_raw, dq_rows, FEATURE_MAP)
        store_rows(d_q + (b * N * H * PACK + h) * D, token * (PACK * H * D), present, 1, dq_rows, D, D1)
    if not SINGLE:
        store_matrix(summary + pid * (D * DV), matrix, D, D1, DV, DV1)
    if NORMALIZER == "paper":
        if DOTS:
            store_columns(vector_sum + pid * D, vector, 2, D, D1)
        else:
            store_vector(vector_sum + pid * D, vector, D, D1)


@triton.jit
def backward_key_kernel(
    k, v, mixed, mixed_vector_sum, d_k, d_v, table,
    k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d,
    N, H, M, C, split, size, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    BT: tl.constexpr, SINGLE: tl.constexpr, PACK: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, FULL: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values from the mixed summaries R, r. PACK: see ``triton_launch.gradient``."""
    d_k, d_v = key_and_value_gradients(d_k, d_v, H * D)
    b, h, part, pid_bh = program(H, C, REVERSED)
    owner = pid_bh * M + part // split
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    next_token, next_present = members(table, part, 0, size, BT, FULL)
    k_next = load_rows(p_k, next_token * (k_n * ALIGN), next_present, k_d, D, D1, D2)
    v_next = load_rows(p_v, next_token * (v_n * ALIGN), next_present, v_d, DV, DV1, DV2)
    matrix = load_matrix(mixed + owner * (D * DV), D, D1, D2, DV, DV1, DV2)
    if NORMALIZER == "paper":
        vector = load_vector(mixed_vector_sum + owner * D, D, D1, D2)
    matrix = cast_matrix(matrix, COMPUTE)
    for first in range(0, BT if SINGLE else size, BT):
        token, present, k_raw, v_rows = next_token, next_present, k_next, v_next
        if not SINGLE:
            next_token, next_present = members(table, part, first + BT, size, BT)
            k_next = load_rows(p_k, next_token * (k_n * ALIGN), next_present, k_d, D, D1, D2)
            v_next = load_rows(p_v, next_token * (v_n * ALIGN), next_present, v_d, DV, DV1, DV2)
        k_rows = features(k_raw, eps, FEATURE_MAP, COMPUTE)  # zeros multiply absent columns, absent rows are not stored
        dv_rows = dot_matrix(k_rows, matrix, zeros(BT, DV1, DV2), PRECISION)
        store_rows(d_v + (b * N * H * PACK + h) * DV, token * (PACK * H * DV), present, 1, dv_rows, DV, DV1)
        dk_rows = zeros(BT, D1, D2)
        if NORMALIZER == "paper":
            dk_rows = add_vector(dk_rows, vector)
        dk_rows = dot_matrix_transposed(cast(v_rows, COMPUTE), matrix, dk_rows, PRECISION)
        dk_rows = feature_gradients(k_raw, dk_rows, FEATURE_MAP)
        store_rows(d_k + (b * N * H * PACK + h) * D, token * (PACK * H * D), present, 1, dk_rows, D, D1)


@triton.jit
def mixing_gradient_kernel(
    summary, vector, key_summary, key_sum, d_mixing, mixing, mixed, mixed_vector,
    mixing_h, mixing_row, mixing_source,
    H, M, row_tiles, splits,
    SIZE: tl.constexpr, VECTOR_SIZE: tl.constexpr,
    BM: tl.constexpr, BF: tl.constexpr, MIX: tl.constexpr, NORMALIZER: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute <R_i, S_j> + r_i . z_j of all blocks i, j, over a share of the columns: [B, splits, H, M, M].

    With MIX, for up to BM blocks, sum mixing[i, b] R_b and mixing[i, b] r_b too, as ``mix_kernel`` would.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    rows = (pid % row_tiles) * BM + tl.arange(0, BM)
    columns = (pid // row_tiles % row_tiles) * BM + tl.arange(0, BM)
    share = pid // row_tiles // row_tiles % splits
    pid_bh = (pid // row_tiles // row_tiles // splits).to(tl.int64)
    p_rows = (pid_bh * M + rows)[:, None]
    p_columns = (pid_bh * M + columns)[:, None]
    m_rows, m_columns = (rows < M)[:, None], (columns < M)[:, None]
    accumulator = tl.zeros((BM, BM), tl.float32)
    if MIX:
        weights = _mixing_weights(
            mixing + (pid_bh % H) * mixing_h + rows[:, None] * mixing_row, 0, M, mixing_source, rows < M, BM, COMPUTE
        )
    for first in range(share * BF, SIZE, splits * BF):
        place = first + tl.arange(0, BF)[None, :]
        a = tl.load(summary + p_rows * SIZE + place, mask=m_rows & (place < SIZE), other=0.0).to(COMPUTE)
        c = tl.load(key_summary + p_columns * SIZE + place, mask=m_columns & (place < SIZE), other=0.0).to(COMPUTE)
        accumulator = tl.dot(a, tl.trans(c), accumulator, input_precision=PRECISION)
        if MIX:
            b_mixed = tl.dot(weights, a, input_precision=PRECISION).to(mixed.dtype.element_ty)
            tl.store(mixed + p_rows * SIZE + place, b_mixed, mask=m_rows & (place < SIZE))
    if NORMALIZER == "paper" and share == 0:
        for first in range(0, VECTOR_SIZE, 64):
            place = first + tl.arange(0, 64)[None, :]
            a = tl.load(vector + p_rows * VECTOR_SIZE + place, mask=m_rows & (place < VECTOR_SIZE), other=0.0)
            c = tl.load(key_sum + p_columns * VECTOR_SIZE + place, mask=m_columns & (place < VECTOR_SIZE), other=0.0)
            if MIX:
                b_mixed = dot_exact(weights, a, tl.zeros((BM, 64), tl.float32), COMPUTE, PRECISION)
                tl.store(mixed_vector + p_rows * VECTOR_SIZE + place, b_mixed, mask=m_rows & (place < VECTOR_SIZE))
            rounded = a.to(COMPUTE)
            accumulator = dot_exact(rounded, tl.trans(c), accumulator, COMPUTE, PRECISION)
            if COMPUTE == tl.bfloat16:
                rest = (a - rounded.to(tl.float32)).to(COMPUTE)
                accumulator = dot_exact(rest, tl.trans(c), accumulator, COMPUTE, PRECISION)
    matrix = (pid_bh // H * splits + share) * H + pid_bh % H
    p_gradient = d_mixing + (matrix * M + rows[:, None]) * M + columns[None, :]
    tl.store(p_gradient, accumulator, mask=m_rows & (columns < M)[None, :])


MAX_CHUNKS = 8
VECTOR_TILE = 64


class Summaries(NamedTuple):
    """Summaries of blocks or parts: matrices [B, H, M, D, Dv] and vectors [B, H, M, D] for the paper's normalizer."""

    matrix: Tensor
    vector: Tensor


class QueryGradients(NamedTuple):
    """The gradients of queries and denominators, and the summaries R and r of queries and output gradients."""

    query: Tensor
    denominator: Tensor
    summaries: Summaries


class MixingGradients(NamedTuple):
    """The gradient of the mixing, and the summaries R and r mixed by its transpose."""

    mixing: Tensor
    mixed: Summaries


def parts_of_a_block(settings: Settings) -> int:
    """Count the parts of each block."""
    return -(-settings.blocks.max_block_size // PART_TOKENS)


def _summed_parts(settings: Settings) -> int:
    """Count the parts whose summaries are summed: the parts of a block; causal attention mixes parts instead."""
    return 1 if settings.causal else parts_of_a_block(settings)


def count_summaries(settings: Settings) -> int:
    return settings.blocks.num_blocks * parts_of_a_block(settings) // _summed_parts(settings)


def _tiles_for_parts(
    table: tuple[tuning.Row, ...], x: Layout, y: Layout, settings: Settings, gradients: bool = False
) -> tuning.Tiles:
    """Choose the tiles of a table, no longer than the longest part of a block.

    Without mma.sync kernels of gradients keep longer ones for heads in two parts of columns: most are faster so.
    """
    c = choose_tiles(table, x, y)
    if gradients and not x.gpu.uses_mma_sync and any(tuning.head_parts(z.shape[-1])[1] for z in (x, y)):
        return c
    longest = triton.cdiv(settings.blocks.max_block_size, parts_of_a_block(settings))
    return c | {"BT": min(c["BT"], tuning.power_of_two(longest, 16))}


def _token_constants(
    q: Layout, v: Layout, settings: Settings, align: int, t: Tensor, c: tuning.Tiles, **defaults: Any
) -> dict[str, Any]:
    size, tile = t.shape[1], c["BT"]
    single = size <= tile
    tiles = defaults | {name: value for name, value in c.items() if name != "ONE_TILE"}
    if single and "STAGES" in tiles:
        tiles["STAGES"] = 0
    if single and tuning.crowds_registers(q.dtype, q.shape[-1]):
        tiles |= tuning.CROWDED
    # Where loads are written a tile ahead, one tile after the last is loaded, too.
    full = size % tile == 0 and t.numel() == q.shape[1] and (size == tile or tiles.get("STAGES", 0) > 0)
    return dict(SINGLE=single, FULL=full, num_stages=1) | kernel_constants(q, v, settings, align) | tiles


def _token_parts(q: Layout, settings: Settings, c: tuning.Tiles) -> tuple[Tensor, int]:
    """Return the parts of blocks for kernels that compute each token by itself, and how many a block has."""
    split = triton.cdiv(settings.blocks.max_block_size, c["BT"]) if c.get("ONE_TILE") else parts_of_a_block(settings)
    return parts(settings.blocks, split, q.device), split


class TokenPlan(NamedTuple):
    """The launch of a kernel of the summary regime, with the table of the tokens that a program takes."""

    table: Tensor
    launch: Launch


def part_summaries(q: Tensor, v: Tensor, settings: Settings) -> Summaries:
    """Allocate summaries of parts: [B, H, C, D, Dv], float32 if they are still to be summed, and vectors [B, H, C, D].

    Only the paper's normalizer needs vectors; others get none, [B, H, 0, D].
    """
    B, _, H, D = q.shape
    C = settings.blocks.num_blocks * parts_of_a_block(settings)
    dtype = storage_dtype(q.dtype) if _summed_parts(settings) == 1 else torch.float32
    vectors = C if settings.normalizer == "paper" else 0
    matrix = q.new_empty(B, H, C, D, v.shape[-1], dtype=dtype)
    return Summaries(matrix, q.new_empty(B, H, vectors, D, dtype=torch.float32))


def _sum_parts(of_parts: Summaries, q: Tensor, settings: Settings) -> Summaries:
    split = _summed_parts(settings)
    if split == 1:
        return of_parts
    matrix, vector = (x.unflatten(2, (-1, split)).sum(3) if x.numel() else x for x in of_parts)
    return Summaries(matrix.to(storage_dtype(q.dtype)), vector)


@planned
def _summarize(k: Layout, v: Layout, settings: Settings) -> TokenPlan:
    B, _, H, _ = k.shape
    t = parts(settings.blocks, parts_of_a_block(settings), k.device)
    c = _tiles_for_parts(tuning.SUMMARIZE, k, v, settings)
    align = alignment(k, v)
    numbers = (*row_strides(align, k, v), H, *t.shape, settings.eps)
    constants = _token_constants(k, v, settings, align, t, c, STAGES=0, DOTS=False)
    return TokenPlan(t, Launch(summarize_kernel, (B * H * len(t),), numbers, constants))


def summarize(k: Tensor, v: Tensor, settings: Settings) -> Summaries:
    """Compute the summaries S [B, H, M, D, Dv] and z [B, H, M, D] of keys and values."""
    t, launch = _summarize(layout(k), layout(v), settings)
    summaries = part_summaries(k, v, settings)
    launch(k, v, *summaries, t)
    return _sum_parts(summaries, k, settings)


@planned
def _mix(matrix: Layout, vector: Layout, mixing: Layout, transposed: bool, settings: Settings) -> Launch:
    B, H, M = matrix.shape[:3]
    size = matrix.shape[3:].numel()
    c = tuning.mix_tiles(M, matrix.dtype)
    row_tiles, column_tiles, chunks = triton.cdiv(M, c["BM"]), triton.cdiv(size, c["BF"]), triton.cdiv(M, c["BC"])
    shares = max(triton.cdiv(column_tiles, c["per"]), triton.cdiv(vector.shape[-1], VECTOR_TILE))
    *head, row, source = mixing.strides
    strides = mixing_strides((*head, source, row) if transposed else mixing.strides)
    compute, precision = numerics(matrix.dtype, mixing.gpu)
    constants = dict(
        REVERSED=not transposed,
        SIZE=size, VECTOR_SIZE=vector.shape[-1], VECTOR_TILE=VECTOR_TILE, CHUNKS=chunks if chunks <= MAX_CHUNKS else 0,
        NORMALIZER=normalizer_name(settings), COMPUTE=compute, PRECISION=precision,
        **{name: value for name, value in c.items() if name != "per"},
    )  # fmt: skip
    return Launch(mix_kernel, (B * H * row_tiles * shares,), (*strides, H, M, row_tiles, shares), constants)


def mix(summaries: Summaries, mixing: Tensor, settings: Settings, transposed: bool = False) -> Summaries:
    """Mix the summaries by the mixing matrix or its transpose; shapes stay."""
    launch = _mix(*map(layout, (*summaries, mixing)), transposed, settings)
    mixed = Summaries(*map(torch.empty_like, summaries))
    launch(*summaries, mixing, *mixed)
    return mixed


@planned
def _apply(q: Layout, out: Layout, settings: Settings) -> TokenPlan:
    B, N, H, D = q.shape
    c = _tiles_for_parts(tuning.APPLY, q, out, settings)
    t, split = _token_parts(q, settings, c)
    align = alignment(q)
    numbers = (*row_strides(align, q), N, H, settings.blocks.num_blocks, len(t), split, t.shape[1], settings.eps)
    constants = _token_constants(q, out, settings, align, t, c, DOTS=False)
    return TokenPlan(t, Launch(apply_kernel, (B * H * len(t),), numbers, constants))


def apply(q: Tensor, mixed: Summaries, inverse: Tensor, out: Tensor, settings: Settings) -> None:
    """Multiply queries by mixed summaries: fill ``out`` and, for the paper's normalizer, ``inverse``."""
    t, launch = _apply(layout(q), layout(out), settings)
    launch(q, *mixed, out, inverse, t)


def summary_backward(call: Backward) -> Gradients:
    """Compute the gradients of all inputs from the block summaries of the forward pass."""
    d_out, q, k, v, mixing, _, (inverse, *summarized), packed, settings = call
    summaries = Summaries(*summarized)
    # The summaries are mixed again rather than saved; each result is freed before the next step takes memory.
    from_query = backward_query(q, mix(summaries, mixing, settings), inverse, d_out, packed, settings)
    from_mixing = mixing_gradient(from_query.summaries, summaries, mixing, settings)
    denominator, d_q = from_query.denominator, from_query.query
    del from_query
    d_k, d_v = backward_key(k, v, from_mixing.mixed, packed, settings)
    return Gradients(d_q, d_k, d_v, from_mixing.mixing, denominator)


@planned
def _backward_query(q: Layout, d_out: Layout, pack: int, settings: Settings) -> TokenPlan:
    B, N, H, D = q.shape
    t = parts(settings.blocks, parts_of_a_block(settings), q.device)
    c = _tiles_for_parts(tuning.BACKWARD_QUERY, q, d_out, settings, gradients=True)
    single = t.shape[1] <= c["BT"]
    if not single:
        c = choose_tiles(tuning.BACKWARD_QUERY_LONG, q, d_out)
    align = alignment(q, d_out)
    sizes = (N, H, settings.blocks.num_blocks, len(t), parts_of_a_block(settings), t.shape[1])
    constants = _token_constants(q, d_out, settings, align, t, c, STAGES=0, DOTS=False, DIVIDE=single, PACK=pack)
    numbers = (*row_strides(align, q, d_out), *sizes, settings.eps)
    return TokenPlan(t, Launch(backward_query_kernel, (B * H * len(t),), numbers, constants))


def backward_query(
    q: Tensor, mixed: Summaries, inverse: Tensor, d_out: Tensor, packed: Tensor | None, settings: Settings
) -> QueryGradients:
    B, N, H, D = q.shape
    t, launch = _backward_query(layout(q), layout(d_out), pack_size(packed), settings)
    d_q = query_gradient(q, packed)
    d_denominator = q.new_empty(B, H, N, dtype=torch.float32)
    summaries = part_summaries(q, d_out, settings)
    launch(q, *mixed, inverse, d_out, d_q, d_denominator, *summaries, t)
    return QueryGradients(d_q, d_denominator, _sum_parts(summaries, q, settings))


class MixingGradientPlan(NamedTuple):
    """The launch for the gradient of the mixing.

    Attributes:
        shape: of the unsummed gradients, [B, splits, H, M, M].
        together: whether the kernel mixes the summaries of the backward pass, too.
    """

    launch: Launch
    shape: tuple[int, ...]
    together: bool


@planned
def _mixing_gradient(R: Layout, r: Layout, mixing: Layout, settings: Settings) -> MixingGradientPlan:
    B, H, M = R.shape[:3]
    size = R.shape[3:].numel()
    c = tuning.mixing_gradient_tiles(M, R.dtype, R.gpu.shared_memory)
    row_tiles = triton.cdiv(M, c["BM"])
    splits = max(1, min(triton.cdiv(size, c["BF"] * 4), 1024 // (B * H * row_tiles * row_tiles)))
    compute, precision = numerics(R.dtype, R.gpu)
    together = row_tiles == 1
    *head, row, column = mixing.strides
    constants = dict(
        SIZE=size, VECTOR_SIZE=r.shape[-1], MIX=together,
        NORMALIZER=normalizer_name(settings), COMPUTE=compute, PRECISION=precision, **c,
    )  # fmt: skip
    numbers = (*mixing_strides((*head, column, row)), H, M, row_tiles, splits)
    launch = Launch(mixing_gradient_kernel, (B * H * row_tiles * row_tiles * splits,), numbers, constants)
    return MixingGradientPlan(launch, (B, splits, H, M, M), together)


def mixing_gradient(backward: Summaries, forward: Summaries, mixing: Tensor, settings: Settings) -> MixingGradients:
    """Compute the gradient of the mixing from the summaries R, r of the backward pass and S, z of the forward pass.

    It is <R_i, S_j> + r_i . z_j, summed over the batch, and over heads that share the mixing: [(H,) M, M]
    float32. Where one tile holds all blocks, the kernel mixes R and r as it reads them.
    """
    launch, shape, together = _mixing_gradient(*map(layout, (*backward, mixing)), settings)
    d_mixing = mixing.new_empty(shape, dtype=torch.float32)
    mixed = Summaries(*map(torch.empty_like, backward)) if together else None
    launch(*backward, *forward, d_mixing, mixing, *(mixed or (None, None)))
    mixed = mixed or mix(backward, mixing, settings, transposed=True)
    return MixingGradients(sum_leading(d_mixing, 2 if mixing.ndim == 3 else 3), mixed)


@planned
def _backward_key(k: Layout, v: Layout, pack: int, settings: Settings) -> TokenPlan:
    B, N, H, _ = k.shape
    c = _tiles_for_parts(tuning.BACKWARD_KEY, k, v, settings, gradients=True)
    t, split = _token_parts(k, settings, c)
    align = alignment(k, v)
    numbers = (*row_strides(align, k, v), N, H, settings.blocks.num_blocks, len(t), split, t.shape[1], settings.eps)
    mixed_apart = settings.blocks.num_blocks > tuning.MIXING_TILE
    constants = _token_constants(k, v, settings, align, t, c, PACK=pack, REVERSED=mixed_apart)
    return TokenPlan(t, Launch(backward_key_kernel, (B * H * len(t),), numbers, constants))


def backward_key(
    k: Tensor, v: Tensor, mixed: Summaries, packed: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of keys and values from the mixed summaries of queries and output gradients."""
    t, launch = _backward_key(layout(k), layout(v), pack_size(packed), settings)
    d_k, d_v = key_gradients(k, v, packed)
    launch(k, v, *mixed, d_k, d_v, t)
    return d_k, d_v
