"""Lets the PyTorch form of an op serve, under ``impl="auto"``, where one of its kernels does not compile.

It serves inside the op, which compiled graphs call as eager code does: the backward pass of inputs whose forward pass
had no kernels has none either, and may lack them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.kernels import warn_once
from headmix_vision.ops.launching import KernelFailed

# Inputs for which kernels did not compile: the name of the op, and what its kernels depend on.
FAILED: set[tuple[Hashable, ...]] = set()
# What an op excludes while it runs, so that autograd does not record inside.
_AUTOGRAD = ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView")


def stand_in(error: KernelFailed, allowed: bool, *inputs: Hashable) -> None:
    """Warn once that the PyTorch form serves for such inputs, or raise the error where kernels were asked for."""
    if not allowed:
        raise error
    FAILED.add(inputs)
    warn_once(f"{error}; the slower PyTorch form takes their place (impl='auto')")


def gradients_of(run: Callable[..., Any], inputs: Sequence[Tensor], d_outputs: Sequence[Tensor]) -> list[Tensor]:
    """Compute the gradients of the inputs of a differentiable function, inside or outside of an op.

    Args:
        run: takes the inputs and returns one tensor, or as many as ``d_outputs``.
        inputs: tensors of floating types.
        d_outputs: gradients of the outputs.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = run(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return list(torch.autograd.grad(outputs, leaves, d_outputs, allow_unused=True, materialize_grads=True))
