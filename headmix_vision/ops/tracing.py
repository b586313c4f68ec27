"""Tells tensors with values from those of tracers and transformations."""

from __future__ import annotations

import torch
from torch import Tensor


def is_plain(x: Tensor) -> bool:
    """Tell whether a tensor has values that Python may read, and that may be kept from call to call.

    A tensor of torch.compile, of another tracer or of a fake-tensor mode has none; under a transformation of torch.func
    it stands for many, or leaks when it is kept.
    """
    return not torch.compiler.is_compiling() and has_plain_type(x) and not is_transforming()


def has_plain_type(x: Tensor) -> bool:
    """Tell whether a tensor is of no subclass, which may have its own way with ops."""
    return type(x) in (Tensor, torch.nn.Parameter)


def is_transforming() -> bool:
    """Tell whether a transformation of torch.func runs, outside of compilers, which have their own ways with it."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
