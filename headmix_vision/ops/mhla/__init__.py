"""Compute multi-head linear attention over token blocks (arXiv 2601.07832)."""

from headmix_vision.ops.mhla.api import mhla
from headmix_vision.ops.mhla.recurrent import MHLAState, mhla_step

__all__ = ["MHLAState", "mhla", "mhla_step"]
