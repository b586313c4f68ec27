"""Recognises tensors that are the parts of one packed projection, whose gradients may then be parts of one tensor too.

The adjoint of ``chunk`` and ``split`` concatenates gradients; Inductor leaves this out for all parts of one tensor.
Plain tensors are never packed: PyTorch copies parts of one tensor more slowly than it copies as many tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq

from headmix_vision.ops.tracing import has_plain_type


def are_traced_parts(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a tracer shows C tensors [B, N, H, D] as the parts into which one [B, N, C H D] was cut."""
    x = tensors[0]
    if has_plain_type(x):
        return False
    width, first = x.shape[2] * x.shape[3], x.storage_offset()
    layout = (*x.shape, x.stride(0), len(tensors) * width, x.shape[3], 1)
    return all(
        guard_or_false(sym_eq((*x.shape, *x.stride(), x.storage_offset()), (*layout, first + part * width)))
        for part, x in enumerate(tensors)
    )


def split_parts(packed: Tensor) -> list[Tensor]:
    """Cut [B, N, C, H, D] into C parts [B, N, H, D]."""
    B, N, C, H, D = packed.shape
    # Inductor leaves out a concatenation of these if it and the split name the dim by one number, not -1.
    return [x.view(B, N, H, D) for x in torch.split_with_sizes(packed.flatten(2), [H * D] * C, 2)]
