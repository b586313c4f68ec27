"""Attention layers: cores, head mixes and the layer which joins them."""

from headmix_vision.layers.attention import HeadMixAttention
from headmix_vision.layers.cores import CORES, AttentionCore, LinearCore, MHLACore, SoftmaxCore
from headmix_vision.layers.head_mixes import HEAD_MIXES
from headmix_vision.layers.mixing import MixingMatrix, resample_mixing
from headmix_vision.layers.position import ConvPositionEncoding

__all__ = [
    "CORES",
    "HEAD_MIXES",
    "AttentionCore",
    "ConvPositionEncoding",
    "HeadMixAttention",
    "LinearCore",
    "MHLACore",
    "MixingMatrix",
    "SoftmaxCore",
    "resample_mixing",
]
