"""Run Head-in-Head in Triton kernels, as ``torch.library`` ops with gradients. README.md derives it.

B batch, N tokens, H heads, Dk and Dv head dims, r sub-heads. For the backward pass the ops save the inputs and, for
every chunk, its decays and scores, the inverse of its system, the state before it and its corrections. Sums have a
fixed order: repeated calls are bit-equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.dispatch import (
    FAILED,
    NotRecorded,
    as_function,
    gradients_of,
    is_inline,
    record_launches,
    register,
    stand_in,
    without_dispatcher,
)
from headmix_vision.ops.head_in_head import triton_launch as launch
from headmix_vision.ops.head_in_head.torch_impl import Inputs, head_in_head_torch
from headmix_vision.ops.runtime import KernelFailed, device_of
from headmix_vision.ops.token_scan import ScanTables


def head_in_head_triton(inputs: Inputs, scan: ScanTables | None, fallback: bool = False) -> tuple[Tensor, Tensor]:
    """Compute :func:`headmix_vision.ops.head_in_head` in kernels; for ``fallback`` see ``plan_triton`` of MHLA."""
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    out, final, *_ = _call_forward(*inputs, None if scan is None else scan.order, save, fallback, is_inline())
    return out, final


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    mask: Tensor,
    initial_state: Tensor | None,
    order: Tensor | None,
    save: bool,
    fallback: bool,
    inline: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the output, the final state and the tensors of :class:`triton_launch.Saved`."""
    inputs = Inputs(q, k, v, beta, log_decay, mask, initial_state)
    out, final, buffers = _outputs(q, v, mask, save, inline)
    if q.shape[0] * q.shape[2] == 0:
        return out, final, *buffers
    if not (FAILED and _kind(q, v, mask, fallback) in FAILED):
        try:
            with device_of(q):
                launch.forward_pass(inputs, order, buffers, out, final)
            return out, final, *buffers
        except KernelFailed as error:
            stand_in(error, fallback, *_kind(q, v, mask, fallback))
    tables = None if order is None else ScanTables(order)
    computed, state = head_in_head_torch(inputs, tables)
    out.copy_(computed)
    final.copy_(state)
    return out, final, *buffers


def _kind(q: Tensor, v: Tensor, mask: Tensor, fallback: bool) -> tuple[Any, ...]:
    """Name what kernels depend on, for those that do not compile."""
    return "head_in_head", q.device, q.dtype, q.shape[-1], v.shape[-1], mask.shape[-1], mask.ndim, fallback


def _fake(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor, initial_state: Any, order: Any,
    save: bool, fallback: bool, inline: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, final, buffers = _outputs(q, v, mask, save, inline)
    return out, final, *buffers


def _record(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor, initial_state: Tensor | None,
    order: Tensor | None, save: bool, fallback: bool, inline: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not inline:
        raise NotRecorded
    out, final, buffers = _outputs(q, v, mask, save, inline)
    with record_launches(fallback, _kind(q, v, mask, fallback)):
        inputs = Inputs(q, k, v, beta, log_decay, mask, initial_state)
        launch.forward_pass(inputs, order, buffers, out, final)
    return out, final, *buffers


_forward_op = register("head_in_head", _forward, _fake, _record, [launch.prepare_kernel, launch.scan_kernel])


def _outputs(q: Tensor, v: Tensor, mask: Tensor, save: bool, inline: bool) -> tuple[Tensor, Tensor, launch.Saved]:
    out = v.new_empty(v.shape)
    final = q.new_empty(q.shape[0], *q.shape[2:], v.shape[-1], dtype=torch.float32)
    return out, final, launch.saved(q, v, mask, save, inline)


def _backward_pass(
    d_out: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    mask: Tensor,
    initial_state: Tensor | None,
    order: Tensor | None,
    decays: Tensor,
    scores: Tensor,
    inverse: Tensor,
    states: Tensor,
    corrections: Tensor,
    fallback: bool,
    inline: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, beta, log_decay, mask and the initial state."""
    inputs = Inputs(q, k, v, beta, log_decay, mask, initial_state)
    if q.shape[0] * q.shape[2] == 0:
        d_initial = q.new_empty(q.shape[0], *q.shape[2:], v.shape[-1], dtype=torch.float32)
        d_q, d_k, d_v, d_beta, d_log_decay, d_mask = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs[:6]
        )
        return d_q, d_k, d_v, d_beta, d_log_decay, d_mask, d_initial
    if not (FAILED and _kind(q, v, mask, fallback) in FAILED):
        try:
            with device_of(q):
                buffers = launch.Saved(decays, scores, inverse, states, corrections)
                return _of_types(launch.backward_pass(inputs, order, buffers, d_out, d_final), inputs)
        except KernelFailed as error:
            stand_in(error, fallback, *_kind(q, v, mask, fallback))
    tables = None if order is None else ScanTables(order)
    size = q.shape[0], *q.shape[2:], v.shape[-1]
    initial = q.new_zeros(size, dtype=torch.float32) if initial_state is None else initial_state.float()
    d_outputs = [d_out, initial.new_zeros(size) if d_final is None else d_final]
    leaves = [*inputs[:6], initial]
    return tuple(gradients_of(lambda *x: head_in_head_torch(Inputs(*x), tables), leaves, d_outputs))  # type: ignore[return-value]


def _of_types(d: launch.Gradients, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_gates = d.beta.to(inputs.beta.dtype), d.log_decay.to(inputs.log_decay.dtype)
    return d.q, d.k, d.v, *d_gates, d.mask.to(inputs.mask.dtype), d.initial_state


def _fake_backward(d_out: Tensor, d_final: Any, *tensors: Any) -> tuple[Tensor, ...]:
    q, _, v = tensors[:3]
    d_initial = q.new_empty(q.shape[0], *q.shape[2:], v.shape[-1], dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in tensors[:6]), d_initial


def _record_backward(d_out: Tensor, d_final: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, order, decays, scores, inverse, states, corrections, fallback, inline = arguments
    if not inline:
        raise NotRecorded
    inputs, buffers = Inputs(*tensors), launch.Saved(decays, scores, inverse, states, corrections)
    with record_launches(fallback, _kind(inputs.q, inputs.v, inputs.mask, fallback)):
        return _of_types(launch.backward_pass(inputs, order, buffers, d_out, d_final), inputs)


_backward_op = register(
    "head_in_head_backward",
    _backward_pass,
    _fake_backward,
    _record_backward,
    [launch.scan_backward_kernel, launch.inputs_backward_kernel],
)
_call_backward = without_dispatcher(_backward_op, _backward_pass)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, beta, log_decay, mask, initial_state, order, _, *ctx.options = inputs
    out, final, *saved = output
    ctx.save_for_backward(q, k, v, beta, log_decay, mask, initial_state, order, *saved)
    ctx.state_dtype = None if initial_state is None else initial_state.dtype
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if d_out is None and d_final is None:
        return (None,) * 11
    saved = ctx.saved_tensors  # read once: an activation checkpoint does not unpack them a second time
    v = saved[2]
    d_out = v.new_zeros(v.shape) if d_out is None else d_out
    *gradients, d_initial = _call_backward(d_out, d_final, *saved, *ctx.options)
    return *gradients, None if ctx.state_dtype is None else d_initial.to(ctx.state_dtype), None, None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup_context)
_call_forward = without_dispatcher(_forward_op, as_function(_forward, _setup_context, _backward), differentiable=True)
