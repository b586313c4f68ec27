"""Checks what kind of thing the arguments of the ops are; sizes that a tracer made are whole numbers."""

from __future__ import annotations

import torch

from headmix_vision.errors import InputError


def check_tensors(**tensors: object) -> None:
    """Raise InputError for what is no tensor."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{name} must be a tensor, got {type(value).__name__}.")


def as_axes(name: str, numbers: object) -> tuple[int, ...]:
    """Return a tuple or list of one whole number for each axis as a tuple.

    Raises:
        InputError: if it is neither, or holds something else.
    """
    axes = tuple(numbers) if isinstance(numbers, (tuple, list)) else (None,)
    if any(isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)) for n in axes):
        raise InputError(f"{name} must be one whole number for each axis, got {numbers!r}.")
    return axes


def check_size(name: str, size: object, least: int) -> None:
    """Raise InputError for what is no whole number of at least ``least``."""
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)) or size < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {size!r}.")
