"""Run MHLA in Triton kernels where each rank has some of the tokens: two ops on its tokens, with an exchange between.

B batch, n tokens of this rank, H heads, m its blocks, D and Dv head dims. The kernels belong to the summary regime.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.dispatch import (
    FAILED,
    as_function,
    gradients_of,
    is_inline,
    record_launches,
    register,
    stand_in,
    without_dispatcher,
)
from headmix_vision.ops.mhla import triton_summary as summary
from headmix_vision.ops.mhla.exchange import mix_over_ranks
from headmix_vision.ops.mhla.torch_impl import Settings, apply_feature_map, unpack, unpack_cached
from headmix_vision.ops.mhla.triton_tables import tables_of_graph, traced_tables
from headmix_vision.ops.numerics import storage_dtype
from headmix_vision.ops.runtime import KernelFailed, device_of
from headmix_vision.ops.token_blocks import BlocksOfRank, to_blocks, to_tokens


def mhla_triton_of_rank(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, settings: Settings) -> Tensor:
    """Compute :func:`headmix_vision.ops.mhla` for the tokens of a rank, by its settings with ``BlocksOfRank``."""
    blocks = settings.blocks
    assert isinstance(blocks, BlocksOfRank)
    packed = tuple(settings.pack())
    tables = tables_of_graph(k, v.shape[3], packed) if is_inline() else None
    matrix, vector = _call_summarize(k, v, tables, packed)
    summaries = (matrix, vector) if settings.normalizer == "paper" else (matrix,)
    mixed = mix_over_ranks(mixing, blocks, storage_dtype(q.dtype), *summaries)
    out: Tensor = _call_apply(q, *(*mixed, vector)[:2], tables, packed)[0]
    return out


def _summarize(k: Tensor, v: Tensor, tables: Tensor | None, settings: list[int]) -> tuple[Tensor, Tensor]:
    """Compute the summaries of this rank's keys and values: [B, H, m, D, Dv] and, to normalize, [B, H, m, D]."""
    call = unpack_cached(settings)
    if v.numel() == 0:
        return _empty_summaries(k, v, call)
    if not (FAILED and _kind(k, v.shape[-1], call) in FAILED):
        try:
            with device_of(k):
                return tuple(summary.summarize(k, v, call))  # type: ignore[return-value]
        except KernelFailed as error:
            stand_in(error, call.fallback, *_kind(k, v.shape[-1], call))
    return _summarize_in_torch(k, v, call)


def _kind(x: Tensor, value_dim: int, call: Settings) -> tuple[Any, ...]:
    """Name what kernels depend on, for those that do not compile."""
    return "mhla of ranks", x.device, x.dtype, x.shape[-1], value_dim, call.fallback


def _in_blocks(x: Tensor, call: Settings) -> Tensor:
    """Gather the features of tokens in float32: [B, H, m, tokens, D]."""
    return to_blocks(call.blocks.tables(x), apply_feature_map(x.float(), call.feature_map, call.eps))[0]


def _summarize_in_torch(k: Tensor, v: Tensor, call: Settings) -> tuple[Tensor, Tensor]:
    keys, (values,) = _in_blocks(k, call), to_blocks(call.blocks.tables(v), v.float())
    sums = keys.sum(-2) if call.normalizer == "paper" else keys[:, :, :0, 0]
    return (keys.mT @ values).to(storage_dtype(k.dtype)), sums


def _apply_in_torch(q: Tensor, matrix: Tensor, vector: Tensor, call: Settings) -> Tensor:
    queries, tables = _in_blocks(q, call), call.blocks.tables(q)
    out = to_tokens(tables, queries @ matrix.float())
    if call.normalizer == "paper":
        out = out / to_tokens(tables, queries @ vector.float()[..., None])
    return out.to(q.dtype)


def _empty_summaries(k: Tensor, v: Tensor, call: Settings) -> tuple[Tensor, Tensor]:
    B, _, H, D = k.shape
    m = call.blocks.num_blocks
    vectors = m if call.normalizer == "paper" else 0
    matrix = k.new_empty(B, H, m, D, v.shape[-1], dtype=storage_dtype(k.dtype))
    return matrix, k.new_empty(B, H, vectors, D, dtype=torch.float32)


def _summary_gradients(
    d_matrix: Tensor, d_vector: Tensor, k: Tensor, v: Tensor, tables: Tensor | None, settings: list[int]
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of keys and values from the gradients of their summaries."""
    if v.numel() == 0:
        return torch.empty_like(k), torch.empty_like(v)
    call = unpack_cached(settings)
    if not (FAILED and _kind(k, v.shape[-1], call) in FAILED):
        try:
            with device_of(k):
                return summary.backward_key(k, v, _stored(k, d_matrix, d_vector), None, call)
        except KernelFailed as error:
            stand_in(error, call.fallback, *_kind(k, v.shape[-1], call))
    d_k, d_v = gradients_of(partial(_summarize_in_torch, call=call), [k, v], [d_matrix, d_vector])
    return d_k, d_v


def _apply(
    q: Tensor, matrix: Tensor, vector: Tensor, tables: Tensor | None, settings: list[int]
) -> tuple[Tensor, Tensor]:
    """Compute the outputs [B, n, H, Dv] from mixed summaries, and inverse denominators [B, H, n]."""
    call = unpack_cached(settings)
    out, inverse = _empty_outputs(q, matrix, call)
    kind = _kind(q, out.shape[-1], call)
    if out.numel() and not (FAILED and kind in FAILED):
        try:
            with device_of(q):
                summary.apply(q, _stored(q, matrix, vector), inverse, out, call)
            return out, inverse
        except KernelFailed as error:
            stand_in(error, call.fallback, *kind)
    return out.copy_(_apply_in_torch(q, matrix, vector, call)) if out.numel() else out, inverse


def _stored(q: Tensor, matrix: Tensor, vector: Tensor) -> summary.Summaries:
    return summary.Summaries(matrix.to(storage_dtype(q.dtype)).contiguous(), vector.contiguous())


def _empty_outputs(q: Tensor, matrix: Tensor, call: Settings) -> tuple[Tensor, Tensor]:
    B, n, H, _ = q.shape
    out = q.new_empty(B, n, H, matrix.shape[-1])
    return out, q.new_empty(B, H, n if call.normalizer else 0, dtype=torch.float32)


def _output_gradients(
    d_out: Tensor,
    q: Tensor,
    matrix: Tensor,
    vector: Tensor,
    inverse: Tensor,
    tables: Tensor | None,
    settings: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries and mixed summaries."""
    if d_out.numel() == 0:
        return torch.empty_like(q), torch.empty_like(matrix), torch.empty_like(vector)
    call = unpack_cached(settings)
    if not (FAILED and _kind(q, d_out.shape[-1], call) in FAILED):
        try:
            with device_of(q):
                d_q, _, d_summaries = summary.backward_query(q, _stored(q, matrix, vector), inverse, d_out, None, call)
            return d_q, *d_summaries
        except KernelFailed as error:
            stand_in(error, call.fallback, *_kind(q, d_out.shape[-1], call))
    d_q, d_matrix, d_vector = gradients_of(partial(_apply_in_torch, call=call), [q, matrix, vector], [d_out])
    return d_q, d_matrix, d_vector


def _like_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


@contextmanager
def _recording(x: Tensor, value_dim: int, tables: Tensor | None, settings: list[int]) -> Iterator[Settings]:
    """Record launches into a graph, with the settings of their call."""
    traced, call = traced_tables(tables, x, value_dim, settings), unpack_cached(settings)
    with record_launches(call.fallback, _kind(x, value_dim, call), traced):
        yield call


def _record_summarize(k: Tensor, v: Tensor, tables: Tensor | None, settings: list[int]) -> tuple[Tensor, ...]:
    with _recording(k, v.shape[3], tables, settings) as call:
        return tuple(summary.summarize(k, v, call))


def _record_apply(
    q: Tensor, matrix: Tensor, vector: Tensor, tables: Tensor | None, settings: list[int]
) -> tuple[Tensor, ...]:
    with _recording(q, matrix.shape[4], tables, settings) as call:
        out, inverse = _empty_outputs(q, matrix, call)
        summary.apply(q, _stored(q, matrix, vector), inverse, out, call)
        return out, inverse


def _record_summary_gradients(
    d_matrix: Tensor, d_vector: Tensor, k: Tensor, v: Tensor, tables: Tensor | None, settings: list[int]
) -> tuple[Tensor, ...]:
    with _recording(k, v.shape[3], tables, settings) as call:
        return summary.backward_key(k, v, _stored(k, d_matrix, d_vector), None, call)


def _record_output_gradients(
    d_out: Tensor,
    q: Tensor,
    matrix: Tensor,
    vector: Tensor,
    inverse: Tensor,
    tables: Tensor | None,
    settings: list[int],
) -> tuple[Tensor, ...]:
    with _recording(q, d_out.shape[3], tables, settings) as call:
        d_q, _, d_summaries = summary.backward_query(q, _stored(q, matrix, vector), inverse, d_out, None, call)
        return d_q, *d_summaries


# Cached compiled graphs do not notice a change of an op's gradients: when their arguments change, rename the ops.
_summarize_op = register(
    "mhla_summarize_rank",
    _summarize,
    lambda k, v, tables, settings: _empty_summaries(k, v, unpack(settings)),
    _record_summarize,
    [summary.summarize_kernel],
)
_apply_op = register(
    "mhla_apply_rank",
    _apply,
    lambda q, matrix, vector, tables, settings: _empty_outputs(q, matrix, unpack(settings)),
    _record_apply,
    [summary.apply_kernel],
)
_summary_gradients_op = register(
    "mhla_summary_gradients_rank",
    _summary_gradients,
    lambda d_matrix, d_vector, k, v, tables, settings: _like_inputs(k, v),
    _record_summary_gradients,
    [summary.backward_key_kernel],
)
_output_gradients_op = register(
    "mhla_output_gradients_rank",
    _output_gradients,
    lambda d_out, q, matrix, vector, inverse, tables, settings: _like_inputs(q, matrix, vector),
    _record_output_gradients,
    [summary.backward_query_kernel],
)
_call_summary_gradients = without_dispatcher(_summary_gradients_op, _summary_gradients)
_call_output_gradients = without_dispatcher(_output_gradients_op, _output_gradients)


def _save_summarized(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    k, v, tables, ctx.settings = inputs
    ctx.save_for_backward(k, v, tables)


def _summarize_backward(ctx: Any, d_matrix: Tensor, d_vector: Tensor) -> tuple[Any, ...]:
    return *_call_summary_gradients(d_matrix, d_vector, *ctx.saved_tensors, ctx.settings), None, None


def _save_applied(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, matrix, vector, tables, ctx.settings = inputs
    ctx.save_for_backward(q, matrix, vector, output[1], tables)
    ctx.mark_non_differentiable(output[1])


def _apply_backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    return *_call_output_gradients(d_out, *ctx.saved_tensors, ctx.settings), None, None


_summarize_op.register_autograd(_summarize_backward, setup_context=_save_summarized)
_apply_op.register_autograd(_apply_backward, setup_context=_save_applied)
_call_summarize = without_dispatcher(
    _summarize_op, as_function(_summarize, _save_summarized, _summarize_backward), differentiable=True
)
_call_apply = without_dispatcher(_apply_op, as_function(_apply, _save_applied, _apply_backward), differentiable=True)
