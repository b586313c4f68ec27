"""Models registered with timm."""

from headmix_vision.models.headmix_vit import HeadMixVisionTransformer

__all__ = ["HeadMixVisionTransformer"]
