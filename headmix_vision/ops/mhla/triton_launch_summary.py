"""Launches the kernels of the summary regime: plans strides and grids for each layout, and allocates outputs.

B batch, N tokens, H heads, M blocks, C parts of blocks, D and Dv head dims.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headmix_vision.ops.mhla import triton_summary as summary
from headmix_vision.ops.mhla import triton_tuning as tuning
from headmix_vision.ops.mhla.regimes import PART_TOKENS
from headmix_vision.ops.mhla.settings import Settings
from headmix_vision.ops.mhla.triton_launch import (
    Gradients,
    ceil,
    choose_tiles,
    gradient,
    kernel_constants,
    mixing_strides,
    normalizer_name,
    pack_size,
    row_strides,
    sum_leading,
)
from headmix_vision.ops.mhla.triton_tables import parts
from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, numerics, planned, storage_dtype

MAX_CHUNKS = 8
VECTOR_TILE = 64


class Summaries(NamedTuple):
    """Summaries of blocks or parts: matrices [B, H, M, D, Dv] and vectors [B, H, M, D] for the paper's normalizer."""

    matrix: Tensor
    vector: Tensor


class QueryGradients(NamedTuple):
    """The gradients of queries and denominators, and the summaries R and r of queries and output gradients."""

    query: Tensor
    denominator: Tensor
    summaries: Summaries


class MixingGradients(NamedTuple):
    """The gradient of the mixing, and the summaries R and r mixed by its transpose."""

    mixing: Tensor
    mixed: Summaries


def parts_of_a_block(settings: Settings) -> int:
    """Count the parts of each block."""
    return ceil(settings.blocks.max_block_size, PART_TOKENS)


def _summed_parts(settings: Settings) -> int:
    """Count the parts whose summaries are summed: those of a block, but in causal attention parts are mixed."""
    return 1 if settings.causal else parts_of_a_block(settings)


def count_summaries(settings: Settings) -> int:
    return settings.blocks.num_blocks * parts_of_a_block(settings) // _summed_parts(settings)


def _token_constants(
    q: Layout, v: Layout, settings: Settings, align: int, t: Tensor, c: tuning.Tiles, **defaults: Any
) -> dict[str, Any]:
    size, tile = t.shape[1], c["BT"]
    tiles = defaults | {name: value for name, value in c.items() if name != "ONE_TILE"}
    if size <= tile and "STAGES" in tiles:
        tiles["STAGES"] = 0
    # Where loads are written a tile ahead, one tile after the last is loaded, too.
    full = size % tile == 0 and t.numel() == q.shape[1] and (size == tile or tiles.get("STAGES", 0) > 0)
    return dict(SINGLE=size <= tile, FULL=full, num_stages=1) | kernel_constants(q, v, settings, align) | tiles


def _token_parts(q: Layout, settings: Settings, c: tuning.Tiles) -> tuple[Tensor, int]:
    """Return the parts of blocks for kernels that compute each token by itself, and how many a block has."""
    split = ceil(settings.blocks.max_block_size, c["BT"]) if c.get("ONE_TILE") else parts_of_a_block(settings)
    return parts(settings.blocks, split, q.device), split


class TokenPlan(NamedTuple):
    """The launch of a kernel of the summary regime, with the table of the tokens that a program takes."""

    table: Tensor
    launch: Launch


def part_summaries(q: Tensor, v: Tensor, settings: Settings) -> Summaries:
    """Allocate summaries of parts: [B, H, C, D, Dv], float32 if they are still to be summed, and vectors [B, H, C, D].

    Only the paper's normalizer needs vectors; others get none, [B, H, 0, D].
    """
    B, _, H, D = q.shape
    C = settings.blocks.num_blocks * parts_of_a_block(settings)
    dtype = storage_dtype(q.dtype) if _summed_parts(settings) == 1 else torch.float32
    vectors = C if settings.normalizer == "paper" else 0
    matrix = q.new_empty(B, H, C, D, v.shape[-1], dtype=dtype)
    return Summaries(matrix, q.new_empty(B, H, vectors, D, dtype=torch.float32))


def _sum_parts(of_parts: Summaries, q: Tensor, settings: Settings) -> Summaries:
    split = _summed_parts(settings)
    if split == 1:
        return of_parts
    matrix, vector = (x.unflatten(2, (-1, split)).sum(3) if x.numel() else x for x in of_parts)
    return Summaries(matrix.to(storage_dtype(q.dtype)), vector)


@planned
def _summarize(k: Layout, v: Layout, settings: Settings) -> TokenPlan:
    B, _, H, _ = k.shape
    t = parts(settings.blocks, parts_of_a_block(settings), k.device)
    c = choose_tiles(tuning.SUMMARIZE, k, v)
    align = alignment(k, v)
    numbers = (*row_strides(align, k, v), H, *t.shape, settings.eps)
    constants = _token_constants(k, v, settings, align, t, c, STAGES=0, DOTS=False)
    return TokenPlan(t, Launch(summary.summarize_kernel, (B * H * len(t),), numbers, constants))


def summarize(k: Tensor, v: Tensor, settings: Settings) -> Summaries:
    """Compute the summaries S [B, H, M, D, Dv] and z [B, H, M, D] of keys and values."""
    t, launch = _summarize(layout(k), layout(v), settings)
    summaries = part_summaries(k, v, settings)
    launch(k, v, *summaries, t)
    return _sum_parts(summaries, k, settings)


@planned
def _mix(matrix: Layout, vector: Layout, mixing: Layout, transposed: bool, settings: Settings) -> Launch:
    B, H, M = matrix.shape[:3]
    size = matrix.shape[3:].numel()
    c = tuning.mix_tiles(M, matrix.dtype)
    row_tiles, column_tiles, chunks = ceil(M, c["BM"]), ceil(size, c["BF"]), ceil(M, c["BC"])
    shares = max(ceil(column_tiles, c["per"]), ceil(vector.shape[-1], VECTOR_TILE))
    *head, row, source = mixing.strides
    strides = mixing_strides((*head, source, row) if transposed else mixing.strides)
    compute, precision = numerics(matrix.dtype, mixing.gpu)
    constants = dict(
        REVERSED=not transposed,
        SIZE=size, VECTOR_SIZE=vector.shape[-1], VECTOR_TILE=VECTOR_TILE, CHUNKS=chunks if chunks <= MAX_CHUNKS else 0,
        NORMALIZER=normalizer_name(settings), COMPUTE=compute, PRECISION=precision,
        **{name: value for name, value in c.items() if name != "per"},
    )  # fmt: skip
    return Launch(summary.mix_kernel, (B * H * row_tiles * shares,), (*strides, H, M, row_tiles, shares), constants)


def mix(summaries: Summaries, mixing: Tensor, settings: Settings, transposed: bool = False) -> Summaries:
    """Mix the summaries by the mixing matrix or its transpose; shapes stay."""
    launch = _mix(*map(layout, (*summaries, mixing)), transposed, settings)
    mixed = Summaries(*map(torch.empty_like, summaries))
    launch(*summaries, mixing, *mixed)
    return mixed


@planned
def _apply(q: Layout, out: Layout, settings: Settings) -> TokenPlan:
    B, N, H, D = q.shape
    c = choose_tiles(tuning.APPLY, q, out)
    t, split = _token_parts(q, settings, c)
    align = alignment(q)
    numbers = (*row_strides(align, q), N, H, settings.blocks.num_blocks, len(t), split, t.shape[1], settings.eps)
    constants = _token_constants(q, out, settings, align, t, c, DOTS=False)
    return TokenPlan(t, Launch(summary.apply_kernel, (B * H * len(t),), numbers, constants))


def apply(q: Tensor, mixed: Summaries, inverse: Tensor, out: Tensor, settings: Settings) -> None:
    """Multiply queries by mixed summaries: fill ``out`` and, for the paper's normalizer, ``inverse``."""
    t, launch = _apply(layout(q), layout(out), settings)
    launch(q, *mixed, out, inverse, t)


def summary_backward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, summaries: Summaries, inverse: Tensor, d_out: Tensor,
    packed: Tensor | None, settings: Settings,
) -> Gradients:  # fmt: skip
    """Compute the gradients of all inputs from the block summaries of the forward pass."""
    # The summaries are mixed again rather than saved; each result is freed before the next step takes memory.
    from_query = backward_query(q, mix(summaries, mixing, settings), inverse, d_out, packed, settings)
    from_mixing = mixing_gradient(from_query.summaries, summaries, mixing, settings)
    denominator, d_q = from_query.denominator, from_query.query
    del from_query
    d_k, d_v = backward_key(k, v, from_mixing.mixed, packed, settings)
    return Gradients(d_q, d_k, d_v, from_mixing.mixing, denominator)


@planned
def _backward_query(q: Layout, d_out: Layout, pack: int, settings: Settings) -> TokenPlan:
    B, N, H, D = q.shape
    t = parts(settings.blocks, parts_of_a_block(settings), q.device)
    c = choose_tiles(tuning.BACKWARD_QUERY, q, d_out)
    single = t.shape[1] <= c["BT"]
    if not single:
        c = choose_tiles(tuning.BACKWARD_QUERY_LONG, q, d_out)
    align = alignment(q, d_out)
    sizes = (N, H, settings.blocks.num_blocks, len(t), parts_of_a_block(settings), t.shape[1])
    constants = _token_constants(q, d_out, settings, align, t, c, STAGES=0, DOTS=False, DIVIDE=single, PACK=pack)
    numbers = (*row_strides(align, q, d_out), *sizes, settings.eps)
    return TokenPlan(t, Launch(summary.backward_query_kernel, (B * H * len(t),), numbers, constants))


def backward_query(
    q: Tensor, mixed: Summaries, inverse: Tensor, d_out: Tensor, packed: Tensor | None, settings: Settings
) -> QueryGradients:
    B, N, H, D = q.shape
    t, launch = _backward_query(layout(q), layout(d_out), pack_size(packed), settings)
    d_q = gradient(q, packed, 0)
    d_denominator = q.new_empty(B, H, N, dtype=torch.float32)
    summaries = part_summaries(q, d_out, settings)
    launch(q, *mixed, inverse, d_out, d_q, d_denominator, *summaries, t)
    return QueryGradients(d_q, d_denominator, _sum_parts(summaries, q, settings))


class MixingGradientPlan(NamedTuple):
    """The launch for the gradient of the mixing.

    Attributes:
        shape: of the unsummed gradients, [B, splits, H, M, M].
        together: whether the kernel mixes the summaries of the backward pass, too.
    """

    launch: Launch
    shape: tuple[int, ...]
    together: bool


@planned
def _mixing_gradient(R: Layout, r: Layout, mixing: Layout, settings: Settings) -> MixingGradientPlan:
    B, H, M = R.shape[:3]
    size = R.shape[3:].numel()
    c = tuning.mixing_gradient_tiles(M, R.dtype, R.gpu.shared_memory)
    row_tiles = ceil(M, c["BM"])
    splits = max(1, min(ceil(size, c["BF"] * 4), 1024 // (B * H * row_tiles * row_tiles)))
    compute, precision = numerics(R.dtype, R.gpu)
    together = row_tiles == 1
    *head, row, column = mixing.strides
    constants = dict(
        SIZE=size, VECTOR_SIZE=r.shape[-1], MIX=together,
        NORMALIZER=normalizer_name(settings), COMPUTE=compute, PRECISION=precision, **c,
    )  # fmt: skip
    numbers = (*mixing_strides((*head, column, row)), H, M, row_tiles, splits)
    launch = Launch(summary.mixing_gradient_kernel, (B * H * row_tiles * row_tiles * splits,), numbers, constants)
    return MixingGradientPlan(launch, (B, splits, H, M, M), together)


def mixing_gradient(backward: Summaries, forward: Summaries, mixing: Tensor, settings: Settings) -> MixingGradients:
    """Compute the gradient of the mixing from the summaries R, r of the backward pass and S, z of the forward pass.

    It is <R_i, S_j> + r_i . z_j, summed over the batch, and over heads that share the mixing: [(H,) M, M]
    float32. Where one tile holds all blocks, the kernel mixes R and r as it reads them.
    """
    launch, shape, together = _mixing_gradient(*map(layout, (*backward, mixing)), settings)
    d_mixing = mixing.new_empty(shape, dtype=torch.float32)
    mixed = Summaries(*map(torch.empty_like, backward)) if together else None
    launch(*backward, *forward, d_mixing, mixing, *(mixed or (None, None)))
    mixed = mixed or mix(backward, mixing, settings, transposed=True)
    return MixingGradients(sum_leading(d_mixing, 2 if mixing.ndim == 3 else 3), mixed)


@planned
def _backward_key(k: Layout, v: Layout, pack: int, settings: Settings) -> TokenPlan:
    B, N, H, _ = k.shape
    c = choose_tiles(tuning.BACKWARD_KEY, k, v)
    t, split = _token_parts(k, settings, c)
    align = alignment(k, v)
    numbers = (*row_strides(align, k, v), N, H, settings.blocks.num_blocks, len(t), split, t.shape[1], settings.eps)
    mixed_apart = settings.blocks.num_blocks > tuning.MIXING_TILE
    constants = _token_constants(k, v, settings, align, t, c, PACK=pack, REVERSED=mixed_apart)
    return TokenPlan(t, Launch(summary.backward_key_kernel, (B * H * len(t),), numbers, constants))


def backward_key(
    k: Tensor, v: Tensor, mixed: Summaries, packed: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of keys and values from the mixed summaries of queries and output gradients."""
    t, launch = _backward_key(layout(k), layout(v), pack_size(packed), settings)
    d_k, d_v = gradient(k, packed, 1), gradient(v, packed, 2)
    launch(k, v, *mixed, d_k, d_v, t)
    return d_k, d_v
