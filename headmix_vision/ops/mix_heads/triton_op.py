"""Run head mixing in Triton kernels, as ``torch.library`` ops with gradients. README.md derives the kernels.

B batch, N tokens, H input heads, G output heads, D head dim, C inputs. For the backward pass the ops save the inputs
and the weights. Sums have a fixed order: repeated calls are bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.dispatch import (
    FAILED,
    are_traced_parts,
    as_function,
    gradients_of,
    register,
    split_parts,
    stand_in,
    without_dispatcher,
)
from headmix_vision.ops.mix_heads import triton_kernels as launch
from headmix_vision.ops.mix_heads.torch_impl import mix_heads_torch
from headmix_vision.ops.runtime import KernelFailed, device_of


def mix_heads_triton(*tensors: Tensor, fallback: bool = False) -> tuple[Tensor, ...]:
    """Compute :func:`headmix_vision.ops.mix_heads` in kernels; for ``fallback`` see ``plan_triton`` of MHLA."""
    return tuple(_call_forward(list(tensors[:-1]), tensors[-1], fallback))


# Cached compiled graphs do not notice a change of an op's gradients: when their arguments change, rename the ops.
def _forward(inputs: list[Tensor], weights: Tensor, fallback: bool) -> list[Tensor]:
    """Compute the C mixed tensors."""
    outs = _outputs(inputs, weights)
    if outs[0].numel() == 0:
        return outs
    if not (FAILED and _kind(inputs, weights, fallback) in FAILED):
        try:
            with device_of(weights):
                launch.mix(inputs, weights, outs)
            return outs
        except KernelFailed as error:
            stand_in(error, fallback, *_kind(inputs, weights, fallback))
    return [out.copy_(x) for out, x in zip(outs, mix_heads_torch(*inputs, weights), strict=True)]


def _kind(inputs: list[Tensor], weights: Tensor, fallback: bool) -> tuple[Any, ...]:
    """Name what kernels depend on, for those that do not compile."""
    return "mix_heads", weights.device, inputs[0].dtype, inputs[0].shape[-1], weights.shape, fallback


def _outputs(inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    B, N, _, D = inputs[0].shape
    return [x.new_empty(B, N, weights.shape[1], D) for x in inputs]


_forward_op = register("mix_heads", _forward, lambda inputs, weights, fallback: _outputs(inputs, weights))


def _gradients(
    d_outs: list[Tensor], inputs: list[Tensor], weights: Tensor, fallback: bool
) -> tuple[list[Tensor], Tensor]:
    """Compute the gradients of the inputs and of the weights."""
    d_inputs = [x.new_empty(x.shape) for x in inputs]
    return d_inputs, _fill_gradients(d_outs, inputs, weights, d_inputs, 1, fallback)


_gradients_op = register(
    "mix_heads_gradients",
    _gradients,
    lambda d_outs, inputs, weights, fallback: (
        [x.new_empty(x.shape) for x in inputs],
        weights.new_empty(weights.shape),
    ),
)
_call_gradients = without_dispatcher(_gradients_op, _gradients)


def _packed_gradients(
    d_outs: list[Tensor], inputs: list[Tensor], weights: Tensor, fallback: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``mix_heads_gradients``, the gradients of the inputs as one tensor [B, N, C, H, D]."""
    packed = _packed_gradient(inputs)
    return packed, _fill_gradients(d_outs, inputs, weights, packed.unbind(2), len(inputs), fallback)


_packed_gradients_op = register(
    "mix_heads_packed_gradients",
    _packed_gradients,
    lambda d_outs, inputs, weights, fallback: (_packed_gradient(inputs), weights.new_empty(weights.shape)),
)


def _packed_gradient(inputs: list[Tensor]) -> Tensor:
    B, N, H, D = inputs[0].shape
    return inputs[0].new_empty(B, N, len(inputs), H, D)


def _fill_gradients(
    d_outs: list[Tensor], inputs: list[Tensor], weights: Tensor, d_inputs: Any, pack: int, fallback: bool
) -> Tensor:
    """Fill the gradients of the inputs, and return that of the weights."""
    if inputs[0].numel() == 0:
        return torch.zeros_like(weights, memory_format=torch.contiguous_format)
    if not (FAILED and _kind(inputs, weights, fallback) in FAILED):
        try:
            with device_of(weights):
                return launch.mix_backward(d_outs, inputs, weights, d_inputs, pack)
        except KernelFailed as error:
            stand_in(error, fallback, *_kind(inputs, weights, fallback))
    *computed, d_weights = gradients_of(mix_heads_torch, [*inputs, weights], d_outs)
    for d_input, gradient in zip(d_inputs, computed, strict=True):
        d_input.copy_(gradient)
    return d_weights


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    tensors, weights, ctx.fallback = inputs
    ctx.save_for_backward(*tensors, weights)


def _backward(ctx: Any, d_outs: list[Tensor]) -> tuple[list[Tensor], Tensor, None]:
    *inputs, weights = ctx.saved_tensors
    if len(inputs) > 1 and are_traced_parts(inputs):
        packed, d_weights = _packed_gradients_op(d_outs, inputs, weights, ctx.fallback)
        return split_parts(packed), d_weights, None
    return *_call_gradients(d_outs, inputs, weights, ctx.fallback), None


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _forward_flat(fallback: bool, weights: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Compute ``mix_heads`` of tensors that are not in a list: autograd does not look into lists."""
    return tuple(_forward(list(inputs), weights, fallback))


def _setup_flat(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    fallback, weights, *tensors = inputs
    _setup_context(ctx, (tensors, weights, fallback), output)


def _backward_flat(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
    d_inputs, d_weights, _ = _backward(ctx, list(d_outs))
    return None, d_weights, *d_inputs


_flat = as_function(_forward_flat, _setup_flat, _backward_flat)
_call_forward = without_dispatcher(
    _forward_op, lambda inputs, weights, fallback: _flat(fallback, weights, *inputs), differentiable=True
)
