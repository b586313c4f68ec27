"""Computes multi-head linear attention over token blocks (arXiv 2601.07832)."""

from headmix_vision.ops.mhla.api import mhla

__all__ = ["mhla"]
