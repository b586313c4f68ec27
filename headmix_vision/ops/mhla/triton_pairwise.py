"""Compute MHLA for short sequences: weigh the score of each pair of tokens, without block summaries.

B batch, N tokens, H heads, M blocks, D and Dv head dims. A table lists the tokens block by block in places (-1: a place
without token); a *run* is RUN consecutive places of one block. Weights are one number per pair of runs: a kernel loads
those of a tile of scores from affine addresses and broadcasts them in registers. The *resident* kernels hold all keys
and values, or queries and output gradients, of a head on chip; the others read them tile by tile and take any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmix_vision.ops.mhla import triton_tiles as shared
from headmix_vision.ops.mhla import triton_tuning as tuning
from headmix_vision.ops.mhla.hopper import launch as hopper
from headmix_vision.ops.mhla.torch_impl import Settings
from headmix_vision.ops.mhla.triton_launch import (
    Backward,
    Forward,
    Gradients,
    Places,
    block_of_token,
    choose_tiles,
    kernel_constants,
    key_gradients,
    mixing_strides,
    pack_size,
    places,
    query_gradient,
    row_strides,
    sum_leading,
)
from headmix_vision.ops.mhla.triton_tiles import (
    cast,
    dot_columns,
    dot_rows,
    feature_gradients,
    features,
    key_and_value_gradients,
    load_rows,
    present_features,
    row_products,
    rows_of_head,
    scale_rows,
    store_rows,
    zeros,
)
from headmix_vision.ops.runtime import KernelFailed, Launch, Layout, alignment, layout, planned


@triton.jit
def _places(table, first, places, SIZE: tl.constexpr, FULL: tl.constexpr):
    """Load the tokens [SIZE] of the places from ``first`` on, and tell which exist."""
    place = first + tl.arange(0, SIZE)
    if FULL:
        return tl.load(table + place).to(tl.int64), tl.full((SIZE,), 1, tl.int1)
    else:
        token = tl.load(table + place, mask=place < places, other=-1).to(tl.int64)
        return token, token >= 0


@triton.jit
def _features(rows, present, eps, D: tl.constexpr, D1: tl.constexpr, FEATURE_MAP: tl.constexpr, FULL: tl.constexpr,
              COMPUTE: tl.constexpr):  # fmt: skip
    """Map rows to features, zero in absent rows and columns."""
    if FULL and D1 == D:
        return features(rows, eps, FEATURE_MAP, COMPUTE)
    else:
        return present_features(rows, present, eps, D, D1, FEATURE_MAP, COMPUTE)


@triton.jit
def _weights(weights, row, column, stride_row, stride_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             RUN: tl.constexpr):  # fmt: skip
    """Load weights of ROWS places from ``row`` and runs of COLUMNS places from ``column``: [ROWS, COLUMNS / RUN]."""
    weights += tl.cast(row // RUN, tl.int64) * stride_row + tl.cast(column // RUN, tl.int64) * stride_column
    places = (tl.arange(0, ROWS) // RUN)[:, None] * stride_row + tl.arange(0, COLUMNS // RUN)[None, :] * stride_column
    return tl.load(weights + places).to(tl.float32)


@triton.jit
def _weigh(scores, weights):
    """Multiply scores [rows, columns] by the weights of their runs [rows, runs]."""
    ROWS: tl.constexpr = scores.shape[0]
    COLUMNS: tl.constexpr = scores.shape[1]
    RUNS: tl.constexpr = weights.shape[1]
    if RUNS == 1 or RUNS == COLUMNS:
        return scores * weights
    else:
        runs = scores.reshape((ROWS, RUNS, COLUMNS // RUNS)) * weights[:, :, None]
        return runs.reshape((ROWS, COLUMNS))


@triton.jit
def causal_mask(query, key, QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """Tell which keys of a tile are at the place of each query or before it: ([QUERIES, KEYS],), or () for all."""
    if CAUSAL:
        return (query + tl.arange(0, QUERIES)[:, None] >= key + tl.arange(0, KEYS)[None, :],)
    else:
        return ()


@triton.jit
def _masked(x, mask):
    if len(mask) == 0:
        return x
    else:
        return tl.where(mask[0], x, 0.0)


@triton.jit
def _sum_runs(x, RUN: tl.constexpr):
    """Sum a matrix over its runs: [rows, columns] -> [rows / RUN, columns / RUN]."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if RUN == 1:
        return x
    else:
        by_column = tl.sum(x.reshape((ROWS, COLUMNS // RUN, RUN)), 2)
        return tl.sum(by_column.reshape((ROWS // RUN, RUN, COLUMNS // RUN)), 1)


@triton.jit
def attend(q_rows, k_rows, v_rows, weights, mask, accumulator, denominator, NORMALIZER: tl.constexpr,
            COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one more tile of keys to the numerators and denominators of a tile of queries."""
    BQ: tl.constexpr = q_rows[0].shape[0]
    BK: tl.constexpr = k_rows[0].shape[0]
    scores = dot_rows(q_rows, k_rows, tl.zeros((BQ, BK), tl.float32), PRECISION)
    weighted = _weigh(_masked(scores, mask), weights)
    if NORMALIZER == "paper":
        denominator += tl.sum(weighted, 1)
    return dot_columns(weighted.to(COMPUTE), v_rows, accumulator, PRECISION), denominator


@triton.jit
def store_output(out, inverse, accumulator, denominator, b, h, N, H, token, present, DV: tl.constexpr,
                  DV1: tl.constexpr, NORMALIZER: tl.constexpr):  # fmt: skip
    """Divide by the denominators and store; write their inverses to ``inverse`` [B, H, N], or read given ones there."""
    p_inverse = inverse + (b * H + h) * N + token
    if NORMALIZER == "paper":
        b_inverse = 1.0 / tl.where(present, denominator, 1.0)
        tl.store(p_inverse, b_inverse, mask=present)
        accumulator = scale_rows(accumulator, b_inverse)
    elif NORMALIZER == "given":
        accumulator = scale_rows(accumulator, tl.load(p_inverse, mask=present, other=0.0))
    store_rows(out + (b * N * H + h) * DV, token * (H * DV), present, 1, accumulator, DV, DV1)


@triton.jit
def gradient_rows(g_rows, o_rows, p_inverse, p_scale, present, m_scale, NORMALIZER: tl.constexpr,
                   COMPUTE: tl.constexpr):  # fmt: skip
    """Divide output gradients by the denominators, and compute what each score gets from the denominator's gradient."""
    shift = tl.zeros((g_rows[0].shape[0],), tl.float32)
    if NORMALIZER != "none":
        b_inverse = tl.load(p_inverse, mask=present, other=0.0)
        d_denominator = -row_products(g_rows, o_rows) * b_inverse
        tl.store(p_scale, d_denominator, mask=m_scale)
        if NORMALIZER == "paper":
            shift = d_denominator
        g_rows = scale_rows(g_rows, b_inverse)
    return cast(g_rows, COMPUTE), shift


@triton.jit
def backward_query(q_rows, g_rows, shift, k_rows, v_rows, weights, mask, accumulator,
                    COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one more tile of keys to the query gradients, and compute the gradient of each pair's weight."""
    BQ: tl.constexpr = q_rows[0].shape[0]
    BK: tl.constexpr = k_rows[0].shape[0]
    scores = dot_rows(q_rows, k_rows, tl.zeros((BQ, BK), tl.float32), PRECISION)
    d_weighted = dot_rows(g_rows, v_rows, tl.zeros((BQ, BK), tl.float32), PRECISION) + shift[:, None]
    d_weighted = _masked(d_weighted, mask)
    accumulator = dot_columns(_weigh(d_weighted, weights).to(COMPUTE), k_rows, accumulator, PRECISION)
    return accumulator, scores * d_weighted


@triton.jit
def backward_key(q_rows, g_rows, shift, k_rows, v_rows, weights, mask, dk_rows, dv_rows,
                  COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one more tile of queries to the key and value gradients; scores are transposed, [keys, queries].

    The mask is [queries, keys].
    """
    if len(mask) > 0:
        mask = (tl.trans(mask[0]),)
    BQ: tl.constexpr = q_rows[0].shape[0]
    BK: tl.constexpr = k_rows[0].shape[0]
    scores = dot_rows(k_rows, q_rows, tl.zeros((BK, BQ), tl.float32), PRECISION)
    dv_rows = dot_columns(_weigh(_masked(scores, mask), weights).to(COMPUTE), g_rows, dv_rows, PRECISION)
    d_scores = dot_rows(v_rows, g_rows, tl.zeros((BK, BQ), tl.float32), PRECISION) + shift[None, :]
    return dot_columns(_weigh(_masked(d_scores, mask), weights).to(COMPUTE), q_rows, dk_rows, PRECISION), dv_rows


@triton.jit
def pairwise_forward_kernel(
    q, k, v, weights, out, inverse, table,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, weights_h, weights_i, weights_j,
    N, H, places, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    RUN: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(places, BQ)
    pid_bh = tl.program_id(0) // tiles
    query = tl.program_id(0) % tiles * BQ
    b, h = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_weights = weights + h * weights_h
    token, present = _places(table, query, places, BQ, FULL)
    q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
    q_rows = _features(q_rows, present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
    accumulator, denominator = zeros(BQ, DV1, DV2), tl.zeros((BQ,), tl.float32)
    end = places
    if CAUSAL:
        end = tl.minimum(query + BQ, places)
    for key in range(0, end, BK):
        k_token, k_present = _places(table, key, places, BK, FULL)
        k_rows = load_rows(p_k, k_token * (k_n * ALIGN), k_present, k_d, D, D1, D2)
        v_rows = load_rows(p_v, k_token * (v_n * ALIGN), k_present, v_d, DV, DV1, DV2)
        b_weights = _weights(p_weights, query, key, weights_i, weights_j, BQ, BK, RUN)
        mask = causal_mask(query, key, BQ, BK, CAUSAL)
        k_rows = _features(k_rows, k_present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
        accumulator, denominator = attend(
            q_rows, k_rows, cast(v_rows, COMPUTE), b_weights, mask, accumulator, denominator, NORMALIZER, COMPUTE,
            PRECISION,
        )  # fmt: skip
    store_output(out, inverse, accumulator, denominator, b, h, N, H, token, present, DV, DV1, NORMALIZER)


@triton.jit
def resident_forward_kernel(
    q, k, v, weights, out, inverse, table,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, weights_h, weights_i, weights_j,
    N, H, places, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    RUN: tl.constexpr, FULL: tl.constexpr, TILES: tl.constexpr, PREFETCH: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Run one program for each head. With PREFETCH it loads the queries, like their table, one tile ahead."""
    b, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_weights = weights + h * weights_h
    next_token, next_present = _places(table, 0, places, BQ, FULL)
    next_rows = load_rows(p_q, next_token * (q_n * ALIGN), next_present, q_d, D, D1, D2)
    k_tiles = ()
    v_tiles = ()
    for tile in tl.static_range(TILES):
        k_token, k_present = _places(table, tile * BK, places, BK, FULL)
        k_rows = load_rows(p_k, k_token * (k_n * ALIGN), k_present, k_d, D, D1, D2)
        v_rows = load_rows(p_v, k_token * (v_n * ALIGN), k_present, v_d, DV, DV1, DV2)
        k_tiles = k_tiles + (_features(k_rows, k_present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE),)
        v_tiles = v_tiles + (cast(v_rows, COMPUTE),)
    for query in range(0, places, BQ):
        token, present, q_rows = next_token, next_present, next_rows
        following = tl.where(query + BQ < places, query + BQ, 0)  # the last prefetch is not used
        next_token, next_present = _places(table, following, places, BQ, FULL)
        if PREFETCH:
            next_rows = load_rows(p_q, next_token * (q_n * ALIGN), next_present, q_d, D, D1, D2)
        q_rows = _features(q_rows, present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
        accumulator, denominator = zeros(BQ, DV1, DV2), tl.zeros((BQ,), tl.float32)
        for tile in tl.static_range(TILES):
            b_weights = _weights(p_weights, query, tile * BK, weights_i, weights_j, BQ, BK, RUN)
            accumulator, denominator = attend(
                q_rows, k_tiles[tile], v_tiles[tile], b_weights, (), accumulator, denominator, NORMALIZER, COMPUTE,
                PRECISION,
            )  # fmt: skip
        store_output(out, inverse, accumulator, denominator, b, h, N, H, token, present, DV, DV1, NORMALIZER)
        if not PREFETCH:
            next_rows = load_rows(p_q, next_token * (q_n * ALIGN), next_present, q_d, D, D1, D2)


@triton.jit
def pairwise_backward_query_kernel(
    q, k, v, weights, out, inverse, d_out, d_q, d_scale, d_weights, table,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, o_b, o_n, o_h, o_d, g_b, g_n, g_h, g_d,
    weights_h, weights_i, weights_j,
    N, H, places, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    RUN: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PACK: tl.constexpr,
    NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute gradients of queries, of weights summed over runs, [B * H, query runs, key runs], and of denominators.

    The last, ``d_scale``, are in the order of the places for the paper's normalizer, as the key kernel reads them, else
    in that of the tokens. With CAUSAL weights of tiles of keys after the queries are not written.
    """
    tiles = tl.cdiv(places, BQ)
    pid_bh = tl.program_id(0) // tiles
    query = tl.program_id(0) % tiles * BQ
    b, h = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_o = rows_of_head(out, b, h, o_b, o_h, ALIGN)
    p_g = rows_of_head(d_out, b, h, g_b, g_h, ALIGN)
    p_weights = weights + h * weights_h
    token, present = _places(table, query, places, BQ, FULL)
    q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
    g_rows = load_rows(p_g, token * (g_n * ALIGN), present, g_d, DV, DV1, DV2)
    o_rows = g_rows
    if NORMALIZER != "none":
        o_rows = load_rows(p_o, token * (o_n * ALIGN), present, o_d, DV, DV1, DV2)
    p_inverse = inverse + (b * H + h) * N + token
    p_scale, m_scale = d_scale + (b * H + h) * N + token, present
    if NORMALIZER == "paper":
        place = query + tl.arange(0, BQ)
        p_scale, m_scale = d_scale + (b * H + h) * places + place, place < places
    g_rows, shift = gradient_rows(g_rows, o_rows, p_inverse, p_scale, present, m_scale, NORMALIZER, COMPUTE)
    q_rows = _features(q_rows, present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
    accumulator = zeros(BQ, D1, D2)
    row_run = pid_bh.to(tl.int64) * tiles * (BQ // RUN) + query // RUN + tl.arange(0, BQ // RUN)
    column_runs = tl.cdiv(places, BK) * (BK // RUN)
    end = places
    if CAUSAL:
        end = tl.minimum(query + BQ, places)
    for key in range(0, end, BK):
        k_token, k_present = _places(table, key, places, BK, FULL)
        k_rows = load_rows(p_k, k_token * (k_n * ALIGN), k_present, k_d, D, D1, D2)
        v_rows = load_rows(p_v, k_token * (v_n * ALIGN), k_present, v_d, DV, DV1, DV2)
        b_weights = _weights(p_weights, query, key, weights_i, weights_j, BQ, BK, RUN)
        mask = causal_mask(query, key, BQ, BK, CAUSAL)
        k_rows = _features(k_rows, k_present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
        accumulator, d_pair = backward_query(
            q_rows, g_rows, shift, k_rows, cast(v_rows, COMPUTE), b_weights, mask, accumulator, COMPUTE, PRECISION
        )
        column_run = key // RUN + tl.arange(0, BK // RUN)
        tl.store(d_weights + row_run[:, None] * column_runs + column_run[None, :], _sum_runs(d_pair, RUN))
    q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
    d_rows = feature_gradients(q_rows, accumulator, FEATURE_MAP)
    store_rows(d_q + (b * N * H * PACK + h) * D, token * (PACK * H * D), present, 1, d_rows, D, D1)


@triton.jit
def scaled_gradients(p_g, p_inverse, g_d, g_n, token, present, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
                      NORMALIZER: tl.constexpr, COMPUTE: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Load output gradients and divide them by the denominators."""
    g_rows = load_rows(p_g, token * (g_n * ALIGN), present, g_d, DV, DV1, DV2)
    if NORMALIZER != "none":
        g_rows = scale_rows(g_rows, tl.load(p_inverse + token, mask=present, other=0.0))
    return cast(g_rows, COMPUTE)


@triton.jit
def _shift(p_scale, first, places, SIZE: tl.constexpr, NORMALIZER: tl.constexpr):
    """Load the denominators' gradients of the places from ``first`` on; zero if these are given or there are none."""
    if NORMALIZER == "paper":
        place = first + tl.arange(0, SIZE)
        return tl.load(p_scale + place, mask=place < places, other=0.0)
    else:
        return tl.zeros((SIZE,), tl.float32)


@triton.jit
def pairwise_backward_key_kernel(
    q, k, v, weights, inverse, d_out, d_scale, d_k, d_v, table,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, g_b, g_n, g_h, g_d, weights_h, weights_i, weights_j,
    N, H, places, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    RUN: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PACK: tl.constexpr,
    NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    d_k, d_v = key_and_value_gradients(d_k, d_v, H * D)
    tiles = tl.cdiv(places, BK)
    pid_bh = tl.program_id(0) // tiles
    key = tl.program_id(0) % tiles * BK
    b, h = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_g = rows_of_head(d_out, b, h, g_b, g_h, ALIGN)
    p_weights = weights + h * weights_h
    p_inverse = inverse + (b * H + h) * N
    p_scale = d_scale + (b * H + h) * places
    token, present = _places(table, key, places, BK, FULL)
    k_rows = load_rows(p_k, token * (k_n * ALIGN), present, k_d, D, D1, D2)
    v_rows = cast(load_rows(p_v, token * (v_n * ALIGN), present, v_d, DV, DV1, DV2), COMPUTE)
    k_rows = _features(k_rows, present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
    dk_rows, dv_rows = zeros(BK, D1, D2), zeros(BK, DV1, DV2)
    start = 0
    if CAUSAL:
        start = key // BQ * BQ
    for query in range(start, places, BQ):
        q_token, q_present = _places(table, query, places, BQ, FULL)
        q_rows = load_rows(p_q, q_token * (q_n * ALIGN), q_present, q_d, D, D1, D2)
        g_rows = scaled_gradients(
            p_g, p_inverse, g_d, g_n, q_token, q_present, DV, DV1, DV2, NORMALIZER, COMPUTE, ALIGN
        )
        shift = _shift(p_scale, query, places, BQ, NORMALIZER)
        b_weights = _weights(p_weights, key, query, weights_j, weights_i, BK, BQ, RUN)
        mask = causal_mask(query, key, BQ, BK, CAUSAL)
        q_rows = _features(q_rows, q_present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
        dk_rows, dv_rows = backward_key(
            q_rows, g_rows, shift, k_rows, v_rows, b_weights, mask, dk_rows, dv_rows, COMPUTE, PRECISION
        )
    k_rows = load_rows(p_k, token * (k_n * ALIGN), present, k_d, D, D1, D2)
    dk_rows = feature_gradients(k_rows, dk_rows, FEATURE_MAP)
    store_rows(d_k + (b * N * H * PACK + h) * D, token * (PACK * H * D), present, 1, dk_rows, D, D1)
    store_rows(d_v + (b * N * H * PACK + h) * DV, token * (PACK * H * DV), present, 1, dv_rows, DV, DV1)


@triton.jit
def resident_backward_key_kernel(
    q, k, v, weights, inverse, d_out, d_scale, d_k, d_v, table,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, g_b, g_n, g_h, g_d, weights_h, weights_i, weights_j,
    N, H, places, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    RUN: tl.constexpr, FULL: tl.constexpr, TILES: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    PACK: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Run one program for each head."""
    d_k, d_v = key_and_value_gradients(d_k, d_v, H * D)
    b, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_g = rows_of_head(d_out, b, h, g_b, g_h, ALIGN)
    p_weights = weights + h * weights_h
    p_inverse = inverse + (b * H + h) * N
    p_scale = d_scale + (b * H + h) * places
    next_token, next_present = _places(table, 0, places, BK, FULL)
    q_tiles = ()
    g_tiles = ()
    for tile in tl.static_range(TILES):
        q_token, q_present = _places(table, tile * BQ, places, BQ, FULL)
        q_rows = load_rows(p_q, q_token * (q_n * ALIGN), q_present, q_d, D, D1, D2)
        g_rows = scaled_gradients(
            p_g, p_inverse, g_d, g_n, q_token, q_present, DV, DV1, DV2, NORMALIZER, COMPUTE, ALIGN
        )
        q_tiles = q_tiles + (_features(q_rows, q_present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE),)
        g_tiles = g_tiles + (g_rows,)
    for key in range(0, places, BK):
        token, present = next_token, next_present
        k_raw = load_rows(p_k, token * (k_n * ALIGN), present, k_d, D, D1, D2)
        v_rows = cast(load_rows(p_v, token * (v_n * ALIGN), present, v_d, DV, DV1, DV2), COMPUTE)
        following = tl.where(key + BK < places, key + BK, 0)
        next_token, next_present = _places(table, following, places, BK, FULL)
        k_rows = _features(k_raw, present, eps, D, D1, FEATURE_MAP, FULL, COMPUTE)
        dk_rows, dv_rows = zeros(BK, D1, D2), zeros(BK, DV1, DV2)
        for tile in tl.static_range(TILES):
            shift = _shift(p_scale, tile * BQ, places, BQ, NORMALIZER)
            b_weights = _weights(p_weights, key, tile * BQ, weights_j, weights_i, BK, BQ, RUN)
            dk_rows, dv_rows = backward_key(
                q_tiles[tile], g_tiles[tile], shift, k_rows, v_rows, b_weights, (), dk_rows, dv_rows, COMPUTE,
                PRECISION,
            )  # fmt: skip
        dk_rows = feature_gradients(k_raw, dk_rows, FEATURE_MAP)
        store_rows(d_k + (b * N * H * PACK + h) * D, token * (PACK * H * D), present, 1, dk_rows, D, D1)
        store_rows(d_v + (b * N * H * PACK + h) * DV, token * (PACK * H * DV), present, 1, dv_rows, DV, DV1)


# Bytes of the unsummed mixing gradients of the backward pass; larger batches take several launches.
MIXING_GRADIENT_BYTES = 1 << 26
RUN_TILE = 32


def _pairwise_constants(q: Layout, v: Layout, settings: Settings, align: int, t: Places, c: tuning.Tiles) -> dict:
    full = t.full and t.num_places % c["BQ"] == 0 and t.num_places % c["BK"] == 0
    return dict(RUN=t.run, FULL=full, num_stages=1) | kernel_constants(q, v, settings, align) | c


class RunWeights:
    """Spread mixing weights to each pair of runs, up to whole tiles: [(H,) padded runs, padded runs]."""

    def __init__(self, mixing: Layout, t: Places) -> None:
        heads, runs = mixing.shape[:-2], t.padded_runs
        self.shape, self.strides, self.blocks = (*heads, runs, runs), (*[runs * runs] * len(heads), runs, 1), t.blocks
        self._launch = None
        if mixing.shape[-1] == runs:  # runs are blocks
            self.strides = mixing.strides
        else:
            numbers = (len(t.blocks), runs, *mixing_strides(mixing.strides))
            programs = heads.numel() * triton.cdiv(runs, RUN_TILE) ** 2
            self._launch = Launch(shared.expand_runs_kernel, (programs,), numbers, dict(TILE=RUN_TILE))

    def __call__(self, mixing: Tensor) -> Tensor:
        if self._launch is None:
            return mixing
        weights = mixing.new_empty(self.shape)
        self._launch(mixing, weights, self.blocks)
        return weights


class PairwisePlan(NamedTuple):
    """The launch of a pairwise kernel, with the tables that it takes."""

    places: Places
    weights: RunWeights
    launch: Launch


def _pairwise_tables(c: tuning.Tiles, q: Layout, mixing: Layout, settings: Settings) -> tuple[Places, RunWeights]:
    t = places(settings.blocks, min(c["BQ"], c["BK"]), q.device)
    return t, RunWeights(mixing, t)


def is_resident(q: Layout, v: Layout, causal: bool, forward: bool) -> bool:
    """Return whether a pairwise kernel holds all keys and values, or queries and gradients, of a head on chip.

    With mma.sync the forward kernel reads them tile by tile: that is as fast on A100 and faster on RTX cards.
    """
    fits = max(q.shape[-1], v.shape[-1]) <= 64 and q.shape[1] <= tuning.RESIDENT_TOKENS
    pays = not q.gpu.uses_mma_sync if forward else q.gpu.shared_memory >= tuning.RESIDENT_BACKWARD_KB << 10
    return fits and pays and q.dtype == torch.bfloat16 and not causal


class ForwardPlan(NamedTuple):
    """The launch of a forward kernel, with what makes its weights of the mixing, and the table of tokens it takes."""

    weights: Callable[[Tensor], Tensor]
    table: Tensor
    launch: Launch
    for_hopper: bool = False


@planned
def _pairwise_forward(q: Layout, k: Layout, v: Layout, mixing: Layout, settings: Settings) -> ForwardPlan:
    if hopper.takes_forward(q, k, v, settings):
        table = block_of_token(settings.blocks, q.device)
        return ForwardPlan(lambda mixing: mixing, table, hopper.forward_launch(q, k, v, mixing, settings), True)
    B, N, H, D = q.shape
    resident = is_resident(q, v, settings.causal, forward=True)
    c = tuning.resident(tuning.RESIDENT_FORWARD, N) if resident else choose_tiles(tuning.PAIRWISE_FORWARD, q, v)
    t, weights = _pairwise_tables(c, q, mixing, settings)
    align = alignment(q, k, v)
    sizes = (N, H, t.num_places)
    numbers = (*row_strides(align, q, k, v), *mixing_strides(weights.strides), *sizes, settings.eps)
    constants = _pairwise_constants(q, v, settings, align, t, c)
    if resident:
        constants |= dict(TILES=triton.cdiv(t.num_places, c["BK"]), PREFETCH=t.run >= tuning.PREFETCH_RUN)
        launch = Launch(resident_forward_kernel, (B * H,), numbers, constants)
    else:
        programs, constants = B * H * triton.cdiv(t.num_places, c["BQ"]), constants | dict(CAUSAL=settings.causal)
        launch = Launch(pairwise_forward_kernel, (programs,), numbers, constants)
    return ForwardPlan(weights, t.tokens, launch)


def pairwise_forward(call: Forward) -> None:
    """Fill ``out`` [B, N, H, Dv] and, for the paper's normalizer, ``inverse`` [B, H, N]."""
    q, k, v, mixing, out, saved, settings = call
    layouts = layout(q), layout(k), layout(v), layout(mixing)
    weights, table, launch, for_hopper = _pairwise_forward(*layouts, settings)
    try:
        launch(q, k, v, weights(mixing), out, saved.inverse, table)
    except KernelFailed as error:
        if not for_hopper:
            raise
        hopper.leave_out(error, settings)
        weights, table, launch, _ = _pairwise_forward(*layouts, settings)
        launch(q, k, v, weights(mixing), out, saved.inverse, table)


class QueryPlan(NamedTuple):
    """The launch for gradients of queries and mixing.

    Attributes:
        sums: query runs and key runs of each head, up to whole tiles.
        at_once: batch items of a launch.
        fold: sums the gradients of pairs of runs, for heads that share the mixing and for heads that do not; None where
            runs are blocks.
    """

    places: Places
    weights: RunWeights
    launch: Launch
    sums: tuple[int, int]
    at_once: int
    fold: Launch | None


@planned
def _pairwise_backward_query(
    q: Layout, k: Layout, v: Layout, out: Layout, d_out: Layout, mixing: Layout, pack: int, settings: Settings
) -> QueryPlan:
    B, N, H, D = q.shape
    M = settings.blocks.num_blocks
    c = choose_tiles(tuning.PAIRWISE_BACKWARD_QUERY, q, v)
    t, weights = _pairwise_tables(c, q, mixing, settings)
    query_tiles, key_tiles = triton.cdiv(t.num_places, c["BQ"]), triton.cdiv(t.num_places, c["BK"])
    sums = (query_tiles * c["BQ"] // t.run, key_tiles * c["BK"] // t.run)
    align = alignment(q, k, v, out, d_out)
    numbers = (
        *row_strides(align, q, k, v, out, d_out), *mixing_strides(weights.strides), N, H, t.num_places, settings.eps,
    )  # fmt: skip
    constants = _pairwise_constants(q, v, settings, align, t, c) | dict(PACK=pack, CAUSAL=settings.causal)
    launch = Launch(pairwise_backward_query_kernel, (B * H * query_tiles,), numbers, constants)
    at_once = max(1, MIXING_GRADIENT_BYTES // (4 * H * sums[0] * sums[1]))
    fold = None
    if len(t.blocks) != M:
        programs = mixing.shape[:-2].numel() * triton.cdiv(M, 16) ** 2
        constants = dict(TILE=64, BM=16, num_warps=4)
        fold = Launch(shared.fold_runs_kernel, (programs,), (len(t.blocks), *sums, M), constants)
    return QueryPlan(t, weights, launch, sums, at_once, fold)


def _run_weight_gradients(
    plan: QueryPlan, mixing: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, inverse: Tensor,
    d_q: Tensor, d_scale: Tensor,
) -> Tensor:  # fmt: skip
    """Fill gradients of queries and denominators, and compute the gradients of the weights of pairs of runs."""
    B, _, H, _ = q.shape
    allocate = q.new_zeros if plan.launch.constants["CAUSAL"] else q.new_empty
    d_weights = allocate((B, H, *plan.sums), dtype=torch.float32)
    weights = plan.weights(mixing)
    plan.launch(q, k, v, weights, out, inverse, d_out, d_q, d_scale, d_weights, plan.places.tokens)
    return sum_leading(d_weights, 1 if mixing.ndim == 3 else 2)


def _mixing_gradient_of_runs(d_weights: Tensor, plan: QueryPlan, num_blocks: int) -> Tensor:
    """Sum the gradients of the weights of each pair of runs to gradients of the mixing: [(H,) M, M]."""
    if plan.fold is None:
        return d_weights[..., :num_blocks, :num_blocks].contiguous()
    d_mixing = d_weights.new_empty(*d_weights.shape[:-2], num_blocks, num_blocks)
    plan.fold(d_weights, d_mixing, plan.places.blocks)
    return d_mixing


@planned
def _pairwise_backward_key(
    q: Layout, k: Layout, v: Layout, d_out: Layout, mixing: Layout, pack: int, settings: Settings
) -> PairwisePlan:
    B, N, H, D = q.shape
    resident = is_resident(q, v, settings.causal, forward=False)
    c = (
        tuning.resident(tuning.RESIDENT_BACKWARD_KEY[q.gpu.uses_mma_sync], N)
        if resident
        else choose_tiles(tuning.PAIRWISE_BACKWARD_KEY, q, v)
    )
    t, weights = _pairwise_tables(c, q, mixing, settings)
    align = alignment(q, k, v, d_out)
    sizes = (N, H, t.num_places)
    numbers = (*row_strides(align, q, k, v, d_out), *mixing_strides(weights.strides), *sizes, settings.eps)
    constants = _pairwise_constants(q, v, settings, align, t, c) | dict(PACK=pack)
    if resident:
        constants |= dict(TILES=triton.cdiv(t.num_places, c["BQ"]))
        launch = Launch(resident_backward_key_kernel, (B * H,), numbers, constants)
    else:
        programs, constants = B * H * triton.cdiv(t.num_places, c["BK"]), constants | dict(CAUSAL=settings.causal)
        launch = Launch(pairwise_backward_key_kernel, (programs,), numbers, constants)
    return PairwisePlan(t, weights, launch)


def pairwise_backward(call: Backward) -> Gradients:
    """Compute the gradients of all inputs; that of a denominator by place for the paper's normalizer, else by token."""
    d_out, q, k, v, mixing, out, (inverse, *_), packed, settings = call
    assert out is not None
    B, N, H, _ = q.shape
    options = (layout(mixing), pack_size(packed), settings)
    layouts = *inputs, _, l_d_out = [layout(x) for x in (q, k, v, out, d_out)]
    if for_hopper := hopper.plan_backward(*layouts, *options):
        try:
            return hopper.run_backward(for_hopper, call)
        except KernelFailed as error:
            hopper.leave_out(error, settings)

    plan = _pairwise_backward_query(*layouts, *options)
    d_q = query_gradient(q, packed)
    by_place = settings.normalizer == "paper"
    d_scale = q.new_empty(B, H, plan.places.num_places if by_place else N, dtype=torch.float32)
    tensors = (q, k, v, out, d_out, inverse, d_q, d_scale)
    if plan.at_once >= B:
        d_weights = _run_weight_gradients(plan, mixing, *tensors)
    else:
        sums = []
        for some in zip(*(x.split(plan.at_once) for x in tensors), strict=True):
            part = _pairwise_backward_query(*map(layout, some[:5]), *options)
            sums.append(_run_weight_gradients(part, mixing, *some))
        d_weights = torch.stack(sums).sum(0)
    d_mixing = _mixing_gradient_of_runs(d_weights, plan, settings.blocks.num_blocks)

    t, weights, launch = _pairwise_backward_key(*inputs, l_d_out, *options)
    d_k, d_v = key_gradients(k, v, packed)
    launch(q, k, v, weights(mixing), inverse, d_out, d_scale, d_k, d_v, t.tokens)
    return Gradients(d_q, d_k, d_v, d_mixing, d_scale)
