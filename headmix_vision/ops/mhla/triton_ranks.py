"""Run MHLA in Triton kernels where each rank has some of the tokens: two ops on its tokens, with an exchange between.

B batch, n tokens of this rank, H heads, m its blocks, D and Dv head dims. The kernels belong to the summary regime.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.dispatch import FAILED, as_function, gradients_of, register, stand_in, without_dispatcher
from headmix_vision.ops.mhla import triton_summary as summary
from headmix_vision.ops.mhla.exchange import mix_over_ranks
from headmix_vision.ops.mhla.torch_impl import Settings, apply_feature_map, unpack
from headmix_vision.ops.runtime import KernelFailed, device_of, storage_dtype
from headmix_vision.ops.token_blocks import BlocksOfRank, to_blocks, to_tokens
from headmix_vision.ops.token_ranks import TokenRanks


def mhla_triton_of_rank(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, settings: Settings) -> Tensor:
    """Compute :func:`headmix_vision.ops.mhla` for the tokens of a rank, by its settings with ``BlocksOfRank``."""
    blocks = settings.blocks
    assert isinstance(blocks, BlocksOfRank)
    packed = (blocks.ranks.rank, blocks.ranks.size, blocks.ranks.axis, *settings.pack())
    matrix, vector = _call_summarize(k, v, packed)
    summaries = (matrix, vector) if settings.normalizer == "paper" else (matrix,)
    mixed = mix_over_ranks(mixing, blocks, storage_dtype(q.dtype), *summaries)
    return _call_apply(q, *(*mixed, vector)[:2], packed)[0]


def _unpack(packed: Sequence[int]) -> Settings:
    rank, size, axis, *settings = packed
    whole = unpack(settings)
    return whole._replace(
        blocks=whole.blocks.of_rank(TokenRanks("", rank, size, axis))
    )  # work on tokens needs no group


@lru_cache(maxsize=256)
def _cached(packed: tuple[int, ...]) -> Settings:
    return _unpack(packed)


def _summarize(k: Tensor, v: Tensor, settings: list[int]) -> tuple[Tensor, Tensor]:
    """Compute the summaries of this rank's keys and values: [B, H, m, D, Dv] and, to normalize, [B, H, m, D]."""
    call = _cached(tuple(settings))
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
    d_matrix: Tensor, d_vector: Tensor, k: Tensor, v: Tensor, settings: list[int]
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of keys and values from the gradients of their summaries."""
    if v.numel() == 0:
        return torch.empty_like(k), torch.empty_like(v)
    call = _cached(tuple(settings))
    if not (FAILED and _kind(k, v.shape[-1], call) in FAILED):
        gradients = summary.Summaries(d_matrix.to(storage_dtype(k.dtype)).contiguous(), d_vector.contiguous())
        try:
            with device_of(k):
                return summary.backward_key(k, v, gradients, None, call)
        except KernelFailed as error:
            stand_in(error, call.fallback, *_kind(k, v.shape[-1], call))
    d_k, d_v = gradients_of(partial(_summarize_in_torch, call=call), [k, v], [d_matrix, d_vector])
    return d_k, d_v


def _apply(q: Tensor, matrix: Tensor, vector: Tensor, settings: list[int]) -> tuple[Tensor, Tensor]:
    """Compute the outputs [B, n, H, Dv] from mixed summaries, and inverse denominators [B, H, n]."""
    call = _cached(tuple(settings))
    out, inverse = _empty_outputs(q, matrix, call)
    kind = _kind(q, out.shape[-1], call)
    if out.numel() and not (FAILED and kind in FAILED):
        try:
            with device_of(q):
                summary.apply(q, _mixed(q, matrix, vector), inverse, out, call)
            return out, inverse
        except KernelFailed as error:
            stand_in(error, call.fallback, *kind)
    return out.copy_(_apply_in_torch(q, matrix, vector, call)) if out.numel() else out, inverse


def _mixed(q: Tensor, matrix: Tensor, vector: Tensor) -> summary.Summaries:
    return summary.Summaries(matrix.to(storage_dtype(q.dtype)).contiguous(), vector.contiguous())


def _empty_outputs(q: Tensor, matrix: Tensor, call: Settings) -> tuple[Tensor, Tensor]:
    B, n, H, _ = q.shape
    out = q.new_empty(B, n, H, matrix.shape[-1])
    return out, q.new_empty(B, H, n if call.normalizer else 0, dtype=torch.float32)


def _output_gradients(
    d_out: Tensor, q: Tensor, matrix: Tensor, vector: Tensor, inverse: Tensor, settings: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries and mixed summaries."""
    if d_out.numel() == 0:
        return torch.empty_like(q), torch.empty_like(matrix), torch.empty_like(vector)
    call = _cached(tuple(settings))
    if not (FAILED and _kind(q, d_out.shape[-1], call) in FAILED):
        try:
            with device_of(q):
                d_q, _, d_summaries = summary.backward_query(q, _mixed(q, matrix, vector), inverse, d_out, None, call)
            return d_q, *d_summaries
        except KernelFailed as error:
            stand_in(error, call.fallback, *_kind(q, d_out.shape[-1], call))
    d_q, d_matrix, d_vector = gradients_of(partial(_apply_in_torch, call=call), [q, matrix, vector], [d_out])
    return d_q, d_matrix, d_vector


def _like_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


_summarize_op = register(
    "mhla_rank_summarize", _summarize, lambda k, v, settings: _empty_summaries(k, v, _unpack(settings))
)
_apply_op = register(
    "mhla_rank_apply", _apply, lambda q, matrix, vector, settings: _empty_outputs(q, matrix, _unpack(settings))
)
_summary_gradients_op = register(
    "mhla_rank_summary_gradients",
    _summary_gradients,
    lambda d_matrix, d_vector, k, v, settings: _like_inputs(k, v),
)
_output_gradients_op = register(
    "mhla_rank_output_gradients",
    _output_gradients,
    lambda d_out, q, matrix, vector, inverse, settings: _like_inputs(q, matrix, vector),
)
_call_summary_gradients = without_dispatcher(_summary_gradients_op, _summary_gradients)
_call_output_gradients = without_dispatcher(_output_gradients_op, _output_gradients)


def _save_summarized(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    k, v, ctx.settings = inputs
    ctx.save_for_backward(k, v)


def _summarize_backward(ctx: Any, d_matrix: Tensor, d_vector: Tensor) -> tuple[Any, ...]:
    return *_call_summary_gradients(d_matrix, d_vector, *ctx.saved_tensors, ctx.settings), None


def _save_applied(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.settings = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _apply_backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    return *_call_output_gradients(d_out, *ctx.saved_tensors, ctx.settings), None


_summarize_op.register_autograd(_summarize_backward, setup_context=_save_summarized)
_apply_op.register_autograd(_apply_backward, setup_context=_save_applied)
_call_summarize = without_dispatcher(
    _summarize_op, as_function(_summarize, _save_summarized, _summarize_backward), differentiable=True
)
_call_apply = without_dispatcher(_apply_op, as_function(_apply, _save_applied, _apply_backward), differentiable=True)
