"""Checks the arguments of the depthwise convolution, in the same way for every implementation."""

from __future__ import annotations

from torch import Tensor

from headmix_vision.checks import check_choice, check_flags
from headmix_vision.errors import InputError
from headmix_vision.ops.dispatch import check_tensors, check_types
from headmix_vision.ops.token_grid import TokenGrid

IMPL_NAMES = ("auto", "reference", "torch", "triton")


def validate_grid_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: TokenGrid, residual: bool, silu: bool, impl: str
) -> None:
    """Raise InputError, naming the argument, unless ``grid_conv`` can run on these arguments."""
    check_choice("impl", impl, IMPL_NAMES)
    check_flags(residual=residual, silu=silu)
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    check_tensors(x=x, **others)
    if x.ndim != 3 or x.shape[1] != grid.num_tokens or x.shape[2] < 1:
        raise InputError(f"x must be [B, N, C] with the N = {grid.num_tokens} of {grid}, got shape {tuple(x.shape)}.")
    C, axes = x.shape[2], len(grid.shape)
    extents = weight.shape[2:]
    if weight.shape[:2] != (C, 1) or len(extents) != axes or not all(extent % 2 for extent in extents):
        raise InputError(
            f"weight must be [C, 1, *extents] with C = {C} channels and an odd extent for each of {axes} axes, "
            f"got shape {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != (C,):
        raise InputError(f"bias must be [C] with C = {C} channels, got shape {tuple(bias.shape)}.")
    check_types({"x": x}, others)
