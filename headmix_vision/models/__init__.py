"""Registers the models with timm."""

from headmix_vision.models.headmix_dit import HeadMixDiT
from headmix_vision.models.headmix_vit import HeadMixVisionTransformer

__all__ = ["HeadMixDiT", "HeadMixVisionTransformer"]
