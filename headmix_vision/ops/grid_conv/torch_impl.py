"""Compute the depthwise convolution by that of PyTorch, on any device.

B batch, N tokens, C channels. Tokens in raster order are images in channels-last format, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from headmix_vision.ops.dispatch import is_transforming
from headmix_vision.ops.numerics import accumulation_dtype, autocast_off
from headmix_vision.ops.token_grid import TokenGrid

CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)


def grid_conv_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: TokenGrid, residual: bool, silu: bool
) -> Tensor:
    """Compute :func:`headmix_vision.ops.grid_conv` by a convolution of images."""
    dtype = accumulation_dtype(x.dtype)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    with autocast_off(x):
        convolve = partial(_convolve, weight=weight, bias=bias)
        return convolve_grid(x.to(dtype), convolve, grid, residual, silu).to(x.dtype)


def convolve_grid(
    x: Tensor, convolve: Callable[[Tensor], Tensor], grid: TokenGrid, residual: bool = False, silu: bool = False
) -> Tensor:
    """Compute ``grid_conv`` by any convolution of images [B, C, *grid.shape] that keeps their shape."""
    repeats, num_prefix_places = grid.repeats, grid.num_prefix_tokens * grid.repeats
    prefix, tokens = x[:, :num_prefix_places], x[:, num_prefix_places:]
    if repeats > 1:  # give each place a grid of its own
        tokens = tokens.unflatten(1, (-1, repeats)).transpose(1, 2).flatten(0, 1)
    out = convolve(tokens.transpose(1, 2).unflatten(2, grid.shape)).flatten(2).transpose(1, 2)
    out = tokens + out if residual else out
    if repeats > 1:
        out = out.unflatten(0, (-1, repeats)).transpose(1, 2).flatten(1, 2)
    out = torch.cat([prefix, out], dim=1) if num_prefix_places else out
    return F.silu(out) if silu else out


def _convolve(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve [B, C, *shape] with zeros around the images."""
    learns = torch.is_grad_enabled() and (images.requires_grad or weight.requires_grad)
    if images.ndim == 5 and learns and not images.is_cuda and not is_transforming():
        out: Tensor = _Clips.apply(images, weight)
        return out if bias is None else out + bias[:, None, None, None]
    padding = [extent // 2 for extent in weight.shape[2:]]
    return CONVOLUTIONS[images.ndim - 3](images, weight, bias, padding=padding, groups=images.shape[1])


class _Clips(torch.autograd.Function):
    """Convolve [B, C, T, H, W] with faster gradients than PyTorch's, which on a CPU take ten times as long.

    The gradient of the input is a convolution too; that of the weight is one of images for each tap in time.
    """

    @staticmethod
    def forward(ctx: Any, clips: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(clips, weight)
        return _convolve(clips, weight, None)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        clips, weight = ctx.saved_tensors
        with autocast_off(d_out):
            d_clips = _convolve(d_out, weight.flip(2, 3, 4), None) if ctx.needs_input_grad[0] else None
            return d_clips, _gradient_of_weight(d_out, clips, weight) if ctx.needs_input_grad[1] else None


def _gradient_of_weight(d_out: Tensor, clips: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of [C, 1, kt, kh, kw]: tap by tap in time, that of the frames which it brings together."""
    T, (kt, kh, kw), taps = clips.shape[2], weight.shape[2:], []
    padding = (kh // 2, kw // 2)
    for shift in range(-(kt // 2), kt // 2 + 1):
        length = T - abs(shift)
        if length <= 0:
            taps.append(torch.zeros_like(weight[:, :, 0]))
            continue
        frames = clips.narrow(2, max(0, shift), length).transpose(1, 2).flatten(0, 1)
        d_frames = d_out.narrow(2, max(0, -shift), length).transpose(1, 2).flatten(0, 1)
        taps.append(conv2d_weight(frames, weight[:, :, 0].shape, d_frames, 1, padding, groups=len(weight)))
    return torch.stack(taps, 2)
