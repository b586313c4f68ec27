"""Run the depthwise convolution in Triton kernels, as ``torch.library`` ops with gradients. README.md derives them.

B batch, N tokens, C channels. For the backward pass the ops save the input, the weights and the bias, and compute
again what SiLU needs. Sums have a fixed order: repeated calls are bit-equal.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
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
from headmix_vision.ops.grid_conv import triton_kernels as launch
from headmix_vision.ops.grid_conv.torch_impl import grid_conv_torch
from headmix_vision.ops.runtime import KernelFailed, device_of
from headmix_vision.ops.token_grid import TokenGrid


def grid_conv_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: TokenGrid, residual: bool, silu: bool, fallback: bool = False
) -> Tensor:
    """Compute :func:`headmix_vision.ops.grid_conv` in kernels; for ``fallback`` see ``plan_triton`` of MHLA."""
    sizes = grid.shape, grid.num_prefix_tokens, grid.repeats
    inline = is_inline() and not grid.num_prefix_tokens  # the kernels fill a part of the output, which graphs copy
    out: Tensor = _call_forward(x, weight, bias, *sizes, residual, silu, fallback, inline)
    return out


# Cached compiled graphs do not notice a change of an op's gradients: when their arguments change, rename the ops.
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int], prefix: int, repeats: int, residual: bool,
    silu: bool, fallback: bool, inline: bool,
) -> Tensor:  # fmt: skip
    """Compute the convolved tokens."""
    out = x.new_empty(x.shape)
    if x.numel() and not (FAILED and _kind(x, weight, fallback) in FAILED):
        try:
            return _run_kernel(x, weight, bias, shape, prefix, repeats, residual, silu, out)
        except KernelFailed as error:
            stand_in(error, fallback, *_kind(x, weight, fallback))
    grid = TokenGrid(tuple(shape), prefix, repeats)
    return out.copy_(grid_conv_torch(x, weight, bias, grid, residual, silu)) if x.numel() else out


def _run_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int], prefix: int, repeats: int, residual: bool,
    silu: bool, out: Tensor,
) -> Tensor:  # fmt: skip
    first, planes = prefix * repeats, _planes(tuple(shape), repeats, weight.shape[2:])
    x, tokens = launch.in_rows(x), out
    if prefix:
        out[:, :first] = F.silu(x[:, :first]) if silu else x[:, :first]
        x, tokens = x[:, first:], out[:, first:]
    with device_of(x):
        launch.conv(x, launch.taps_first(weight), bias, None, tokens, planes, residual, silu)
    return out


def _kind(x: Tensor, weight: Tensor, fallback: bool) -> tuple[Any, ...]:
    """Name what kernels depend on, for those that do not compile."""
    return "grid_conv", x.device, x.dtype, weight.shape[2:], fallback


@lru_cache
def _planes(shape: tuple[int, ...], repeats: int, extents: torch.Size) -> launch.Planes:
    return launch.Planes.of(TokenGrid(shape, 0, repeats), tuple(extents))


def _record(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int], prefix: int, repeats: int, residual: bool,
    silu: bool, fallback: bool, inline: bool,
) -> Tensor:  # fmt: skip
    if not inline:
        raise NotRecorded
    with record_launches(fallback, _kind(x, weight, fallback)):
        return _run_kernel(x, weight, bias, shape, prefix, repeats, residual, silu, x.new_empty(x.shape))


_forward_op = register("grid_conv", _forward, lambda x, *_: x.new_empty(x.shape), _record, [launch.conv_kernel])


def _gradients(
    d_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int], prefix: int, repeats: int,
    residual: bool, silu: bool, fallback: bool, inline: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the input, of the weight and of a bias."""
    d_x, d_weight, d_bias = _like_gradients(x, weight, bias)
    if x.numel() == 0:
        return d_x, d_weight.zero_(), d_bias.zero_()
    if not (FAILED and _kind(x, weight, fallback) in FAILED):
        try:
            return _run_backward_kernels(
                d_out, x, weight, bias, shape, prefix, repeats, residual, silu, d_x, d_weight, d_bias
            )
        except KernelFailed as error:
            stand_in(error, fallback, *_kind(x, weight, fallback))
    grid = TokenGrid(tuple(shape), prefix, repeats)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return grid_conv_torch(x, weight, bias, grid, residual, silu)

    inputs = [x, weight] if bias is None else [x, weight, bias]
    for gradient, computed in zip((d_x, d_weight, d_bias), gradients_of(run, inputs, [d_out]), strict=False):
        gradient.copy_(computed)
    return d_x, d_weight, d_bias


def _run_backward_kernels(
    d_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int], prefix: int, repeats: int,
    residual: bool, silu: bool, d_x: Tensor, d_weight: Tensor, d_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    first, planes = prefix * repeats, _planes(tuple(shape), repeats, weight.shape[2:])
    x, d_out, taps, d_tokens = launch.in_rows(x), launch.in_rows(d_out), launch.taps_first(weight), d_x
    if prefix:
        d_prefix, of = d_out[:, :first], x[:, :first]
        d_x[:, :first] = torch.ops.aten.silu_backward(d_prefix, of) if silu else d_prefix
        x, d_out, d_tokens = x[:, first:], d_out[:, first:], d_x[:, first:]
    with device_of(x):
        if silu:
            d_sum = d_out.new_empty(d_out.shape)
            launch.conv(x, taps, bias, d_out, d_sum, planes, residual, silu)
            d_out = d_sum
        launch.weight_gradient(d_out, x, planes, d_weight, d_bias)
        launch.conv(d_out, taps, None, None, d_tokens, planes, residual, flip=True)
    return d_x, d_weight, d_bias


def _like_gradients(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    like = weight if bias is None else bias
    return x.new_empty(x.shape), weight.new_empty(weight.shape), like.new_empty(len(weight))


def _record_gradients(
    d_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int], prefix: int, repeats: int,
    residual: bool, silu: bool, fallback: bool, inline: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not inline:
        raise NotRecorded
    with record_launches(fallback, _kind(x, weight, fallback)):
        return _run_backward_kernels(
            d_out, x, weight, bias, shape, prefix, repeats, residual, silu, *_like_gradients(x, weight, bias)
        )


_gradients_op = register(
    "grid_conv_gradients",
    _gradients,
    lambda d_out, x, weight, bias, *_: _like_gradients(x, weight, bias),
    _record_gradients,
    [launch.conv_kernel, launch.weight_gradient_kernel, launch.sum_parts_kernel],
)
_call_gradients = without_dispatcher(_gradients_op, _gradients)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    d_x, d_weight, d_bias = _call_gradients(d_out, x, weight, bias, *ctx.options)
    return d_x, d_weight, None if bias is None else d_bias, *[None] * len(ctx.options)


_forward_op.register_autograd(_backward, setup_context=_setup_context)
_call_forward = without_dispatcher(_forward_op, as_function(_forward, _setup_context, _backward), differentiable=True)
