"""Registers the models with timm."""

from typing import TYPE_CHECKING, Any

from headmix_vision.extras import require_extra

require_extra("models", __name__)

from headmix_vision.models import headmix_dit
from headmix_vision.models.headmix_vit import HeadMixVisionTransformer

if TYPE_CHECKING:
    from headmix_vision.models.headmix_dit import HeadMixDiT

__all__ = ["HeadMixDiT", "HeadMixVisionTransformer"]


def __getattr__(name: str) -> Any:
    if name == "HeadMixDiT":  # loads diffusers
        return headmix_dit.HeadMixDiT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
