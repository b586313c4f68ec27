"""Analyses of attention layers: effective matrices in numbers and maps, and what networks have learned to mix.

The command is `headmix analyze`. From Python:

    from headmix_vision.analysis import ProfileRequest, analyze
    rows = analyze(ProfileRequest(kind="rank", model=("deit_mhla_digits",), data="digits", out="rank")).tables["rank"]

    from headmix_vision.analysis.attention import record_attention
    attention = record_attention(network, images)[3]           # of layer 3
    matrices = attention.matrices(0)                           # of the first image: [H, N, N], float64
"""

from typing import TYPE_CHECKING, Any

from headmix_vision.analysis.analysis_request import MapsRequest, MixingRequest, ProfileRequest

if TYPE_CHECKING:
    from headmix_vision.analysis.analysis_job import Analyzed, analyze

__all__ = ["Analyzed", "MapsRequest", "MixingRequest", "ProfileRequest", "analyze"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headmix_vision.analysis import analysis_job  # imports torch and matplotlib

    return getattr(analysis_job, name)
