"""Checks what kind of thing the arguments of the ops are; sizes that a tracer made are whole numbers."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from headmix_vision.errors import InputError


def check_tensors(**tensors: object) -> None:
    """Raise InputError for what is no tensor."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{name} must be a tensor, got {type(value).__name__}.")


def check_types(same_type: dict[str, torch.Tensor], any_type: dict[str, torch.Tensor]) -> None:
    """Raise InputError unless tensors have floating types, and the device of the first, some of them its type too."""
    first_name, first = next(iter(same_type.items()))
    for name, x in {**same_type, **any_type}.items():
        if not x.is_floating_point():
            raise InputError(f"{name} must have a floating type, got {x.dtype}.")
        if x.device != first.device:
            raise InputError(
                f"{name} is on {x.device}, {first_name} on {first.device}: all inputs must share one device."
            )
    for name, x in same_type.items():
        if x.dtype != first.dtype:
            raise InputError(
                f"{name} has type {x.dtype}, {first_name} {first.dtype}: {', '.join(same_type)} must share one type."
            )


def as_axes(name: str, numbers: object) -> tuple[int, ...]:
    """Return a tuple or list of one whole number for each axis as a tuple.

    Raises:
        InputError: if it is neither, or holds something else.
    """
    axes: tuple[Any, ...] = tuple(map(_as_int, numbers)) if isinstance(numbers, (tuple, list)) else (None,)
    if not all(_is_whole(n) for n in axes):
        raise InputError(f"{name} must be one whole number for each axis, got {numbers!r}.")
    return axes


def check_size(name: str, size: Any, least: int) -> None:
    """Raise InputError for what is no whole number of at least ``least``."""
    if not _is_whole(size) or size < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {size!r}.")


def _as_int(number: object) -> object:
    """Return a whole number of another package, such as NumPy, as Python's."""
    if not isinstance(number, (int, torch.SymInt, torch.Tensor)) and isinstance(number, Integral):
        return int(number)
    return number


def _is_whole(number: object) -> bool:
    if isinstance(number, torch.Tensor):  # torch.jit.trace makes tensors of sizes
        return torch.jit.is_tracing()
    return isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool)
