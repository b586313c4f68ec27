"""Loads the tiles of the depthwise convolution inside its Triton kernels.

A tile [BT, BC] holds the places of BH x BW tokens of one plane of the grid, the same in each of STEPS planes, for BC
channels; what is loaded of a plane serves all planes that it is a neighbour of. README.md derives tiles and loops.
"""

import triton
import triton.language as tl


@triton.jit
def places(tile, tiles_w, BH: tl.constexpr, BW: tl.constexpr):
    """Return row and place in the row, [BT, 1] each, of the tile of a plane."""
    token = tl.arange(0, BH * BW)[:, None]
    return tile // tiles_w * BH + token // BW, tile % tiles_w * BW + token % BW


@triton.jit
def load_planes(base, stride, row, place, allowed, first, T, H, W, COUNT: tl.constexpr, ALIGN: tl.constexpr):
    """Load the same places of COUNT planes in a row, float32, zero outside of the grid. ``base`` points to channels.

    ``stride`` lies between tokens, divided by ALIGN.
    """
    allowed = allowed & (row >= 0) & (row < H) & (place >= 0) & (place < W)
    pointers = base + (row * W + place).to(tl.int64) * stride * ALIGN
    planes = ()
    for i in tl.static_range(COUNT):
        t = first + i
        offset = t.to(tl.int64) * (H * W) * stride * ALIGN
        x = tl.load(pointers + offset, mask=allowed & (t >= 0) & (t < T), other=0.0)
        planes = planes + (x.to(tl.float32),)
    return planes
