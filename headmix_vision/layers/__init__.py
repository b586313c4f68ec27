"""Hold the attention layer, and the cores and head mixes that it joins."""

from headmix_vision.layers.attention import HeadMixAttention, undecayed_parameters
from headmix_vision.layers.block_mixing import MixingMatrix, resample_mixing
from headmix_vision.layers.convolutions import ConvPositionEncoding
from headmix_vision.layers.cores import CORES, AttentionCore, HeadInHeadCore, LinearCore, MHLACore, SoftmaxCore
from headmix_vision.layers.cores.base import LayerSpec
from headmix_vision.layers.cores.head_in_head import SubHeadMask
from headmix_vision.layers.head_mixes import HEAD_MIXES, ExplicitHeads, HeadMix, InterleavedHeads
from headmix_vision.layers.swapped_attention import SwappedAttention

__all__ = [
    "CORES",
    "HEAD_MIXES",
    "AttentionCore",
    "ConvPositionEncoding",
    "ExplicitHeads",
    "HeadInHeadCore",
    "HeadMix",
    "HeadMixAttention",
    "InterleavedHeads",
    "LayerSpec",
    "LinearCore",
    "MHLACore",
    "MixingMatrix",
    "SoftmaxCore",
    "SubHeadMask",
    "SwappedAttention",
    "resample_mixing",
    "undecayed_parameters",
]
