"""Mix heads in Triton kernels: the kernels, and their launches for each layout.

B batch, N tokens, H input heads, G output heads, D head dim, C inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, planned


@triton.jit
def pick(c, first, second, third):
    """Return what belongs to tensor c."""
    return tl.where(c == 0, first, tl.where(c == 1, second, third))


@triton.jit
def locate(tile, first, N, HEADS: tl.constexpr, SHARES: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    """Return head [ROWS, 1], token and dim [ROWS, COLUMNS] of the entries of a tile, and which of them exist."""
    row = first + tl.arange(0, ROWS)[:, None]
    place = (tile * SHARES + row // HEADS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row % HEADS, (place // D).to(tl.int64), place % D, (row < SHARES * HEADS) & (place < N * D)


@triton.jit
def load_tile(base, stride_n, stride_h, tile, first, N, HEADS: tl.constexpr, SHARES: tl.constexpr, D: tl.constexpr,
              ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Load rows first .. first + ROWS, zero where nothing exists. Strides come divided by ALIGN, as multiples of it."""
    head, token, dim, exists = locate(tile, first, N, HEADS, SHARES, D, ROWS, COLUMNS)
    return tl.load(base + (token * stride_n + head * stride_h) * ALIGN + dim, mask=exists, other=0.0)


@triton.jit
def store_tile(base, x, tile, first, N, HEADS: tl.constexpr, SHARES: tl.constexpr, D: tl.constexpr,
               PACK: tl.constexpr):  # fmt: skip
    """Store rows of an image [N, PACK, HEADS, D], of which ``base`` is one part."""
    head, token, dim, exists = locate(tile, first, N, HEADS, SHARES, D, x.shape[0], x.shape[1])
    tl.store(base + (token * (PACK * HEADS) + head) * D + dim, x.to(base.dtype.element_ty), mask=exists)


@triton.jit
def load_weights(base, stride_row, stride_column, first_row, first_column, ROW_HEADS: tl.constexpr,
                 COLUMN_HEADS: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """Load the weights between rows of two tiles, zero between shares: [ROWS, COLUMNS] float32."""
    row = first_row + tl.arange(0, ROWS)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    exists = (row // ROW_HEADS == column // COLUMN_HEADS) & (row < SHARES * ROW_HEADS)
    pointers = base + row % ROW_HEADS * stride_row + column % COLUMN_HEADS * stride_column
    return tl.load(pointers, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def dot_weights(weights, x, accumulator, SPLIT: tl.constexpr):
    """Add weights times x to the accumulator. SPLIT: weights have more digits than x, and are a sum of two of x's type.

    A product of float32 is exact here: heads are so few that memory, not arithmetic, takes the time. It sums on its
    own what the accumulator then takes as one term.
    """
    if x.dtype == tl.float32:
        # Were it added, the compiler would let the product begin with the accumulator: one long sum.
        return accumulator - tl.dot(-weights, x, input_precision="ieee")
    high = weights.to(x.dtype)
    if SPLIT:
        accumulator = tl.dot((weights - high.to(tl.float32)).to(x.dtype), x, accumulator)
    return tl.dot(high, x, accumulator)


@triton.jit
def sum_parts_kernel(parts, out, rows, columns, share, BR: tl.constexpr, BC: tl.constexpr):
    """Sum each share of the rows of C matrices: float32 [C, rows, columns] -> [C, shares, columns]."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    c, first = tl.program_id(2).to(tl.int64), tl.program_id(0) * share
    end = tl.minimum(first + share, rows)
    total = tl.zeros((BR, BC), tl.float32)
    for start in range(first, end, BR):
        row = start + tl.arange(0, BR)
        pointers = parts + (c * rows + row[:, None]) * columns + column[None, :]
        total += tl.load(pointers, mask=(row < end)[:, None] & (column < columns)[None, :], other=0.0)
    p_out = out + (c * tl.num_programs(0) + tl.program_id(0)) * columns + column
    tl.store(p_out, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def mix_kernel(
    x0, x1, x2, weights, out0, out1, out2,
    x0_b, x0_n, x0_h, x1_b, x1_n, x1_h, x2_b, x2_n, x2_h, weight_c, weight_g, weight_h, N, tiles,
    C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SHARES: tl.constexpr, ALIGN: tl.constexpr,
    SPLIT: tl.constexpr, BG: tl.constexpr, BH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mix C tensors [B, N, H, D] by weights [C, G, H] into [B, N, G, D]."""
    c = tl.program_id(0) % C  # tensors are often parts of one: neighbouring programs read neighbouring memory
    tile = tl.program_id(0) // C % tiles
    b = (tl.program_id(0) // C // tiles).to(tl.int64)
    x = pick(c, x0, x1, x2) + b * pick(c, x0_b, x1_b, x2_b) * ALIGN
    x_n, x_h = pick(c, x0_n, x1_n, x2_n), pick(c, x0_h, x1_h, x2_h)
    out = pick(c, out0, out1, out2) + b * N * (G * D)
    if SHARES * H <= BH:
        # [BH, COLUMNS]
        all_heads = load_tile(x, x_n, x_h, tile, 0, N, H, SHARES, D, ALIGN, BH, COLUMNS)
    for g in tl.static_range(0, SHARES * G, BG):
        mixed = tl.zeros((BG, COLUMNS), tl.float32)
        for h in tl.static_range(0, SHARES * H, BH):
            if SHARES * H <= BH:
                heads = all_heads
            else:
                heads = load_tile(x, x_n, x_h, tile, h, N, H, SHARES, D, ALIGN, BH, COLUMNS)
            w = load_weights(weights + c * weight_c, weight_g, weight_h, g, h, G, H, SHARES, BG, BH)
            mixed = dot_weights(w, heads, mixed, SPLIT)
        store_tile(out, mixed, tile, g, N, G, SHARES, D, 1)


@triton.jit
def _store_part(base, total, part, first_g, first_h, G: tl.constexpr, H: tl.constexpr, SHARES: tl.constexpr):
    """Store the gradients of weights that each share of a part sums: [parts, SHARES, G, H]."""
    g_row = first_g + tl.arange(0, total.shape[0])[:, None]
    h_row = first_h + tl.arange(0, total.shape[1])[None, :]
    pointers = base + ((part * SHARES + g_row // G) * G + g_row % G) * H + h_row % H
    tl.store(pointers, total, mask=(g_row // G == h_row // H) & (g_row < SHARES * G))


@triton.jit
def mix_backward_kernel(
    g0, g1, g2, x0, x1, x2, weights, d_x0, d_x1, d_x2, d_weights,
    g0_b, g0_n, g0_h, g1_b, g1_n, g1_h, g2_b, g2_n, g2_h, x0_b, x0_n, x0_h, x1_b, x1_n, x1_h, x2_b, x2_n, x2_h,
    weight_c, weight_g, weight_h, N, tiles, parts, per_part,
    C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SHARES: tl.constexpr, ALIGN: tl.constexpr,
    SPLIT: tl.constexpr, PACK: tl.constexpr, BG: tl.constexpr, BH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the inputs [B, N, (PACK,) H, D], and of the weights by parts.

    A program makes one of the parts [C, B * parts, SHARES, G, H] from ``per_part`` tiles of columns of an image, or
    from one tile where heads need several tiles of rows.
    """
    c = tl.program_id(0) % C
    part = tl.program_id(0) // C % parts
    b = (tl.program_id(0) // C // parts).to(tl.int64)
    d_out = pick(c, g0, g1, g2) + b * pick(c, g0_b, g1_b, g2_b) * ALIGN
    g_n, g_h = pick(c, g0_n, g1_n, g2_n), pick(c, g0_h, g1_h, g2_h)
    x = pick(c, x0, x1, x2) + b * pick(c, x0_b, x1_b, x2_b) * ALIGN
    x_n, x_h = pick(c, x0_n, x1_n, x2_n), pick(c, x0_h, x1_h, x2_h)
    d_x = pick(c, d_x0, d_x1, d_x2) + b * N * (PACK * H * D)
    weights += c * weight_c
    d_weights += c.to(tl.int64) * (tl.num_programs(0) // C) * (SHARES * G * H)
    part_of_all = b * parts + part
    if SHARES * G <= BG and SHARES * H <= BH:
        w = load_weights(weights, weight_h, weight_g, 0, 0, H, G, SHARES, BH, BG)
        total = tl.zeros((BG, BH), tl.float32)
        for tile in range(part * per_part, tl.minimum(part * per_part + per_part, tiles)):
            # [BG, COLUMNS], [BH, COLUMNS]
            some_d_out = load_tile(d_out, g_n, g_h, tile, 0, N, G, SHARES, D, ALIGN, BG, COLUMNS)
            some_x = load_tile(x, x_n, x_h, tile, 0, N, H, SHARES, D, ALIGN, BH, COLUMNS)
            some_d_x = dot_weights(w, some_d_out, tl.zeros((BH, COLUMNS), tl.float32), SPLIT)
            store_tile(d_x, some_d_x, tile, 0, N, H, SHARES, D, PACK)
            total = tl.dot(some_d_out, tl.trans(some_x), total, input_precision="ieee")
        _store_part(d_weights, total, part_of_all, 0, 0, G, H, SHARES)
    else:
        for h in tl.static_range(0, SHARES * H, BH):
            some_x = load_tile(x, x_n, x_h, part, h, N, H, SHARES, D, ALIGN, BH, COLUMNS)
            some_d_x = tl.zeros((BH, COLUMNS), tl.float32)
            for g in tl.static_range(0, SHARES * G, BG):
                some_d_out = load_tile(d_out, g_n, g_h, part, g, N, G, SHARES, D, ALIGN, BG, COLUMNS)
                w = load_weights(weights, weight_h, weight_g, h, g, H, G, SHARES, BH, BG)
                some_d_x = dot_weights(w, some_d_out, some_d_x, SPLIT)
                total = tl.dot(some_d_out, tl.trans(some_x), input_precision="ieee")
                _store_part(d_weights, total, part_of_all, g, h, G, H, SHARES)
            store_tile(d_x, some_d_x, part, h, N, H, SHARES, D, PACK)


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
    needed = {name: max(LEAST_ROWS, triton.next_power_of_2(shares * n)) for name, n in (("BG", G), ("BH", H))}
    rows = {name: min(most[name], n) for name, n in needed.items()}
    return most | rows | Tiles(SHARES=shares)


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
    per_image = triton.cdiv(N * D, tiles["SHARES"] * tiles["COLUMNS"])
    align = alignment(*inputs)
    numbers = (*_strides(align, inputs), *weights.strides, N, per_image)
    constants = _constants(inputs[0], weights, align, tiles)
    return Launch(mix_kernel, (len(inputs) * B * per_image,), numbers, constants)


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
    per_image = triton.cdiv(N * D, S * tiles["COLUMNS"])
    whole = S * G <= tiles["BG"] and S * H <= tiles["BH"]
    # Parts of equal length; long sums of float32 would lose digits.
    per_part = triton.cdiv(per_image, max(1, per_image // PART_TILES)) if whole and inputs[0].dtype != EXACT else 1
    parts = triton.cdiv(per_image, per_part)
    align = alignment(*inputs, *d_outs)
    strides = (*_strides(align, d_outs), *_strides(align, inputs), *weights.strides)
    numbers = (*strides, N, per_image, parts, per_part)
    constants = _constants(inputs[0], weights, align, tiles) | dict(PACK=pack)
    return BackwardPlan(Launch(mix_backward_kernel, (len(inputs) * B * parts,), numbers, constants), B * parts * S)


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
    shares = triton.cdiv(rows, SUM_SHARE)
    constants = dict(BR=SUM_ROWS, BC=SUM_COLUMNS, num_warps=4)
    grid = (shares, triton.cdiv(columns, SUM_COLUMNS), C)  # only the first may exceed 65,535
    return Launch(sum_parts_kernel, grid, (rows, columns, SUM_SHARE), constants), shares


def _sum_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum [C, parts, columns] over the parts, in an order fixed by the shape: [C, columns]."""
    C, rows, columns = x.shape
    launch, shares = _sum_rows(x.shape, x.device, dtype)
    sums = x.new_empty(C, shares, columns, dtype=dtype if shares == 1 else torch.float32)
    launch(x, sums)
    return sums if shares == 1 else _sum_parts(sums, dtype)
