"""Test whether the weights of a module may be applied outside of it, or the module has to be called."""

from __future__ import annotations

from torch import nn


def is_bare(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Return whether a module of one of these types is its weight and bias alone, which others may then apply.

    Adapters, hooks and a replaced ``forward`` act when the module is called: pruning and offloading make weights there.
    """
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return type(module) in types and "forward" not in vars(module) and not any(hooks)
