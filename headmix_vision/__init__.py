"""Vision models whose attention heads are mixed. Importing the package registers its models with timm.

They are registered as soon as both packages are imported, in either order: this package alone imports in milliseconds.
Without timm, `headmix_vision.ops` and `headmix_vision.layers` remain.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headmix_vision import layers as layers
    from headmix_vision import models as models
    from headmix_vision import ops as ops
    from headmix_vision.models.swap import swap_attention as swap_attention
    from headmix_vision.models.swap_files import from_pretrained as from_pretrained
    from headmix_vision.models.swap_files import save_pretrained as save_pretrained

__version__ = "0.2.0"

if sys.modules.get("timm") is not None:
    import_module("headmix_vision.models")
else:
    from headmix_vision.registry import register_after_timm

    register_after_timm()


_FUNCTIONS = {"swap_attention": "swap", "save_pretrained": "swap_files", "from_pretrained": "swap_files"}


def __getattr__(name: str) -> Any:
    if name in ("layers", "models", "ops"):
        return import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        return getattr(import_module(f"{__name__}.models.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
