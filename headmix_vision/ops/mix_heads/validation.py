"""Checks the arguments of the head mixing op, in the same way for every implementation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headmix_vision.checks import check_choice
from headmix_vision.errors import InputError
from headmix_vision.ops.dispatch import check_tensors, check_types

IMPL_NAMES = ("auto", "reference", "torch", "triton")


def validate_mix_heads(inputs: Sequence[Tensor], weights: Tensor, impl: str) -> None:
    """Raise InputError, naming the argument, unless ``mix_heads`` can run on these arguments."""
    check_choice("impl", impl, IMPL_NAMES)
    if not isinstance(inputs, (tuple, list)) or len(inputs) == 0:
        given = "none" if isinstance(inputs, (tuple, list)) else type(inputs).__name__
        raise InputError(f"inputs must be a tuple of at least one tensor, got {given}.")
    named = {f"inputs[{c}]": x for c, x in enumerate(inputs)}
    check_tensors(**named, weights=weights)
    first = inputs[0]
    if first.ndim != 4 or first.shape[2] < 1 or first.shape[3] < 1:
        raise InputError(
            f"inputs[0] must be [B, N, H, D] with at least one head and a head dim of at least 1, "
            f"got shape {tuple(first.shape)}."
        )
    for name, x in named.items():
        if x.shape != first.shape:
            raise InputError(f"{name} must have the shape of inputs[0], {tuple(first.shape)}, got {tuple(x.shape)}.")
    C, H = len(inputs), first.shape[2]
    if weights.ndim != 3 or weights.shape[0] != C or weights.shape[1] < 1 or weights.shape[2] != H:
        raise InputError(
            f"weights must be [C, G, H] with C = {C} inputs and H = {H} heads, got shape {tuple(weights.shape)}."
        )

    check_types(named, {"weights": weights})
