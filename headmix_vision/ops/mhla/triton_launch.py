"""Launches the Triton kernels: computes strides and grids, and allocates outputs.

B batch, N tokens, H heads, M blocks, C parts of blocks, D and Dv head dims. The kernels take the normalizers
"paper" (they write the inverse denominators), "given" (they read them) and "none".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headmix_vision.ops.kernels import SMALL_FLOAT32_PRECISION, alignment, gpu_of, numerics
from headmix_vision.ops.mhla import triton_pairwise as pairwise
from headmix_vision.ops.mhla import triton_summary as summary
from headmix_vision.ops.mhla import triton_tiles as shared
from headmix_vision.ops.mhla import triton_tuning as tuning
from headmix_vision.ops.mhla.settings import Settings
from headmix_vision.ops.mhla.triton_tables import Places, parts, places

# Tokens in a part of a block, whatever the device and the batch: results do not depend on these.
PART_TOKENS = 512
# Bytes of the unsummed mixing gradients of the pairwise backward pass; larger batches take several launches.
MIXING_GRADIENT_BYTES = 1 << 26
MAX_CHUNKS = 8
VECTOR_TILE = 64
RUN_TILE = 32


class Summaries(NamedTuple):
    """Summaries of blocks or parts: matrices [B, H, M, D, Dv] and vectors [B, H, M, D] for the paper's normalizer."""

    matrix: Tensor
    vector: Tensor


class Gradients(NamedTuple):
    """The gradients of the inputs; those of the mixing and of a given denominator [B, H, N] are float32."""

    query: Tensor
    key: Tensor
    value: Tensor
    mixing: Tensor
    denominator: Tensor


class QueryGradients(NamedTuple):
    """The gradients of queries and denominators, and the summaries R and r of queries and output gradients."""

    query: Tensor
    denominator: Tensor
    summaries: Summaries


class MixingGradients(NamedTuple):
    """The gradient of the mixing, and the summaries R and r mixed by its transpose."""

    mixing: Tensor
    mixed: Summaries


def _tiles(table: tuple[tuning.Row, ...], x: Tensor, y: Tensor) -> tuning.Tiles:
    return tuning.tiles(table, max(x.shape[-1], y.shape[-1]), x.dtype, gpu_of(x).shared_memory)


def _split(settings: Settings) -> int:
    """Count the parts of each block."""
    return _ceil(settings.blocks.max_block_size, PART_TOKENS)


def _normalizer(settings: Settings) -> str:
    return {"paper": "paper", "source_block": "given", None: "none"}[settings.normalizer]


def gradient(x: Tensor, packed: Tensor | None, part: int) -> Tensor:
    """Allocate the gradient of an input [B, N, H, D], or take its part of a packed tensor [B, N, PACK, H, D]."""
    return x.new_empty(x.shape) if packed is None else packed[:, :, part]


def _pack(packed: Tensor | None) -> dict[str, int]:
    return dict(PACK=1 if packed is None else packed.shape[2])


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _strides(align: int, *tensors: Tensor) -> list[int]:
    return [s for x in tensors for s in (*(stride // align for stride in x.stride()[:-1]), x.stride(-1))]


def _mixing_strides(mixing: Tensor) -> tuple[int, ...]:
    """Return the strides of [H, ...] weights; those that heads share have stride 0 over H."""
    return (0, *mixing.stride()) if mixing.ndim == 2 else mixing.stride()


def _constants(q: Tensor, v: Tensor, settings: Settings, align: int) -> dict[str, Any]:
    compute, precision, _ = numerics(q.dtype)
    if q.dtype == torch.float32 and tuning.is_wide(max(q.shape[-1], v.shape[-1]), q.dtype):
        precision = SMALL_FLOAT32_PRECISION
    (d1, d2), (dv1, dv2) = tuning.head_parts(q.shape[-1]), tuning.head_parts(v.shape[-1])
    return dict(
        D=q.shape[-1], D1=d1, D2=d2, DV=v.shape[-1], DV1=dv1, DV2=dv2,
        NORMALIZER=_normalizer(settings), FEATURE_MAP=settings.feature_map,
        COMPUTE=compute, PRECISION=precision, ALIGN=align,
    )  # fmt: skip


def _pairwise_constants(q: Tensor, v: Tensor, settings: Settings, align: int, t: Places, c: tuning.Tiles) -> dict:
    full = t.full and t.num_places % c["BQ"] == 0 and t.num_places % c["BK"] == 0
    return dict(RUN=t.run, FULL=full, num_stages=1) | _constants(q, v, settings, align) | c


def _places(c: tuning.Tiles, q: Tensor, settings: Settings) -> Places:
    return places(settings.blocks, min(c["BQ"], c["BK"]), q.device)


def _run_weights(mixing: Tensor, t: Places) -> Tensor:
    """Spread mixing weights to each pair of runs, up to whole tiles: [(H,) padded runs, padded runs]."""
    if mixing.shape[-1] == t.padded_runs:  # runs are blocks
        return mixing
    heads, tiles = mixing.shape[:-2], _ceil(t.padded_runs, RUN_TILE)
    weights = mixing.new_empty(*heads, t.padded_runs, t.padded_runs)
    shared.expand_runs_kernel[(heads.numel() * tiles**2,)](
        mixing, weights, t.blocks, len(t.blocks), t.padded_runs, *_mixing_strides(mixing), TILE=RUN_TILE
    )
    return weights


def is_resident(dim: int, num_tokens: int, dtype: torch.dtype) -> bool:
    """Tell whether pairwise kernels hold all keys and values, or queries and gradients, of a head on chip."""
    return dtype == torch.bfloat16 and dim <= 64 and num_tokens <= tuning.RESIDENT_TOKENS


def pairwise_forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, inverse: Tensor, out: Tensor, settings: Settings
) -> None:
    """Fill ``out`` [B, N, H, Dv] and, for the paper's normalizer, ``inverse`` [B, H, N]."""
    B, N, H, D = q.shape
    resident = is_resident(max(D, v.shape[-1]), N, q.dtype)
    c = tuning.resident(tuning.RESIDENT_FORWARD, N) if resident else _tiles(tuning.PAIRWISE_FORWARD, q, v)
    t = _places(c, q, settings)
    weights = _run_weights(mixing, t)
    align = alignment(q, k, v)
    arguments = (
        q, k, v, weights, out, inverse, t.tokens,
        *_strides(align, q, k, v), *_mixing_strides(weights), N, H, t.num_places, settings.eps,
    )  # fmt: skip
    constants = _pairwise_constants(q, v, settings, align, t, c)
    if resident:
        pairwise.resident_forward_kernel[(B * H,)](
            *arguments, TILES=_ceil(t.num_places, c["BK"]), PREFETCH=t.run >= tuning.PREFETCH_RUN, **constants
        )
    else:
        pairwise.pairwise_forward_kernel[(B * H * _ceil(t.num_places, c["BQ"]),)](*arguments, **constants)


def pairwise_backward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, out: Tensor, inverse: Tensor, d_out: Tensor,
    packed: Tensor | None, settings: Settings,
) -> Gradients:  # fmt: skip
    d_q, d_mixing, d_scale = _pairwise_backward_query(q, k, v, mixing, out, inverse, d_out, packed, settings)
    d_k, d_v = _pairwise_backward_key(q, k, v, mixing, inverse, d_out, d_scale, packed, settings)
    return Gradients(d_q, d_k, d_v, d_mixing, d_scale)


def _pairwise_backward_query(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, out: Tensor, inverse: Tensor, d_out: Tensor,
    packed: Tensor | None, settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute gradients of queries, mixing and denominators (by place for the paper's normalizer, else by token)."""
    B, N, H, D = q.shape
    M = settings.blocks.num_blocks
    c = _tiles(tuning.PAIRWISE_BACKWARD_QUERY, q, v)
    t = _places(c, q, settings)
    weights = _run_weights(mixing, t)
    d_q = gradient(q, packed, 0)
    d_scale = q.new_empty(B, H, t.num_places if settings.normalizer == "paper" else N, dtype=torch.float32)

    query_tiles, key_tiles = _ceil(t.num_places, c["BQ"]), _ceil(t.num_places, c["BK"])
    sums = (query_tiles * c["BQ"] // t.run, key_tiles * c["BK"] // t.run)
    per_launch = max(1, min(B, MIXING_GRADIENT_BYTES // (4 * H * sums[0] * sums[1])))
    d_weights = []
    for first in range(0, B, per_launch):
        some = slice(first, first + per_launch)
        b_q, b_k, b_v, b_out, b_inverse, b_g = (x[some] for x in (q, k, v, out, inverse, d_out))
        b_weights = q.new_empty(len(b_q), H, *sums, dtype=torch.float32)
        align = alignment(b_q, b_k, b_v, b_out, b_g)
        pairwise.pairwise_backward_query_kernel[(len(b_q) * H * query_tiles,)](
            b_q, b_k, b_v, weights, b_out, b_inverse, b_g, d_q[some], d_scale[some], b_weights, t.tokens,
            *_strides(align, b_q, b_k, b_v, b_out, b_g), *_mixing_strides(weights), N, H, t.num_places, settings.eps,
            **_pairwise_constants(q, v, settings, align, t, c), **_pack(packed),
        )  # fmt: skip
        d_weights.append(_sum_leading(b_weights, 1 if mixing.ndim == 3 else 2))
    d_mixing = d_weights[0] if len(d_weights) == 1 else torch.stack(d_weights).sum(0)
    return d_q, _fold_runs(d_mixing, t, M), d_scale


def _fold_runs(d_weights: Tensor, t: Places, num_blocks: int) -> Tensor:
    """Sum the gradients of the weights of each pair of runs to those of the mixing: [(H,) M, M]."""
    if len(t.blocks) == num_blocks:
        return d_weights[..., :num_blocks, :num_blocks].contiguous()
    heads = d_weights.shape[:-2]
    d_mixing = d_weights.new_empty(*heads, num_blocks, num_blocks)
    grid = (heads.numel() * _ceil(num_blocks, 16) ** 2,)
    shared.fold_runs_kernel[grid](
        d_weights, d_mixing, t.blocks, len(t.blocks), *d_weights.shape[-2:], num_blocks, TILE=64, BM=16, num_warps=4
    )
    return d_mixing


def _pairwise_backward_key(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, inverse: Tensor, d_out: Tensor, d_scale: Tensor,
    packed: Tensor | None, settings: Settings,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of keys and values."""
    B, N, H, D = q.shape
    fits = gpu_of(q).shared_memory >= tuning.RESIDENT_BACKWARD_KB << 10
    resident = fits and is_resident(max(D, v.shape[-1]), N, q.dtype)
    c = tuning.resident(tuning.RESIDENT_BACKWARD_KEY, N) if resident else _tiles(tuning.PAIRWISE_BACKWARD_KEY, q, v)
    t = _places(c, q, settings)
    weights = _run_weights(mixing, t)
    d_k, d_v = gradient(k, packed, 1), gradient(v, packed, 2)
    align = alignment(q, k, v, d_out)
    arguments = (
        q, k, v, weights, inverse, d_out, d_scale, d_k, d_v, t.tokens,
        *_strides(align, q, k, v, d_out), *_mixing_strides(weights), N, H, t.num_places, settings.eps,
    )  # fmt: skip
    constants = _pairwise_constants(q, v, settings, align, t, c) | _pack(packed)
    if resident:
        tiles = _ceil(t.num_places, c["BQ"])
        pairwise.resident_backward_key_kernel[(B * H,)](*arguments, TILES=tiles, **constants)
    else:
        pairwise.pairwise_backward_key_kernel[(B * H * _ceil(t.num_places, c["BK"]),)](*arguments, **constants)
    return d_k, d_v


def _token_constants(q: Tensor, v: Tensor, settings: Settings, align: int, size: int, c: tuning.Tiles) -> dict:
    tiles = {name: value for name, value in c.items() if name != "ONE_TILE"}
    return dict(SINGLE=size <= c["BT"], num_stages=1) | _constants(q, v, settings, align) | tiles


def _token_parts(q: Tensor, settings: Settings, c: tuning.Tiles) -> tuple[Tensor, int]:
    """Return the parts of blocks for kernels that compute each token by itself, and how many a block has."""
    split = _ceil(settings.blocks.max_block_size, c["BT"]) if c.get("ONE_TILE") else _split(settings)
    return parts(settings.blocks, split, q.device), split


def _part_summaries(q: Tensor, v: Tensor, settings: Settings) -> Summaries:
    """Allocate summaries of parts: [B, H, C, D, Dv], float32 if they are still to be summed, and vectors [B, H, C, D].

    Only the paper's normalizer needs vectors; others get none, [B, H, 0, D].
    """
    B, _, H, D = q.shape
    C = settings.blocks.num_blocks * _split(settings)
    dtype = numerics(q.dtype).storage if _split(settings) == 1 else torch.float32
    vectors = C if settings.normalizer == "paper" else 0
    matrix = q.new_empty(B, H, C, D, v.shape[-1], dtype=dtype)
    return Summaries(matrix, q.new_empty(B, H, vectors, D, dtype=torch.float32))


def _sum_parts(of_parts: Summaries, q: Tensor, settings: Settings) -> Summaries:
    split = _split(settings)
    if split == 1:
        return of_parts
    matrix, vector = (x.unflatten(2, (-1, split)).sum(3) if x.numel() else x for x in of_parts)
    return Summaries(matrix.to(numerics(q.dtype).storage), vector)


def summarize(k: Tensor, v: Tensor, settings: Settings) -> Summaries:
    """Compute the summaries S [B, H, M, D, Dv] and z [B, H, M, D] of keys and values."""
    H = k.shape[2]
    t = parts(settings.blocks, _split(settings), k.device)
    c = _tiles(tuning.SUMMARIZE, k, v)
    align = alignment(k, v)
    summaries = _part_summaries(k, v, settings)
    summary.summarize_kernel[(summaries.matrix[..., 0, 0].numel(),)](
        k, v, *summaries, t, *_strides(align, k, v), H, *t.shape, settings.eps,
        **_token_constants(k, v, settings, align, t.shape[1], c),
    )  # fmt: skip
    return _sum_parts(summaries, k, settings)


def mix(summaries: Summaries, mixing: Tensor, settings: Settings, transposed: bool = False) -> Summaries:
    """Mix the summaries by the mixing matrix or its transpose; shapes stay."""
    matrix, vector = summaries
    B, H, M = matrix.shape[:3]
    size = matrix[0, 0, 0].numel()
    c = tuning.mix_tiles(M, matrix.dtype)
    row_tiles, column_tiles, chunks = _ceil(M, c["BM"]), _ceil(size, c["BF"]), _ceil(M, c["BC"])
    shares = max(_ceil(column_tiles, c["per"]), _ceil(vector.shape[-1], VECTOR_TILE))
    stride_h, stride_row, stride_source = _mixing_strides(mixing.mT if transposed else mixing)
    compute, precision, _ = numerics(matrix.dtype)
    mixed = Summaries(torch.empty_like(matrix), torch.empty_like(vector))
    summary.mix_kernel[(B * H * row_tiles * shares,)](
        matrix, vector, mixing, *mixed, stride_h, stride_row, stride_source, H, M, row_tiles, shares,
        SIZE=size, VECTOR_SIZE=vector.shape[-1], VECTOR_TILE=VECTOR_TILE, CHUNKS=chunks if chunks <= MAX_CHUNKS else 0,
        NORMALIZER=_normalizer(settings), COMPUTE=compute, PRECISION=precision,
        **{name: value for name, value in c.items() if name != "per"},
    )  # fmt: skip
    return mixed


def apply(q: Tensor, mixed: Summaries, inverse: Tensor, out: Tensor, settings: Settings) -> None:
    """Multiply queries by mixed summaries: fill ``out`` and, for the paper's normalizer, ``inverse``."""
    B, N, H, D = q.shape
    M = settings.blocks.num_blocks
    c = _tiles(tuning.APPLY, q, out)
    t, split = _token_parts(q, settings, c)
    align = alignment(q)
    summary.apply_kernel[(B * H * len(t),)](
        q, *mixed, out, inverse, t, *_strides(align, q), N, H, M, len(t), split, t.shape[1],
        settings.eps, **_token_constants(q, out, settings, align, t.shape[1], c),
    )  # fmt: skip


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


def backward_query(
    q: Tensor, mixed: Summaries, inverse: Tensor, d_out: Tensor, packed: Tensor | None, settings: Settings
) -> QueryGradients:
    B, N, H, D = q.shape
    M = settings.blocks.num_blocks
    t = parts(settings.blocks, _split(settings), q.device)
    c = _tiles(tuning.BACKWARD_QUERY, q, d_out)
    if t.shape[1] > c["BT"]:
        c = _tiles(tuning.BACKWARD_QUERY_LONG, q, d_out)
    align = alignment(q, d_out)
    d_q = gradient(q, packed, 0)
    d_denominator = q.new_empty(B, H, N, dtype=torch.float32)
    summaries = _part_summaries(q, d_out, settings)
    summary.backward_query_kernel[(B * H * len(t),)](
        q, *mixed, inverse, d_out, d_q, d_denominator, *summaries, t, *_strides(align, q, d_out),
        N, H, M, len(t), _split(settings), t.shape[1], settings.eps,
        **_token_constants(q, d_out, settings, align, t.shape[1], c), **_pack(packed),
    )  # fmt: skip
    return QueryGradients(d_q, d_denominator, _sum_parts(summaries, q, settings))


def mixing_gradient(backward: Summaries, forward: Summaries, mixing: Tensor, settings: Settings) -> MixingGradients:
    """Compute the gradient of the mixing from the summaries R, r of the backward pass and S, z of the forward pass.

    It is <R_i, S_j> + r_i . z_j, summed over the batch, and over heads that share the mixing: [(H,) M, M]
    float32. Where one tile holds all blocks, the kernel mixes R and r as it reads them.
    """
    R, r = backward
    B, H, M = R.shape[:3]
    size = R[0, 0, 0].numel()
    c = tuning.mixing_gradient_tiles(M, R.dtype)
    row_tiles = _ceil(M, c["BM"])
    splits = max(1, min(_ceil(size, c["BF"] * 4), 1024 // (B * H * row_tiles * row_tiles)))
    compute, precision, _ = numerics(R.dtype)
    d_mixing = R.new_empty(B, splits, H, M, M, dtype=torch.float32)
    together = c["BM"] == 16 and row_tiles == 1
    mixed = Summaries(torch.empty_like(R), torch.empty_like(r)) if together else None
    summary.mixing_gradient_kernel[(B * H * row_tiles * row_tiles * splits,)](
        *backward, *forward, d_mixing, mixing, *(mixed or (None, None)),
        *_mixing_strides(mixing.mT), H, M, row_tiles, splits,
        SIZE=size, VECTOR_SIZE=r.shape[-1], MIX=together,
        NORMALIZER=_normalizer(settings), COMPUTE=compute, PRECISION=precision, **c,
    )  # fmt: skip
    mixed = mixed or mix(backward, mixing, settings, transposed=True)
    return MixingGradients(_sum_leading(d_mixing, 2 if mixing.ndim == 3 else 3), mixed)


def backward_key(
    k: Tensor, v: Tensor, mixed: Summaries, packed: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of keys and values from the mixed summaries of queries and output gradients."""
    B, N, H, _ = k.shape
    c = _tiles(tuning.BACKWARD_KEY, k, v)
    t, split = _token_parts(k, settings, c)
    align = alignment(k, v)
    d_k, d_v = gradient(k, packed, 1), gradient(v, packed, 2)
    summary.backward_key_kernel[(B * H * len(t),)](
        k, v, *mixed, d_k, d_v, t, *_strides(align, k, v),
        N, H, settings.blocks.num_blocks, len(t), split, t.shape[1], settings.eps,
        **_token_constants(k, v, settings, align, t.shape[1], c), **_pack(packed),
    )  # fmt: skip
    return d_k, d_v


def _sum_leading(x: Tensor, dims: int) -> Tensor:
    """Sum over the first ``dims`` dims of a contiguous float32 tensor, in an order fixed by the shape.

    torch.sum takes eight times as long on a tall matrix.
    """
    shape = x.shape[dims:]
    x = x.reshape(-1, shape.numel())
    while len(x) > 1:
        rows, columns = x.shape
        column_tiles = _ceil(columns, 32)
        shares = 1 if rows <= 64 else min(_ceil(rows, 64), max(1, 264 // column_tiles))
        share = _ceil(rows, shares)
        shares = _ceil(rows, share)
        sums = x.new_empty(shares, columns)
        shared.sum_rows_kernel[(column_tiles, shares)](x, sums, rows, columns, share, BR=64, BC=32, num_warps=4)
        x = sums
    return x.view(shape)
