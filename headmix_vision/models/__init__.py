"""Models, registered with timm."""

from typing import TYPE_CHECKING, Any

from headmix_vision.errors import require_extra

require_extra("models", __name__)

import headmix_vision.models.headmix_dit_names  # noqa: F401  (registers them)
from headmix_vision.models.compress import compress_heads
from headmix_vision.models.headmix_vit import HeadMixVisionTransformer

if TYPE_CHECKING:
    from headmix_vision.models.headmix_dit import HeadMixDiT, HeadMixVideoDiT

__all__ = ["HeadMixDiT", "HeadMixVideoDiT", "HeadMixVisionTransformer", "compress_heads"]


def __getattr__(name: str) -> Any:
    if name in ("HeadMixDiT", "HeadMixVideoDiT"):  # loads diffusers
        require_extra("diffusion", name)
        from headmix_vision.models.headmix_dit import HeadMixDiT

        return HeadMixDiT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
