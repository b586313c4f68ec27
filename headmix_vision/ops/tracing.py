"""Tells tensors with values from those of tracers and transformations, and computes what outlives a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def is_plain(x: Tensor) -> bool:
    """Tell whether a tensor has values that Python may read, and that may be kept from call to call.

    A tensor of torch.compile, of another tracer or of a fake-tensor mode has none; under a transformation of torch.func
    it stands for many, or leaks when it is kept.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and not torch._C._are_functorch_transforms_active()
    )


@contextmanager
def computing_constants() -> Iterator[None]:
    """Compute tensors that are kept from call to call: without autograd and inference mode, unseen by torch.jit.trace.

    A trace would hold their computation if it came first, and their values otherwise.
    """
    tracing = torch._C._get_tracing_state() if torch.jit.is_tracing() else None
    if tracing is not None:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        if tracing is not None:
            torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
