"""Run MHLA in Triton kernels, as ``torch.library`` ops with gradients. README.md derives it and explains the regimes.

B batch, N tokens, H heads, M blocks, D and Dv head dims. For the backward pass the ops save the inputs, the
inverse denominators and, by regime, the output (pairwise) or the block summaries (summary). Sums have a fixed order:
repeated calls are bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.dispatch import (
    FAILED,
    are_traced_parts,
    as_function,
    gradients_of,
    is_inline,
    record_launches,
    register,
    split_parts,
    stand_in,
    without_dispatcher,
)
from headmix_vision.ops.mhla import triton_causal as causal
from headmix_vision.ops.mhla import triton_pairwise as pairwise
from headmix_vision.ops.mhla import triton_summary as summary
from headmix_vision.ops.mhla import triton_tiles as shared
from headmix_vision.ops.mhla.hopper.launch import serve
from headmix_vision.ops.mhla.regimes import choose_regime, costs_on
from headmix_vision.ops.mhla.torch_impl import (
    Settings,
    apply_feature_map,
    mhla_torch,
    needs_output,
    source_block_denominator,
    unpack,
    unpack_cached,
)
from headmix_vision.ops.mhla.triton_launch import Backward, Forward, Gradients, Saved, gradient
from headmix_vision.ops.mhla.triton_ranks import mhla_triton_of_rank
from headmix_vision.ops.mhla.triton_tables import tables_of_graph, traced_tables
from headmix_vision.ops.mhla.triton_tuning import fits_hopper
from headmix_vision.ops.numerics import autocast_off, storage_dtype
from headmix_vision.ops.runtime import KernelFailed, device_of
from headmix_vision.ops.symbolic_sizes import is_symbolic_in_export
from headmix_vision.ops.token_blocks import BlocksOfRank, to_blocks


def plan_triton(
    q: Tensor, v: Tensor, settings: Settings, regime: str | None = None, fallback: bool = False
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the call of the kernels for all tensors of the kinds of ``q`` and ``v``.

    Args:
        q, v: their head dims are read.
        settings: of the call.
        regime: "pairwise" or "summary"; the cost model's choice if None.
        fallback: let other forms take the place of kernels that do not compile, with a warning.
    """
    settings = settings._replace(fallback=fallback)
    if isinstance(settings.blocks, BlocksOfRank):
        return partial(mhla_triton_of_rank, settings=settings)
    if regime is None and is_symbolic_in_export(settings.blocks.num_tokens):
        regime = "summary"  # linear for all sizes, of which one program cannot choose
    if regime is None:
        shape = settings.blocks, q.shape[-1], v.shape[-1]
        on_hopper = not settings.causal and fits_hopper(*shape) and serve(q.dtype, q.device, fallback)
        regime = choose_regime(*shape, settings.causal, on_hopper, costs_on(q.device))
    settings = settings._replace(regime=regime)
    return partial(mhla_triton, settings=settings, packed=tuple(settings.pack()))


def mhla_triton(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, settings: Settings, packed: Sequence[int]) -> Tensor:
    """Compute :func:`headmix_vision.ops.mhla` in the regime of the settings, which ``packed`` holds for the op."""
    if settings.causal:
        mixing = mixing.tril()  # nothing is computed with weights of later blocks
    denominator = None
    if settings.normalizer == "source_block":
        denominator = _source_block_denominator(q, k, mixing, settings)
    tables = tables_of_graph(q, v.shape[3], packed) if is_inline() else None
    out: Tensor = _call_forward(q, k, v, mixing, denominator, tables, packed)[0]
    return out


def _source_block_denominator(q: Tensor, k: Tensor, mixing: Tensor, settings: Settings) -> Tensor:
    """Compute the denominator that weights of the published code need, in plain PyTorch: [B, H, N] float32."""
    with autocast_off(q):
        tables = settings.blocks.tables(q)
        q, k = (apply_feature_map(x.float(), settings.feature_map, settings.eps) for x in (q, k))
        q, k = to_blocks(tables, q, k)
        mixing = mixing.float().expand(q.shape[0], q.shape[1], *mixing.shape[-2:])
        return (
            source_block_denominator(q, k, mixing, tables, settings.eps, settings.causal)[..., 0]
            .transpose(1, 2)
            .contiguous()
        )


def _saved(q: Tensor, v: Tensor, settings: Settings, denominator: Tensor | None = None) -> Saved:
    """Allocate buffers of the sizes that the settings ask for, and invert a given denominator."""
    B, N, H, D = q.shape
    M = summary.count_summaries(settings) if settings.regime == "summary" else 0
    return Saved(
        q.new_empty(B, H, N if settings.normalizer else 0, dtype=torch.float32)
        if denominator is None
        else denominator.reciprocal(),
        q.new_empty(B, H, M, D, v.shape[-1], dtype=storage_dtype(q.dtype)),
        q.new_empty(B, H, M if settings.normalizer == "paper" else 0, D, dtype=torch.float32),
    )


_FORWARD_KERNELS = (
    pairwise.pairwise_forward_kernel, pairwise.resident_forward_kernel, summary.summarize_kernel, summary.mix_kernel,
    summary.apply_kernel, causal.causal_apply_kernel, shared.expand_runs_kernel,
)  # fmt: skip
_BACKWARD_KERNELS = (
    pairwise.pairwise_backward_query_kernel, pairwise.pairwise_backward_key_kernel, shared.fold_runs_kernel,
    pairwise.resident_backward_key_kernel, summary.backward_query_kernel, summary.backward_key_kernel,
    summary.mixing_gradient_kernel, causal.causal_backward_query_kernel, causal.causal_backward_key_kernel,
    causal.summarize_gradients_kernel,
)  # fmt: skip


# Cached compiled graphs do not notice a change of an op's gradients: when their arguments change, rename the ops.
def _forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, denominator: Tensor | None, tables: Tensor | None,
    settings: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the output and :class:`Saved` from packed settings and, for "source_block", the denominator [B, H, N]."""
    call = unpack_cached(settings)
    out, saved = v.new_empty(v.shape), _saved(q, v, call, denominator)
    if out.numel() and not (FAILED and _kind(q, v, call) in FAILED):
        try:
            with device_of(q):
                return out, *_run_kernels(Forward(q, k, v, mixing, out, saved, call))
        except KernelFailed as error:
            stand_in(error, call.fallback, *_kind(q, v, call))
    if out.numel():
        out.copy_(_in_torch(q, k, v, mixing, denominator, call))
    return out, *saved


def _run_kernels(call: Forward) -> Saved:
    """Fill the output, and return the tensors that the backward pass needs."""
    inverse, settings = call.saved.inverse, call.settings
    if settings.regime == "pairwise":
        pairwise.pairwise_forward(call)
        return call.saved
    if settings.causal:
        return Saved(inverse, *causal.causal_forward(call))
    summaries = summary.summarize(call.k, call.v, settings)
    summary.apply(call.q, summary.mix(summaries, call.mixing, settings), inverse, call.out, settings)
    return Saved(inverse, *summaries)


def _kind(q: Tensor, v: Tensor, call: Settings) -> tuple[Any, ...]:
    """Name what kernels depend on, for those that do not compile; explicit calls have kinds of their own."""
    return "mhla", q.device, q.dtype, q.shape[-1], v.shape[-1], call.regime, call.causal, call.fallback


def _in_torch(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, denominator: Tensor | None, call: Settings) -> Tensor:
    """Compute the output by the PyTorch implementation, with a given denominator [B, H, N] for "source_block"."""
    if denominator is None:
        return mhla_torch(q, k, v, mixing, call)
    out = mhla_torch(q, k, v.float(), mixing, call._replace(normalizer=None))
    return (out / denominator.transpose(1, 2)[..., None]).to(v.dtype)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, denominator: Any, tables: Any, settings: list[int]
) -> tuple[Tensor, ...]:
    return v.new_empty(v.shape), *_saved(q, v, unpack(settings))


def _record(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, denominator: Tensor | None, tables: Tensor | None,
    settings: list[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    traced, call = traced_tables(tables, q, v.shape[3], settings), unpack_cached(settings)
    out, saved = v.new_empty(v.shape), _saved(q, v, call, denominator)
    with record_launches(call.fallback, _kind(q, v, call), traced):
        return out, *_run_kernels(Forward(q, k, v, mixing, out, saved, call))


_forward_op = register("mhla_forward", _forward, _fake, _record, _FORWARD_KERNELS)


def _backward_parts(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    out: Tensor | None,
    inverse: Tensor,
    summary_matrix: Tensor,
    summary_vector: Tensor,
    tables: Tensor | None,
    settings: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute gradients of q, k, v, mixing and a given denominator: pairwise with an ``out``, else from summaries."""
    saved = Saved(inverse, summary_matrix, summary_vector)
    call = Backward(d_out, q, k, v, mixing, out, saved, None, unpack_cached(settings))
    return tuple(_gradients(call))  # type: ignore[return-value]


def _packed_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    out: Tensor | None,
    inverse: Tensor,
    summary_matrix: Tensor,
    summary_vector: Tensor,
    tables: Tensor | None,
    settings: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``mhla_gradients`` for v of the shape of q, the first three of them as one tensor [B, N, 3, H, D]."""
    d_qkv, saved = _packed_gradient(q), Saved(inverse, summary_matrix, summary_vector)
    gradients = _gradients(Backward(d_out, q, k, v, mixing, out, saved, d_qkv, unpack_cached(settings)))
    return d_qkv, gradients.mixing, gradients.denominator


def _packed_gradient(q: Tensor) -> Tensor:
    B, N, H, D = q.shape
    return q.new_empty(B, N, 3, H, D)


def _gradients(call: Backward) -> Gradients:
    """Compute the gradients of all inputs."""
    q, v, saved, settings = call.q, call.v, call.saved, call.settings
    if call.d_out.numel() == 0:
        d_q, d_k, d_v = (gradient(x, call.packed, part).zero_() for part, x in enumerate((q, call.k, v)))
        d_mixing = torch.zeros_like(call.mixing, memory_format=torch.contiguous_format)
        gradients = Gradients(d_q, d_k, d_v, d_mixing, torch.zeros_like(saved.inverse))
    elif FAILED and _kind(q, v, settings) in FAILED:
        gradients = _gradients_in_torch(call)
    else:
        try:
            with device_of(q):
                gradients = _run_backward_kernels(call)
        except KernelFailed as error:
            stand_in(error, settings.fallback, *_kind(q, v, settings))
            gradients = _gradients_in_torch(call)
    return _of_inputs(gradients, call)


def _of_inputs(gradients: Gradients, call: Backward) -> Gradients:
    """Cast the mixing's gradient to the mixing's type; leave out the denominator's gradient if none was given."""
    given = call.settings.normalizer == "source_block"
    denominator = gradients.denominator if given else torch.empty_like(call.saved.inverse[..., :0])
    return gradients._replace(mixing=gradients.mixing.to(call.mixing.dtype), denominator=denominator)


def _run_backward_kernels(call: Backward) -> Gradients:
    if call.settings.regime == "pairwise":
        return pairwise.pairwise_backward(call)
    return causal.causal_backward(call) if call.settings.causal else summary.summary_backward(call)


def _gradients_in_torch(call: Backward) -> Gradients:
    """Compute the gradients by the PyTorch implementation, from the inputs alone."""
    inputs: list[Tensor] = [call.q, call.k, call.v, call.mixing]
    if call.settings.normalizer == "source_block":
        inputs.append(call.saved.inverse.reciprocal())

    def run(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, denominator: Tensor | None = None) -> Tensor:
        return _in_torch(q, k, v, mixing, denominator, call.settings)

    d_inputs = gradients_of(run, inputs, [call.d_out])
    d_q, d_k, d_v = (gradient(x, call.packed, part).copy_(d_inputs[part]) for part, x in enumerate(inputs[:3]))
    return Gradients(d_q, d_k, d_v, d_inputs[3], d_inputs[-1])  # the last is read only where it is the denominator's


def _empty_denominator_gradient(inverse: Tensor, settings: list[int]) -> Tensor:
    return torch.empty_like(inverse if unpack(settings).normalizer == "source_block" else inverse[..., :0])


def _fake_parts(d_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    d_inputs = [x.new_empty(x.shape) for x in arguments[:4]]
    return *d_inputs, _empty_denominator_gradient(arguments[5], arguments[-1])


def _fake_packed(d_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    q, mixing = arguments[0], arguments[3]
    return _packed_gradient(q), mixing.new_empty(mixing.shape), _empty_denominator_gradient(arguments[5], arguments[-1])


def _record_gradients(packed: Tensor | None, d_out: Tensor, *arguments: Any) -> Gradients:
    q, k, v, mixing, out, *saved, tables, settings = arguments
    traced, call = traced_tables(tables, q, v.shape[3], settings), unpack_cached(settings)
    with record_launches(call.fallback, _kind(q, v, call), traced):
        backward = Backward(d_out, q, k, v, mixing, out, Saved(*saved), packed, call)
        return _of_inputs(_run_backward_kernels(backward), backward)


def _record_parts(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(_record_gradients(None, *arguments))


def _record_packed(*arguments: Any) -> tuple[Tensor, ...]:
    d_qkv = _packed_gradient(arguments[1])
    gradients = _record_gradients(d_qkv, *arguments)
    return d_qkv, gradients.mixing, gradients.denominator


_gradients_op = register("mhla_gradients", _backward_parts, _fake_parts, _record_parts, _BACKWARD_KERNELS)
_packed_gradients_op = register(
    "mhla_packed_gradients", _packed_backward, _fake_packed, _record_packed, _BACKWARD_KERNELS
)
_call_gradients = without_dispatcher(_gradients_op, _backward_parts)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mixing, denominator, tables, settings = inputs
    out, *saved = output
    ctx.save_for_backward(q, k, v, mixing, out if needs_output(settings) else None, *saved, tables)
    ctx.given, ctx.settings = denominator is not None, settings
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 7
    q, k, v, *saved = ctx.saved_tensors
    arguments = (d_out, q, k, v, *saved, ctx.settings)
    if are_traced_parts((q, k, v)):
        d_qkv, d_mixing, d_denominator = _packed_gradients_op(*arguments)
        d_q, d_k, d_v = split_parts(d_qkv)
    else:
        d_q, d_k, d_v, d_mixing, d_denominator = _call_gradients(*arguments)
    return d_q, d_k, d_v, d_mixing, d_denominator if ctx.given else None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup_context)
_call_forward = without_dispatcher(_forward_op, as_function(_forward, _setup_context, _backward), differentiable=True)
