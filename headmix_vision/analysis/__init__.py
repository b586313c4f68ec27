"""Analyses of attention layers: effective matrices in numbers and maps, and what networks have learned to mix.

The command is `headmix analyze`. From Python:

    from headmix_vision.analysis import ProfileRequest, analyze
    rows = analyze(ProfileRequest(kind="rank", model=("deit_mhla_digits",), data="digits", out="rank")).tables["rank"]

    from headmix_vision.analysis.attention_matrices import record_attention
    attention = record_attention(network, images)[3]           # of layer 3
    matrices = attention.matrices(0)                           # of the first image: [H, N, N], float64
"""

from typing import TYPE_CHECKING

from headmix_vision.analysis.analysis_request import MapsRequest, MixingRequest, ProfileRequest, SensitivityRequest
from headmix_vision.errors import imported_when_used

if TYPE_CHECKING:
    from headmix_vision.analysis.analysis_job import Analyzed, analyze

__all__ = ["Analyzed", "MapsRequest", "MixingRequest", "ProfileRequest", "SensitivityRequest", "analyze"]

__getattr__ = imported_when_used(__name__, "analysis_job", __all__)
