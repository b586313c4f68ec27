"""Launches the Triton kernels of head mixing: chooses tiles, computes strides and grids, and allocates sums.

B batch, N tokens, H input heads, G output heads, D head dim, C inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.kernels import alignment
from headmix_vision.ops.mix_heads import triton_backward as backward
from headmix_vision.ops.mix_heads import triton_forward as forward
from headmix_vision.ops.mix_heads import triton_tiles as shared

AT_ONCE = 3  # tensors of a launch
LEAST_ROWS = 16  # no side of a product may be shorter
PART_TILES = 8  # tiles of columns whose weight gradients a program sums, whatever the device and the batch
SUM_ROWS, SUM_COLUMNS = 64, 32
SUM_SHARE = 256  # rows that a program sums
Tiles = dict[str, int]
EXACT = torch.float32  # this type has exact products, which want smaller tiles, and short sums
# The best of sweeps on an H200 for bfloat16, for few and for many heads, and what suits float32. BG and BH are the most
# rows that tiles of output and of input heads have. Four warps have up to 32 output heads: beyond, their product is
# another instruction, whose narrow forms Triton 3.6 gets wrong. A product of float32 adds its heads one by one, to an
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


def _tiles(table: tuple[Tiles, Tiles, Tiles], weights: Tensor, dtype: torch.dtype) -> Tiles:
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


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fill up to three tensors, as the kernels take them, by the first."""
    return [*tensors, *[tensors[0]] * (AT_ONCE - len(tensors))]


def _strides(align: int, tensors: Sequence[Tensor]) -> list[int]:
    return [stride // align for x in _three(tensors) for stride in x.stride()[:3]]


def _rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors whose rows are not contiguous, or whose heads lie further apart than the kernels count."""
    return [x if x.stride(3) == 1 and (x.shape[2] - 1) * x.stride(2) < 2**31 else x.contiguous() for x in tensors]


def _constants(x: Tensor, weights: Tensor, align: int, tiles: Tiles) -> dict[str, Any]:
    C, G, H = weights.shape
    split = weights.dtype != x.dtype and x.dtype != torch.float32
    return dict(C=C, G=G, H=H, D=x.shape[-1], ALIGN=align, SPLIT=split, **tiles)


def mix(inputs: Sequence[Tensor], weights: Tensor, outs: Sequence[Tensor]) -> None:
    """Fill ``outs``, C contiguous tensors [B, N, G, D]."""
    inputs = _rows(inputs)
    B, N, H, D = inputs[0].shape
    tiles = _tiles(FORWARD, weights, inputs[0].dtype)
    per_image = _ceil(N * D, tiles["SHARES"] * tiles["COLUMNS"])
    for first in range(0, len(inputs), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        align = alignment(*inputs[some])
        forward.mix_kernel[(len(inputs[some]) * B * per_image,)](
            *_three(inputs[some]), weights[some], *_three(outs[some]),
            *_strides(align, inputs[some]), *weights.stride(), N, per_image,
            **_constants(inputs[0], weights[some], align, tiles),
        )  # fmt: skip


def mix_backward(
    d_outs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Tensor, d_inputs: Sequence[Tensor], pack: int
) -> Tensor:
    """Fill ``d_inputs``, C tensors [B, N, H, D] that are contiguous or, with ``pack`` > 1, parts of [B, N, pack, H, D].

    Returns:
        The gradient of the weights, [C, G, H] of their type.
    """
    inputs, d_outs = _rows(inputs), _rows(d_outs)
    (B, N, H, D), G = inputs[0].shape, weights.shape[1]
    tiles = _tiles(BACKWARD, weights, inputs[0].dtype)
    S = tiles["SHARES"]
    per_image = _ceil(N * D, S * tiles["COLUMNS"])
    whole = S * G <= tiles["BG"] and S * H <= tiles["BH"]
    # Parts of equal length; long sums of float32 would lose digits.
    per_part = _ceil(per_image, max(1, per_image // PART_TILES)) if whole and inputs[0].dtype != EXACT else 1
    parts = _ceil(per_image, per_part)
    d_weights = weights.new_empty(len(inputs), B * parts * S, G * H, dtype=torch.float32)
    for first in range(0, len(inputs), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        align = alignment(*inputs[some], *d_outs[some])
        backward.mix_backward_kernel[(len(inputs[some]) * B * parts,)](
            *_three(d_outs[some]), *_three(inputs[some]), weights[some], *_three(d_inputs[some]), d_weights[some],
            *_strides(align, d_outs[some]), *_strides(align, inputs[some]), *weights.stride(),
            N, per_image, parts, per_part, PACK=pack,
            **_constants(inputs[0], weights[some], align, tiles),
        )  # fmt: skip
    return _sum_parts(d_weights, weights.dtype).view(weights.shape)


def _sum_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum [C, parts, columns] over the parts, in an order fixed by the shape: [C, columns]."""
    C, rows, columns = x.shape
    shares = _ceil(rows, SUM_SHARE)
    sums = x.new_empty(C, shares, columns, dtype=dtype if shares == 1 else torch.float32)
    shared.sum_parts_kernel[(_ceil(columns, SUM_COLUMNS), shares, C)](
        x, sums, rows, columns, SUM_SHARE, BR=SUM_ROWS, BC=SUM_COLUMNS, num_warps=4
    )
    return sums if shares == 1 else _sum_parts(sums, dtype)
