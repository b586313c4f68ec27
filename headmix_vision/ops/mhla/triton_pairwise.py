"""MHLA for short sequences: scores times mixing weight, token by token, no block summaries.

B batch, N tokens, H heads, M blocks, D and Dv head dims. A table lists the tokens block by block in places; a *run* is
RUN consecutive places of one block (-1: a place without token), so the weights of a tile of scores are one column per
run of keys, and reach the scores by a broadcast in registers. The *resident* kernel holds all keys and values
of a head on chip; the others pass them through in tiles and take any length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headmix_vision.ops.mhla.triton_tiles import (
    cast,
    dot_columns,
    dot_rows,
    feature_gradients,
    features,
    load_rows,
    present_features,
    row_products,
    rows_of_head,
    scale_rows,
    store_rows,
    zeros,
)


@triton.jit
def _places(table, blocks, first, places, SIZE: tl.constexpr, RUN: tl.constexpr, FULL: tl.constexpr):
    """Tokens [SIZE] from a place on, whether they exist, and their blocks."""
    place = first + tl.arange(0, SIZE)
    if FULL:
        return tl.load(table + place).to(tl.int64), tl.full((SIZE,), 1, tl.int1), tl.load(blocks + place // RUN)
    else:
        token = tl.load(table + place, mask=place < places, other=-1).to(tl.int64)
        return token, token >= 0, tl.load(blocks + place // RUN, mask=place < places, other=0)


@triton.jit
def _features(rows, present, eps, D: tl.constexpr, D1: tl.constexpr, FEATURE_MAP: tl.constexpr, FULL: tl.constexpr,
              COMPUTE: tl.constexpr):  # fmt: skip
    """Feature-mapped rows, zero in absent rows and columns."""
    if FULL and D1 == D:
        return features(rows, eps, FEATURE_MAP, COMPUTE)
    else:
        return present_features(rows, present, eps, D, D1, FEATURE_MAP, COMPUTE)


@triton.jit
def _weights(
    mixing, row_block, blocks, first, places, stride_row, stride_column, SIZE: tl.constexpr, RUN: tl.constexpr
):
    """Mixing weights of rows with the runs of a tile of SIZE places: [rows, SIZE / RUN] in float32."""
    run = first // RUN + tl.arange(0, SIZE // RUN)
    column_block = tl.load(blocks + run, mask=run * RUN < places, other=0)
    return tl.load(mixing + row_block[:, None] * stride_row + column_block[None, :] * stride_column).to(tl.float32)


@triton.jit
def _weigh(scores, weights):
    """Scores [rows, columns] times weights [rows, runs]."""
    ROWS: tl.constexpr = scores.shape[0]
    COLUMNS: tl.constexpr = scores.shape[1]
    RUNS: tl.constexpr = weights.shape[1]
    if RUNS == 1 or RUNS == COLUMNS:
        return scores * weights
    else:
        runs = scores.reshape((ROWS, RUNS, COLUMNS // RUNS)) * weights[:, :, None]
        return runs.reshape((ROWS, COLUMNS))


@triton.jit
def _sum_runs(x, RUN: tl.constexpr):
    """Sums of a matrix over its runs: [rows, columns] -> [rows / RUN, columns / RUN]."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if RUN == 1:
        return x
    else:
        by_column = tl.sum(x.reshape((ROWS, COLUMNS // RUN, RUN)), 2)
        return tl.sum(by_column.reshape((ROWS // RUN, RUN, COLUMNS // RUN)), 1)


@triton.jit
def _attend(q_rows, k_rows, v_rows, weights, accumulator, denominator, NORMALIZER: tl.constexpr,
            COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Numerators and denominators of a tile of queries, with one more tile of keys."""
    BQ: tl.constexpr = q_rows[0].shape[0]
    BK: tl.constexpr = k_rows[0].shape[0]
    scores = dot_rows(q_rows, k_rows, tl.zeros((BQ, BK), tl.float32), PRECISION)
    weighted = _weigh(scores, weights)
    if NORMALIZER == "paper":
        denominator += tl.sum(weighted, 1)
    return dot_columns(weighted.to(COMPUTE), v_rows, accumulator, PRECISION), denominator


@triton.jit
def _store_output(out, inverse, accumulator, denominator, b, h, N, H, token, present, DV: tl.constexpr,
                  DV1: tl.constexpr, NORMALIZER: tl.constexpr):  # fmt: skip
    """Divide by the denominators and store; ``inverse`` [B, H, N] takes their inverses, or gives them."""
    p_inverse = inverse + (b * H + h) * N + token
    if NORMALIZER == "paper":
        b_inverse = 1.0 / tl.where(present, denominator, 1.0)
        tl.store(p_inverse, b_inverse, mask=present)
        accumulator = scale_rows(accumulator, b_inverse)
    elif NORMALIZER == "given":
        accumulator = scale_rows(accumulator, tl.load(p_inverse, mask=present, other=0.0))
    store_rows(out + (b * N * H + h) * DV, token * (H * DV), present, 1, accumulator, DV, DV1)


@triton.jit
def _gradient_rows(g_rows, o_rows, inverse, d_scale, place, present, NORMALIZER: tl.constexpr, COMPUTE: tl.constexpr):
    """Output gradients over the denominators, and the share of each score in the denominator's gradient."""
    shift = tl.zeros((g_rows[0].shape[0],), tl.float32)
    if NORMALIZER != "none":
        b_inverse = tl.load(inverse + place, mask=present, other=0.0)
        d_denominator = -row_products(g_rows, o_rows) * b_inverse
        tl.store(d_scale + place, d_denominator, mask=present)
        if NORMALIZER == "paper":
            shift = d_denominator
        g_rows = scale_rows(g_rows, b_inverse)
    return cast(g_rows, COMPUTE), shift


@triton.jit
def _backward_query(q_rows, g_rows, shift, k_rows, v_rows, weights, accumulator, p_mixing, RUN: tl.constexpr,
                    COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Query gradients with one more tile of keys; stores the sums over runs that make the mixing gradient."""
    BQ: tl.constexpr = q_rows[0].shape[0]
    BK: tl.constexpr = k_rows[0].shape[0]
    scores = dot_rows(q_rows, k_rows, tl.zeros((BQ, BK), tl.float32), PRECISION)
    d_weighted = dot_rows(g_rows, v_rows, tl.zeros((BQ, BK), tl.float32), PRECISION) + shift[:, None]
    tl.store(p_mixing, _sum_runs(scores * d_weighted, RUN))
    return dot_columns(_weigh(d_weighted, weights).to(COMPUTE), k_rows, accumulator, PRECISION)


@triton.jit
def _backward_key(q_rows, g_rows, shift, k_rows, v_rows, weights, dk_rows, dv_rows,
                  COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Key and value gradients with one more tile of queries; scores are transposed, [keys, queries]."""
    BQ: tl.constexpr = q_rows[0].shape[0]
    BK: tl.constexpr = k_rows[0].shape[0]
    scores = dot_rows(k_rows, q_rows, tl.zeros((BK, BQ), tl.float32), PRECISION)
    dv_rows = dot_columns(_weigh(scores, weights).to(COMPUTE), g_rows, dv_rows, PRECISION)
    d_scores = dot_rows(v_rows, g_rows, tl.zeros((BK, BQ), tl.float32), PRECISION) + shift[None, :]
    return dot_columns(_weigh(d_scores, weights).to(COMPUTE), q_rows, dk_rows, PRECISION), dv_rows


@triton.jit
def pairwise_forward_kernel(
    q, k, v, mixing, out, inverse, table, blocks,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, mixing_h, mixing_i, mixing_j,
    N, H, places, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    RUN: tl.constexpr, FULL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, NORMALIZER: tl.constexpr,
    FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(places, BQ)
    pid_bh = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BQ
    b, h = (pid_bh // H).to(tl.int64), pid_bh % H
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_mixing = mixing + h * mixing_h
    token, present, q_block = _places(table, blocks, first, places, BQ, RUN, FULL)
    q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
    q_rows = _features(q_rows, present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
    accumulator, denominator = zeros(BQ, DV1, DV2), tl.zeros((BQ,), tl.float32)
    for key in range(0, places, BK):
        k_token, k_present, k_block = _places(table, blocks, key, places, BK, RUN, FULL)
        k_rows = load_rows(p_k, k_token * (k_n * ALIGN), k_present, k_d, D, D1, D2)
        v_rows = load_rows(p_v, k_token * (v_n * ALIGN), k_present, v_d, DV, DV1, DV2)
        weights = _weights(p_mixing, q_block, blocks, key, places, mixing_i, mixing_j, BK, RUN)
        k_rows = _features(k_rows, k_present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
        accumulator, denominator = _attend(
            q_rows, k_rows, cast(v_rows, COMPUTE), weights, accumulator, denominator, NORMALIZER, COMPUTE, PRECISION
        )
    _store_output(out, inverse, accumulator, denominator, b, h, N, H, token, present, DV, DV1, NORMALIZER)


@triton.jit
def resident_forward_kernel(
    q, k, v, mixing, out, inverse, table, blocks,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, mixing_h, mixing_i, mixing_j,
    N, H, places, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    RUN: tl.constexpr, FULL: tl.constexpr, TILES: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_mixing = mixing + h * mixing_h
    k_tiles = ()
    v_tiles = ()
    for tile in tl.static_range(TILES):
        k_token, k_present, k_block = _places(table, blocks, tile * BK, places, BK, RUN, FULL)
        k_rows = load_rows(p_k, k_token * (k_n * ALIGN), k_present, k_d, D, D1, D2)
        v_rows = load_rows(p_v, k_token * (v_n * ALIGN), k_present, v_d, DV, DV1, DV2)
        k_tiles = k_tiles + (_features(k_rows, k_present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE),)
        v_tiles = v_tiles + (cast(v_rows, COMPUTE),)
    for query in range(0, places, BQ):
        token, present, q_block = _places(table, blocks, query, places, BQ, RUN, FULL)
        q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
        q_rows = _features(q_rows, present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
        accumulator, denominator = zeros(BQ, DV1, DV2), tl.zeros((BQ,), tl.float32)
        for tile in tl.static_range(TILES):
            weights = _weights(p_mixing, q_block, blocks, tile * BK, places, mixing_i, mixing_j, BK, RUN)
            accumulator, denominator = _attend(
                q_rows, k_tiles[tile], v_tiles[tile], weights, accumulator, denominator, NORMALIZER, COMPUTE, PRECISION
            )
        _store_output(out, inverse, accumulator, denominator, b, h, N, H, token, present, DV, DV1, NORMALIZER)


@triton.jit
def pairwise_backward_query_kernel(
    q, k, v, mixing, out, inverse, d_out, d_q, d_scale, d_mixing, table, blocks,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, o_b, o_n, o_h, o_d, g_b, g_n, g_h, g_d,
    mixing_h, mixing_i, mixing_j,
    N, H, places, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    RUN: tl.constexpr, FULL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, NORMALIZER: tl.constexpr,
    FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(places, BQ)
    pid_bh = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BQ
    b, h = (pid_bh // H).to(tl.int64), pid_bh % H
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_o = rows_of_head(out, b, h, o_b, o_h, ALIGN)
    p_g = rows_of_head(d_out, b, h, g_b, g_h, ALIGN)
    p_mixing = mixing + h * mixing_h
    token, present, q_block = _places(table, blocks, first, places, BQ, RUN, FULL)
    q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
    g_rows = load_rows(p_g, token * (g_n * ALIGN), present, g_d, DV, DV1, DV2)
    o_rows = g_rows
    if NORMALIZER != "none":
        o_rows = load_rows(p_o, token * (o_n * ALIGN), present, o_d, DV, DV1, DV2)
    place = (b * H + h) * N + token
    g_rows, shift = _gradient_rows(g_rows, o_rows, inverse, d_scale, place, present, NORMALIZER, COMPUTE)
    q_rows = _features(q_rows, present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
    accumulator = zeros(BQ, D1, D2)
    row_runs, column_runs = tiles * (BQ // RUN), tl.cdiv(places, BK) * (BK // RUN)
    row_run = first // RUN + tl.arange(0, BQ // RUN)
    p_row_run = d_mixing + (pid_bh.to(tl.int64) * row_runs + row_run[:, None]) * column_runs
    for key in range(0, places, BK):
        k_token, k_present, k_block = _places(table, blocks, key, places, BK, RUN, FULL)
        k_rows = load_rows(p_k, k_token * (k_n * ALIGN), k_present, k_d, D, D1, D2)
        v_rows = load_rows(p_v, k_token * (v_n * ALIGN), k_present, v_d, DV, DV1, DV2)
        weights = _weights(p_mixing, q_block, blocks, key, places, mixing_i, mixing_j, BK, RUN)
        k_rows = _features(k_rows, k_present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
        p_run = p_row_run + (key // RUN + tl.arange(0, BK // RUN))[None, :]
        accumulator = _backward_query(
            q_rows, g_rows, shift, k_rows, cast(v_rows, COMPUTE), weights, accumulator, p_run, RUN, COMPUTE, PRECISION
        )
    q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
    d_rows = feature_gradients(q_rows, accumulator, FEATURE_MAP)
    store_rows(d_q + (b * N * H + h) * D, token * (H * D), present, 1, d_rows, D, D1)


@triton.jit
def pairwise_backward_key_kernel(
    q, k, v, mixing, inverse, d_out, d_scale, d_k, d_v, table, blocks,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, g_b, g_n, g_h, g_d,
    mixing_h, mixing_i, mixing_j,
    N, H, places, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    RUN: tl.constexpr, FULL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, NORMALIZER: tl.constexpr,
    FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(places, BK)
    pid_bh = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BK
    b, h = (pid_bh // H).to(tl.int64), pid_bh % H
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_g = rows_of_head(d_out, b, h, g_b, g_h, ALIGN)
    p_mixing = mixing + h * mixing_h
    token, present, k_block = _places(table, blocks, first, places, BK, RUN, FULL)
    k_rows = load_rows(p_k, token * (k_n * ALIGN), present, k_d, D, D1, D2)
    v_rows = load_rows(p_v, token * (v_n * ALIGN), present, v_d, DV, DV1, DV2)
    k_rows = _features(k_rows, present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
    v_rows = cast(v_rows, COMPUTE)
    dk_rows, dv_rows = zeros(BK, D1, D2), zeros(BK, DV1, DV2)
    for query in range(0, places, BQ):
        q_token, q_present, q_block = _places(table, blocks, query, places, BQ, RUN, FULL)
        q_rows = load_rows(p_q, q_token * (q_n * ALIGN), q_present, q_d, D, D1, D2)
        g_rows = load_rows(p_g, q_token * (g_n * ALIGN), q_present, g_d, DV, DV1, DV2)
        place = (b * H + h) * N + q_token
        shift = tl.zeros((BQ,), tl.float32)
        if NORMALIZER == "paper":
            shift = tl.load(d_scale + place, mask=q_present, other=0.0)
        if NORMALIZER != "none":
            g_rows = scale_rows(g_rows, tl.load(inverse + place, mask=q_present, other=0.0))
        q_rows = _features(q_rows, q_present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
        weights = _weights(p_mixing, k_block, blocks, query, places, mixing_j, mixing_i, BQ, RUN)
        dk_rows, dv_rows = _backward_key(
            q_rows, cast(g_rows, COMPUTE), shift, k_rows, v_rows, weights, dk_rows, dv_rows, COMPUTE, PRECISION
        )
    k_rows = load_rows(p_k, token * (k_n * ALIGN), present, k_d, D, D1, D2)
    dk_rows = feature_gradients(k_rows, dk_rows, FEATURE_MAP)
    store_rows(d_k + (b * N * H + h) * D, token * (H * D), present, 1, dk_rows, D, D1)
    store_rows(d_v + (b * N * H + h) * DV, token * (H * DV), present, 1, dv_rows, DV, DV1)
