"""Launches the Triton kernels of head mixing: plans tiles, strides and grids for each layout, and allocates sums.

B batch, N tokens, H input heads, G output heads, D head dim, C inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from headmix_vision.ops.mix_heads import triton_backward as backward
from headmix_vision.ops.mix_heads import triton_forward as forward
from headmix_vision.ops.mix_heads import triton_tiles as shared
from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, planned

AT_ONCE = 3  # tensors of a launch
LEAST_ROWS = 16  # no side of a product may be shorter
PART_TILES = 8  # tiles of columns whose weight gradients a program sums, whatever the device and the batch
SUM_ROWS, SUM_COLUMNS = 64, 32
SUM_SHARE = 256  # rows that a program sums
Tiles = dict[str, int]
T = TypeVar("T")
EXACT = torch.float32  # this type has exact products, which want smaller tiles, and short sums
# The best of sweeps on an H200 for bfloat16, for few and for many heads, and what suits float32. BG and BH are the most
# rows that tiles of output and of input heads have. Four warps have up to 32 output heads: beyond, Hopper multiplies
# by another instruction, for which no tiles were swept. A product of float32 adds its heads one by one, to an
# error that grows with their number: it has LEAST_ROWS of them, and several products are added.
FORWARD = (
    Tiles(BG=32, BH=32, COLUMNS=128, num_warps=1, num_stages=1),
    Tiles(BG=32, BH=32, COLUMNS=512, num_warps=4, num_stages=1),
    Tiles(BG=32, BH=LEAST_ROWS, COLUMNS=128, num_warps=2, num_stages=1),
)
BACKWARD = (
    Tiles(BG=64, BH=64, COLUMNS=128, num_warps=1, num_stages=2),
    Tiles(BG=64, BH=64, COLUMNS=128, num_warps=2, num_stages=1),
    Tiles(BG=LEAST_ROWS, BH=64, COLUMNS=64, num_warps=2, num_stages=1),
)
FEW_HEADS = 8


def _tiles(table: tuple[Tiles, Tiles, Tiles], weights: Layout, dtype: torch.dtype) -> Tiles:
    """Choose tiles, with the rows that the heads need, and as many shares as fit the least rows."""
    _, G, H = weights.shape
    few = min(G, H) <= FEW_HEADS
    most = table[2 if dtype == EXACT else 0 if few else 1]
    shares = max(1, LEAST_ROWS // max(G, H))
    rows = {name: min(most[name], max(LEAST_ROWS, _power_of_two(shares * n))) for name, n in (("BG", G), ("BH", H))}
    return most | rows | Tiles(SHARES=shares)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _three(tensors: Sequence[T]) -> list[T]:
    """Fill up to three tensors, as the kernels take them, by the first."""
    return [*tensors, *[tensors[0]] * (AT_ONCE - len(tensors))]


def _strides(align: int, tensors: Sequence[Layout]) -> list[int]:
    return [stride // align for x in _three(tensors) for stride in x.strides[:3]]


def _rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors whose rows are not contiguous, or whose heads lie further apart than the kernels count."""
    return [x if x.stride(3) == 1 and (x.shape[2] - 1) * x.stride(2) < 2**31 else x.contiguous() for x in tensors]


def _constants(x: Layout, weights: Layout, align: int, tiles: Tiles) -> dict[str, Any]:
    C, G, H = weights.shape
    split = weights.dtype != x.dtype and x.dtype != torch.float32
    return dict(C=C, G=G, H=H, D=x.shape[-1], ALIGN=align, SPLIT=split, **tiles)


@planned
def _mix(inputs: tuple[Layout, ...], weights: Layout) -> Launch:
    B, N, H, D = inputs[0].shape
    tiles = _tiles(FORWARD, weights, inputs[0].dtype)
    per_image = _ceil(N * D, tiles["SHARES"] * tiles["COLUMNS"])
    align = alignment(*inputs)
    numbers = (*_strides(align, inputs), *weights.strides, N, per_image)
    constants = _constants(inputs[0], weights, align, tiles)
    return Launch(forward.mix_kernel, (len(inputs) * B * per_image,), numbers, constants)


def mix(inputs: Sequence[Tensor], weights: Tensor, outs: Sequence[Tensor]) -> None:
    """Fill ``outs``, C contiguous tensors [B, N, G, D]."""
    inputs = _rows(inputs)
    for first in range(0, len(inputs), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        launch = _mix(tuple(map(layout, inputs[some])), layout(weights[some]))
        launch(*_three(inputs[some]), weights[some], *_three(outs[some]))


class BackwardPlan(NamedTuple):
    """The launch of the backward pass, and how many unsummed gradients each weight gets."""

    launch: Launch
    sums: int


@planned
def _mix_backward(d_outs: tuple[Layout, ...], inputs: tuple[Layout, ...], weights: Layout, pack: int) -> BackwardPlan:
    (B, N, H, D), G = inputs[0].shape, weights.shape[1]
    tiles = _tiles(BACKWARD, weights, inputs[0].dtype)
    S = tiles["SHARES"]
    per_image = _ceil(N * D, S * tiles["COLUMNS"])
    whole = S * G <= tiles["BG"] and S * H <= tiles["BH"]
    # Parts of equal length; long sums of float32 would lose digits.
    per_part = _ceil(per_image, max(1, per_image // PART_TILES)) if whole and inputs[0].dtype != EXACT else 1
    parts = _ceil(per_image, per_part)
    align = alignment(*inputs, *d_outs)
    strides = (*_strides(align, d_outs), *_strides(align, inputs), *weights.strides)
    numbers = (*strides, N, per_image, parts, per_part)
    constants = _constants(inputs[0], weights, align, tiles) | dict(PACK=pack)
    return BackwardPlan(
        Launch(backward.mix_backward_kernel, (len(inputs) * B * parts,), numbers, constants), B * parts * S
    )


def mix_backward(
    d_outs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Tensor, d_inputs: Sequence[Tensor], pack: int
) -> Tensor:
    """Fill ``d_inputs``, C tensors [B, N, H, D] that are contiguous or, with ``pack`` > 1, parts of [B, N, pack, H, D].

    Returns:
        The gradient of the weights, [C, G, H] of their type.
    """
    inputs, d_outs = _rows(inputs), _rows(d_outs)
    d_weights = []
    for first in range(0, len(inputs), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        layouts = (tuple(map(layout, x[some])) for x in (d_outs, inputs))
        launch, sums = _mix_backward(*layouts, layout(weights[some]), pack)
        of_some = weights.new_empty(len(inputs[some]), sums, weights[0].numel(), dtype=torch.float32)
        tensors = (*_three(d_outs[some]), *_three(inputs[some]), weights[some], *_three(d_inputs[some]))
        launch(*tensors, of_some)
        d_weights.append(_sum_parts(of_some, weights.dtype).view(weights[some].shape))
    return d_weights[0] if len(d_weights) == 1 else torch.cat(d_weights)


@planned
def _sum_rows(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> tuple[Launch, int]:
    """Plan a sum of rows into a type, and count its shares; it is compiled for each device and type."""
    C, rows, columns = shape
    shares = _ceil(rows, SUM_SHARE)
    constants = dict(BR=SUM_ROWS, BC=SUM_COLUMNS, num_warps=4)
    grid = (shares, _ceil(columns, SUM_COLUMNS), C)  # only the first may exceed 65,535
    return Launch(shared.sum_parts_kernel, grid, (rows, columns, SUM_SHARE), constants), shares


def _sum_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum [C, parts, columns] over the parts, in an order fixed by the shape: [C, columns]."""
    C, rows, columns = x.shape
    launch, shares = _sum_rows(x.shape, x.device, dtype)
    sums = x.new_empty(C, shares, columns, dtype=dtype if shares == 1 else torch.float32)
    launch(x, sums)
    return sums if shares == 1 else _sum_parts(sums, dtype)
