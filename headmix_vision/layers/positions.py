"""Places of the tokens of a grid, and the rotation of queries and keys by them (RoPE, arXiv 2104.09864).

N tokens, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.ops import TokenGrid
from headmix_vision.ops.dispatch import is_plain
from headmix_vision.ops.numerics import accumulation_dtype
from headmix_vision.ops.runtime import cached_tables

# Cosines and sines of the tokens on the grid, [N, D / 2], or [N, H, D / 2] or [B, N, H, D / 2] with 1 for equal ones.
Rotation = tuple[Tensor, Tensor]


def grid_places(
    grid: tuple[int, ...], base_grid: tuple[int, ...], time_step: float, device: torch.device, first: int = 0
) -> list[Tensor]:
    """Return the places of tokens along each axis of a 1-D to 3-D grid, float64.

    In space the centre of token ``i`` of ``g`` lies at ``(i + 1/2) * base / g - 1/2``: another grid covers the same
    extent. A third axis in front is time, on which token ``i`` lies at ``(first + i) * time_step``: another one
    extends it.
    """
    numbers = [torch.arange(size, dtype=torch.float64, device=device) for size in grid]
    places = [(i + 0.5) * (b / g) - 0.5 for i, g, b in zip(numbers, grid, base_grid, strict=True)]
    return places if len(grid) < 3 else [(first + numbers[0]) * time_step, *places[1:]]


def check_rotary(head_dim: int, num_axes: int) -> None:
    """Raise InputError unless a head has a pair of channels for each axis, and no channel over."""
    if head_dim % 2 or head_dim < 2 * num_axes:
        raise InputError(
            f"rotary positions on {num_axes} axes need an even head dim of at least {2 * num_axes}, got {head_dim}."
        )


def rotary_tables(
    head_dim: int,
    grid: tuple[int, ...],
    base_grid: tuple[int, ...],
    time_step: float,
    like: Tensor,
    first: int = 0,
) -> Rotation:
    """Compute the rotations of rotary positions on a grid; the axes share the channels of a head in their order.

    Of A axes all but the first have ``2 * floor(D / 2A)`` channels, as in Wan.

    Args:
        head_dim: D, even.
        grid, base_grid, time_step, first: see :func:`grid_places`.
        like: gives the device.

    Returns:
        Cosines and sines, float32 [N, D / 2] each.
    """
    if is_plain(like):
        return _cached_rotary(head_dim, grid, base_grid, time_step, like.device, first)
    return _rotary(head_dim, grid, base_grid, time_step, like.device, first)


def _rotary(
    head_dim: int, grid: tuple[int, ...], base_grid: tuple[int, ...], time_step: float, device: torch.device, first: int
) -> Rotation:
    rest = 2 * (head_dim // (2 * len(grid)))
    dims = [head_dim - rest * (len(grid) - 1)] + [rest] * (len(grid) - 1)
    angles = []
    for axis, (dim, places) in enumerate(
        zip(dims, grid_places(grid, base_grid, time_step, device, first), strict=True)
    ):
        frequencies = 10000 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        shape = [-1 if other == axis else 1 for other in range(len(grid))]
        angles.append((places[:, None] * frequencies).view(*shape, dim // 2).expand(*grid, -1))
    whole = torch.cat(angles, -1).flatten(0, -2)
    return whole.cos().float(), whole.sin().float()


@cached_tables
def _cached_rotary(
    head_dim: int, grid: tuple[int, ...], base_grid: tuple[int, ...], time_step: float, device: torch.device, first: int
) -> Rotation:
    cos, sin = _rotary(head_dim, grid, base_grid, time_step, torch.device("cpu"), first)
    return cos.to(device), sin.to(device)


def rotate(x: Tensor, rotation: Rotation, grid: TokenGrid) -> Tensor:
    """Rotate neighbouring pairs of channels of [B, N, H, D], in float32 or wider, which the result is too.

    Prefix tokens are not rotated; pseudo-tokens are rotated as their token.
    """
    cos, sin = (table.to(accumulation_dtype(x.dtype)) for table in rotation)
    if len(cos.shape) == 2:
        cos, sin = cos[:, None], sin[:, None]
    if grid.num_prefix_tokens:
        padding = (0, 0, 0, 0, grid.num_prefix_tokens, 0)
        cos, sin = F.pad(cos, padding, value=1.0), F.pad(sin, padding)
    if grid.repeats > 1:
        cos, sin = cos.repeat_interleave(grid.repeats, -3), sin.repeat_interleave(grid.repeats, -3)
    first, second = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
