"""Convolve tokens depthwise on their grid, in raster order."""

from headmix_vision.ops.grid_conv.api import grid_conv

__all__ = ["grid_conv"]
