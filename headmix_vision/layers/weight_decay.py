"""Find the parameters of our layers that weight decay leaves alone."""

from __future__ import annotations

from torch import nn


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that a module lists as its ``undecayed``, such as mixing matrices."""
    return {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        for name in getattr(module, "undecayed", ())
        if getattr(module, name, None) is not None
    }
