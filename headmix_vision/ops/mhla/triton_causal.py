"""Compute causal MHLA for long sequences: summaries of the parts before, and token by token the own part.

B batch, N tokens, H heads, C parts of blocks, D and Dv head dims. Parts of one block count as blocks of their own, each
of which sees those before it: mixed summaries hold parts before (forward) or after (backward) alone, and ``own`` [(H,)
C] is the weight of a part for itself. A program computes one tile of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmix_vision.ops.mhla import triton_summary as summary
from headmix_vision.ops.mhla import triton_tuning as tuning
from headmix_vision.ops.mhla.torch_impl import Settings
from headmix_vision.ops.mhla.triton_launch import (
    Backward,
    Forward,
    Gradients,
    choose_tiles,
    kernel_constants,
    key_gradients,
    pack_size,
    parts,
    query_gradient,
    row_strides,
)
from headmix_vision.ops.mhla.triton_pairwise import (
    attend,
    backward_key,
    backward_query,
    causal_mask,
    gradient_rows,
    scaled_gradients,
    store_output,
)
from headmix_vision.ops.mhla.triton_summary import Summaries, TokenPlan, members
from headmix_vision.ops.mhla.triton_tiles import (
    add_outer,
    add_outer_vector,
    add_vector,
    cast,
    cast_matrix,
    dot_matrix,
    dot_matrix_transposed,
    feature_gradients,
    features,
    key_and_value_gradients,
    load_matrix,
    load_rows,
    load_vector,
    present_features,
    row_sums,
    rows_of_head,
    store_matrix,
    store_rows,
    store_vector,
    weighted_column_sums,
    zero_matrix,
    zero_vector,
    zeros,
)
from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, planned


@triton.jit
def causal_apply_kernel(
    q, k, v, mixed, mixed_key_sum, own, out, inverse, table,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, own_h,
    N, H, C, tiles, size, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    BT: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    query = pid % tiles * BT
    part = pid // tiles % C
    pid_bh = (pid // tiles // C).to(tl.int64)
    b, h = pid_bh // H, pid_bh % H
    owner = pid_bh * C + part
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    weights = tl.full((BT, 1), 1.0, tl.float32) * tl.load(own + h * own_h + part)
    token, present = members(table, part, query, size, BT)
    q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
    q_rows = features(q_rows, eps, FEATURE_MAP, COMPUTE)  # zeros multiply absent columns
    matrix = cast_matrix(load_matrix(mixed + owner * (D * DV), D, D1, D2, DV, DV1, DV2), COMPUTE)
    accumulator = dot_matrix(q_rows, matrix, zeros(BT, DV1, DV2), PRECISION)
    denominator = tl.zeros((BT,), tl.float32)
    if NORMALIZER == "paper":
        denominator = row_sums(q_rows, load_vector(mixed_key_sum + owner * D, D, D1, D2))
    for key in range(0, query + BT, BT):
        k_token, k_present = members(table, part, key, size, BT)
        k_rows = load_rows(p_k, k_token * (k_n * ALIGN), k_present, k_d, D, D1, D2)
        v_rows = load_rows(p_v, k_token * (v_n * ALIGN), k_present, v_d, DV, DV1, DV2)
        k_rows = present_features(k_rows, k_present, eps, D, D1, FEATURE_MAP, COMPUTE)
        mask = causal_mask(query, key, BT, BT, True)
        accumulator, denominator = attend(
            q_rows, k_rows, cast(v_rows, COMPUTE), weights, mask, accumulator, denominator, NORMALIZER, COMPUTE,
            PRECISION,
        )  # fmt: skip
    store_output(out, inverse, accumulator, denominator, b, h, N, H, token, present, DV, DV1, NORMALIZER)


@triton.jit
def causal_backward_query_kernel(
    q, k, v, mixed, mixed_key_sum, own, out, inverse, d_out, d_q, d_scale, d_own, table,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, o_b, o_n, o_h, o_d, g_b, g_n, g_h, g_d, own_h,
    N, H, C, tiles, size, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    BT: tl.constexpr, PACK: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute gradients of queries, of denominators [B, H, N], and of the own weight for each tile [B, H, C, tiles]."""
    pid = tl.program_id(0)
    query = pid % tiles * BT
    part = pid // tiles % C
    pid_bh = (pid // tiles // C).to(tl.int64)
    b, h = pid_bh // H, pid_bh % H
    owner = pid_bh * C + part
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_o = rows_of_head(out, b, h, o_b, o_h, ALIGN)
    p_g = rows_of_head(d_out, b, h, g_b, g_h, ALIGN)
    weights = tl.full((BT, 1), 1.0, tl.float32) * tl.load(own + h * own_h + part)
    token, present = members(table, part, query, size, BT)
    g_rows = load_rows(p_g, token * (g_n * ALIGN), present, g_d, DV, DV1, DV2)
    o_rows = g_rows
    if NORMALIZER != "none":
        o_rows = load_rows(p_o, token * (o_n * ALIGN), present, o_d, DV, DV1, DV2)
    p_token = pid_bh * N + token
    g_rows, shift = gradient_rows(
        g_rows, o_rows, inverse + p_token, d_scale + p_token, present, present, NORMALIZER, COMPUTE
    )
    matrix = cast_matrix(load_matrix(mixed + owner * (D * DV), D, D1, D2, DV, DV1, DV2), COMPUTE)
    accumulator = dot_matrix_transposed(g_rows, matrix, zeros(BT, D1, D2), PRECISION)
    if NORMALIZER == "paper":
        accumulator = add_outer_vector(accumulator, shift, load_vector(mixed_key_sum + owner * D, D, D1, D2))
    q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
    q_rows = features(q_rows, eps, FEATURE_MAP, COMPUTE)  # zeros multiply absent columns, zero gradients absent rows
    d_weight = tl.zeros((BT,), tl.float32)
    for key in range(0, query + BT, BT):
        k_token, k_present = members(table, part, key, size, BT)
        k_rows = load_rows(p_k, k_token * (k_n * ALIGN), k_present, k_d, D, D1, D2)
        v_rows = load_rows(p_v, k_token * (v_n * ALIGN), k_present, v_d, DV, DV1, DV2)
        k_rows = present_features(k_rows, k_present, eps, D, D1, FEATURE_MAP, COMPUTE)
        mask = causal_mask(query, key, BT, BT, True)
        accumulator, d_pair = backward_query(
            q_rows, g_rows, shift, k_rows, cast(v_rows, COMPUTE), weights, mask, accumulator, COMPUTE, PRECISION
        )
        d_weight += tl.sum(d_pair, 1)
    tl.store(d_own + pid, tl.sum(d_weight, 0))
    q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
    d_rows = feature_gradients(q_rows, accumulator, FEATURE_MAP)
    store_rows(d_q + (b * N * H * PACK + h) * D, token * (PACK * H * D), present, 1, d_rows, D, D1)


@triton.jit
def summarize_gradients_kernel(
    q, inverse, d_out, d_scale, summary, vector_sum, table,
    q_b, q_n, q_h, q_d, g_b, g_n, g_h, g_d,
    N, H, C, size, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    BT: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the summaries R and r of queries and output gradients; one program serves one part."""
    pid = tl.program_id(0).to(tl.int64)
    part = pid % C
    pid_bh = pid // C
    b, h = pid_bh // H, pid_bh % H
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_g = rows_of_head(d_out, b, h, g_b, g_h, ALIGN)
    matrix = zero_matrix(D1, D2, DV1, DV2)
    vector = zero_vector(D1, D2)
    for first in range(0, size, BT):
        token, present = members(table, part, first, size, BT)
        q_rows = load_rows(p_q, token * (q_n * ALIGN), present, q_d, D, D1, D2)
        q_rows = features(q_rows, eps, FEATURE_MAP, COMPUTE)  # zero gradients multiply absent rows
        g_rows = scaled_gradients(
            p_g, inverse + pid_bh * N, g_d, g_n, token, present, DV, DV1, DV2, NORMALIZER, COMPUTE, ALIGN
        )
        if NORMALIZER == "paper":
            shift = tl.load(d_scale + pid_bh * N + token, mask=present, other=0.0)
            vector = weighted_column_sums(q_rows, shift, vector)
        matrix = add_outer(q_rows, g_rows, matrix, PRECISION)
    store_matrix(summary + pid * (D * DV), matrix, D, D1, DV, DV1)
    if NORMALIZER == "paper":
        store_vector(vector_sum + pid * D, vector, D, D1)


@triton.jit
def causal_backward_key_kernel(
    q, k, v, mixed, mixed_vector_sum, own, inverse, d_out, d_scale, d_k, d_v, table,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, g_b, g_n, g_h, g_d, own_h,
    N, H, C, tiles, size, eps,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr,
    BT: tl.constexpr, PACK: tl.constexpr, NORMALIZER: tl.constexpr, FEATURE_MAP: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute gradients of keys and values from R and r of the parts after, and from the queries of their own part."""
    d_k, d_v = key_and_value_gradients(d_k, d_v, H * D)
    pid = tl.program_id(0)
    key = pid % tiles * BT
    part = pid // tiles % C
    pid_bh = (pid // tiles // C).to(tl.int64)
    b, h = pid_bh // H, pid_bh % H
    owner = pid_bh * C + part
    p_q = rows_of_head(q, b, h, q_b, q_h, ALIGN)
    p_k = rows_of_head(k, b, h, k_b, k_h, ALIGN)
    p_v = rows_of_head(v, b, h, v_b, v_h, ALIGN)
    p_g = rows_of_head(d_out, b, h, g_b, g_h, ALIGN)
    weights = tl.full((BT, 1), 1.0, tl.float32) * tl.load(own + h * own_h + part)
    token, present = members(table, part, key, size, BT)
    k_rows = load_rows(p_k, token * (k_n * ALIGN), present, k_d, D, D1, D2)
    v_rows = cast(load_rows(p_v, token * (v_n * ALIGN), present, v_d, DV, DV1, DV2), COMPUTE)
    k_rows = present_features(k_rows, present, eps, D, D1, FEATURE_MAP, COMPUTE)
    matrix = cast_matrix(load_matrix(mixed + owner * (D * DV), D, D1, D2, DV, DV1, DV2), COMPUTE)
    dv_rows = dot_matrix(k_rows, matrix, zeros(BT, DV1, DV2), PRECISION)
    dk_rows = dot_matrix_transposed(v_rows, matrix, zeros(BT, D1, D2), PRECISION)
    if NORMALIZER == "paper":
        dk_rows = add_vector(dk_rows, load_vector(mixed_vector_sum + owner * D, D, D1, D2))
    for query in range(key, size, BT):
        q_token, q_present = members(table, part, query, size, BT)
        q_rows = load_rows(p_q, q_token * (q_n * ALIGN), q_present, q_d, D, D1, D2)
        q_rows = features(q_rows, eps, FEATURE_MAP, COMPUTE)  # zero gradients multiply absent rows
        g_rows = scaled_gradients(
            p_g, inverse + pid_bh * N, g_d, g_n, q_token, q_present, DV, DV1, DV2, NORMALIZER, COMPUTE, ALIGN
        )
        shift = tl.zeros((BT,), tl.float32)
        if NORMALIZER == "paper":
            shift = tl.load(d_scale + pid_bh * N + q_token, mask=q_present, other=0.0)
        mask = causal_mask(query, key, BT, BT, True)
        dk_rows, dv_rows = backward_key(
            q_rows, g_rows, shift, k_rows, v_rows, weights, mask, dk_rows, dv_rows, COMPUTE, PRECISION
        )
    k_rows = load_rows(p_k, token * (k_n * ALIGN), present, k_d, D, D1, D2)
    dk_rows = feature_gradients(k_rows, dk_rows, FEATURE_MAP)
    store_rows(d_k + (b * N * H * PACK + h) * D, token * (PACK * H * D), present, 1, dk_rows, D, D1)
    store_rows(d_v + (b * N * H * PACK + h) * DV, token * (PACK * H * DV), present, 1, dv_rows, DV, DV1)


class PartWeights(NamedTuple):
    """The mixing of parts: of the parts before each [(H,) C, C], zero elsewhere, and of each for itself [(H,) C]."""

    before: Tensor
    own: Tensor

    @classmethod
    def of(cls, mixing: Tensor, settings: Settings) -> PartWeights:
        split = summary.parts_of_a_block(settings)
        own = mixing.diagonal(dim1=-2, dim2=-1).repeat_interleave(split, -1).float()
        return cls(mixing.repeat_interleave(split, -2).repeat_interleave(split, -1).tril(-1), own)

    @property
    def own_stride(self) -> int:
        return self.own.stride(0) if self.own.ndim == 2 else 0


@planned
def _plan(
    kernel: Any, by_tile: bool, rows: Sequence[Layout], v: Layout, own_stride: int | None, settings: Settings,
    pack: int | None = None,
) -> TokenPlan:  # fmt: skip
    """Plan one program for each part or each of its tiles; ``rows`` are q and what else the kernel reads by token."""
    q = rows[0]
    B, N, H, _ = q.shape
    t = parts(settings.blocks, summary.parts_of_a_block(settings), q.device)
    c = choose_tiles(tuning.CAUSAL, q, v)
    C, size = t.shape
    tiles = triton.cdiv(size, c["BT"])
    align = alignment(*rows)
    sizes = (N, H, C, tiles, size) if by_tile else (N, H, C, size)
    numbers = (*row_strides(align, *rows), *(() if own_stride is None else (own_stride,)), *sizes, settings.eps)
    constants = dict(num_stages=1) | kernel_constants(q, v, settings, align) | c
    if pack is not None:
        constants["PACK"] = pack
    return TokenPlan(t, Launch(kernel, (B * H * C * (tiles if by_tile else 1),), numbers, constants))


def causal_forward(call: Forward) -> Summaries:
    """Fill ``out`` and, for the paper's normalizer, ``inverse``, and return the summaries of the parts."""
    q, k, v, mixing, out, saved, settings = call
    weights = PartWeights.of(mixing, settings)
    summaries = summary.summarize(k, v, settings)
    mixed = summary.mix(summaries, weights.before, settings)
    rows = (layout(q), layout(k), layout(v))
    t, launch = _plan(causal_apply_kernel, True, rows, rows[2], weights.own_stride, settings)
    launch(q, k, v, *mixed, weights.own, out, saved.inverse, t)
    return summaries


def causal_backward(call: Backward) -> Gradients:
    """Compute the gradients of all inputs from the summaries of the forward pass."""
    d_out, q, k, v, mixing, out, (inverse, *summarized), packed, settings = call
    assert out is not None
    summaries = Summaries(*summarized)
    B, N, H, _ = q.shape
    weights, pack = PartWeights.of(mixing, settings), pack_size(packed)
    l_q, l_k, l_v, l_out, l_d_out = (layout(x) for x in (q, k, v, out, d_out))
    stride = weights.own_stride

    mixed = summary.mix(summaries, weights.before, settings)
    t, launch = _plan(causal_backward_query_kernel, True, (l_q, l_k, l_v, l_out, l_d_out), l_v, stride, settings, pack)
    d_q, d_scale = query_gradient(q, packed), q.new_empty(B, H, N, dtype=torch.float32)
    d_own = q.new_empty(B, H, len(t), launch.grid[0] // (B * H * len(t)), dtype=torch.float32)
    launch(q, k, v, *mixed, weights.own, out, inverse, d_out, d_q, d_scale, d_own, t)
    del mixed

    t, launch = _plan(summarize_gradients_kernel, False, (l_q, l_d_out), l_v, None, settings)
    of_gradients = summary.part_summaries(q, v, settings)
    launch(q, inverse, d_out, d_scale, *of_gradients, t)
    from_mixing = summary.mixing_gradient(of_gradients, summaries, weights.before, settings)

    t, launch = _plan(causal_backward_key_kernel, True, (l_q, l_k, l_v, l_d_out), l_v, stride, settings, pack)
    d_k, d_v = key_gradients(k, v, packed)
    launch(q, k, v, *from_mixing.mixed, weights.own, inverse, d_out, d_scale, d_k, d_v, t)

    d_parts = from_mixing.mixing.tril(-1) + d_own.sum((0, 3) if mixing.ndim == 3 else (0, 1, 3)).diag_embed()
    split = summary.parts_of_a_block(settings)
    d_mixing = d_parts.unflatten(-1, (-1, split)).sum(-1).unflatten(-2, (-1, split)).sum(-2)
    return Gradients(d_q, d_k, d_v, d_mixing, d_scale)
