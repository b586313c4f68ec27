"""Calls ops of torch.library without its dispatcher, whose Python costs several times what launching a kernel costs.

It is left out where only eager PyTorch can see the op: for plain tensors, outside of tracers, transformations and
dispatch modes. Both ways run the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.tracing import has_plain_type, is_transforming

Run = Callable[..., Any]


def without_dispatcher(op: Run, run: Run, *, differentiable: bool = False) -> Run:
    """Return a function that calls ``run`` for plain tensors, and else the op.

    Args:
        op: the op, which computes what ``run`` computes.
        run: takes the arguments of the op.
        differentiable: whether ``run`` has gradients; if not, the op refuses them while they are recorded.
    """

    def call(*args: Any) -> Any:
        past = (differentiable or not torch.is_grad_enabled()) and _is_eager() and all(map(_is_plain, args))
        return (run if past else op)(*args)

    return call


def _is_eager() -> bool:
    """Tell whether neither a tracer nor a transformation nor a dispatch mode looks on."""
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack()
    return not tracing and not is_transforming()


def _is_plain(argument: Any) -> bool:
    """Tell whether an argument is or holds no tensor of a subclass; a list holds tensors alone, or none."""
    if isinstance(argument, Tensor):
        return has_plain_type(argument)
    if isinstance(argument, list) and argument and isinstance(argument[0], Tensor):
        return all(map(has_plain_type, argument))
    return True


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


def apply_either(traced: type[torch.autograd.Function], eager: type[torch.autograd.Function]) -> Run:
    """Return what applies one of two forms of a function: ``traced`` under torch.compile, else ``eager``.

    Both have a ``setup_context``, without which torch.func cannot transform them. PyTorch binds the arguments of such a
    function by name, which takes longer than a small kernel, so that ``eager`` is applied without it outside of
    transformations.
    """

    class Unbound(eager):  # type: ignore[valid-type, misc]
        setup_context = staticmethod(torch.autograd.Function.setup_context)  # none of its own

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = eager.forward(*args)
            eager.setup_context(ctx, args, output)
            return output

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced.apply(*args)
        return (eager if is_transforming() else Unbound).apply(*args)

    return apply
