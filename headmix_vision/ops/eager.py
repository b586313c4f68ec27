"""Calls ops of torch.library without its dispatcher, whose Python costs several times what launching a kernel costs.

It is left out where only eager PyTorch can see the op: for plain tensors, outside of tracers, transformations and
dispatch modes. Both ways run the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headmix_vision.ops.tracing import is_plain

Run = Callable[..., Any]


def without_dispatcher(op: Run, run: Run, *, like: int = 0, differentiable: bool = False) -> Run:
    """Return a function that calls ``run`` for plain tensors, and else the op.

    Args:
        op: the op, which computes what ``run`` computes.
        run: takes the arguments of the op.
        like: which of the arguments tells, as the others are of its kind.
        differentiable: whether ``run`` has gradients; if not, the op refuses them while they are recorded.
    """

    def call(*args: Any) -> Any:
        past = _is_eager(args[like]) and (differentiable or not torch.is_grad_enabled())
        return (run if past else op)(*args)

    return call


def _is_eager(x: Any) -> bool:
    return is_plain(x) and not torch.jit.is_tracing() and not torch._C._len_torch_dispatch_stack()


def as_function(run: Run, setup_context: Run, backward: Run) -> Run:
    """Return a function of tensors with the gradients that are registered for its op."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:  # a setup_context of its own costs a binding of the arguments
            output = run(*args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *d_outputs: Any) -> Any:
            return backward(ctx, *d_outputs)

    Function.__name__ = run.__name__.strip("_")
    return Function.apply
