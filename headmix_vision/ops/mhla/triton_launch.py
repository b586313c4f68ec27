"""Launches the Triton kernels: plans strides and grids for each layout, and allocates outputs.

B batch, N tokens, H heads, M blocks, C parts of blocks, D and Dv head dims. The kernels take the normalizers
"paper" (they write the inverse denominators), "given" (they read them) and "none".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headmix_vision.ops.kernels import SMALL_FLOAT32_PRECISION, numerics
from headmix_vision.ops.launching import Launch, Layout, alignment, layout, planned
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


def _tiles(table: tuple[tuning.Row, ...], x: Layout, y: Layout) -> tuning.Tiles:
    return tuning.tiles(table, max(x.shape[-1], y.shape[-1]), x.dtype, x.gpu.shared_memory)


def _split(settings: Settings) -> int:
    """Count the parts of each block."""
    return _ceil(settings.blocks.max_block_size, PART_TOKENS)


def _normalizer(settings: Settings) -> str:
    return {"paper": "paper", "source_block": "given", None: "none"}[settings.normalizer]


def gradient(x: Tensor, packed: Tensor | None, part: int) -> Tensor:
    """Allocate the gradient of an input [B, N, H, D], or take its part of a packed tensor [B, N, PACK, H, D]."""
    return x.new_empty(x.shape) if packed is None else packed[:, :, part]


def _pack(packed: Tensor | None) -> int:
    """Count the gradients that lie in one tensor."""
    return 1 if packed is None else packed.shape[2]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _strides(align: int, *tensors: Layout) -> list[int]:
    return [s for x in tensors for s in (*(stride // align for stride in x.strides[:-1]), x.strides[-1])]


def _mixing_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of [H, ...] weights; those that heads share have stride 0 over H."""
    return (0, *strides) if len(strides) == 2 else strides


def _constants(q: Layout, v: Layout, settings: Settings, align: int) -> dict[str, Any]:
    compute, precision, _ = numerics(q.dtype)
    if q.dtype == torch.float32 and tuning.is_wide(max(q.shape[-1], v.shape[-1]), q.dtype):
        precision = SMALL_FLOAT32_PRECISION
    (d1, d2), (dv1, dv2) = tuning.head_parts(q.shape[-1]), tuning.head_parts(v.shape[-1])
    return dict(
        D=q.shape[-1], D1=d1, D2=d2, DV=v.shape[-1], DV1=dv1, DV2=dv2,
        NORMALIZER=_normalizer(settings), FEATURE_MAP=settings.feature_map,
        COMPUTE=compute, PRECISION=precision, ALIGN=align,
    )  # fmt: skip


def _pairwise_constants(q: Layout, v: Layout, settings: Settings, align: int, t: Places, c: tuning.Tiles) -> dict:
    full = t.full and t.num_places % c["BQ"] == 0 and t.num_places % c["BK"] == 0
    return dict(RUN=t.run, FULL=full, num_stages=1) | _constants(q, v, settings, align) | c


class RunWeights:
    """Spreads mixing weights to each pair of runs, up to whole tiles: [(H,) padded runs, padded runs]."""

    def __init__(self, mixing: Layout, t: Places) -> None:
        heads, runs = mixing.shape[:-2], t.padded_runs
        self.shape, self.strides, self.blocks = (*heads, runs, runs), (*[runs * runs] * len(heads), runs, 1), t.blocks
        self._launch = None
        if mixing.shape[-1] == runs:  # runs are blocks
            self.strides = mixing.strides
        else:
            numbers = (len(t.blocks), runs, *_mixing_strides(mixing.strides))
            programs = heads.numel() * _ceil(runs, RUN_TILE) ** 2
            self._launch = Launch(shared.expand_runs_kernel, (programs,), numbers, dict(TILE=RUN_TILE))

    def __call__(self, mixing: Tensor) -> Tensor:
        if self._launch is None:
            return mixing
        weights = mixing.new_empty(self.shape)
        self._launch(mixing, weights, self.blocks)
        return weights


class PairwisePlan(NamedTuple):
    """The launch of a pairwise kernel, with the tables that it takes."""

    places: Places
    weights: RunWeights
    launch: Launch


def _pairwise_tables(c: tuning.Tiles, q: Layout, mixing: Layout, settings: Settings) -> tuple[Places, RunWeights]:
    t = places(settings.blocks, min(c["BQ"], c["BK"]), q.device)
    return t, RunWeights(mixing, t)


def is_resident(dim: int, num_tokens: int, dtype: torch.dtype) -> bool:
    """Tell whether pairwise kernels hold all keys and values, or queries and gradients, of a head on chip."""
    return dtype == torch.bfloat16 and dim <= 64 and num_tokens <= tuning.RESIDENT_TOKENS


@planned
def _pairwise_forward(q: Layout, k: Layout, v: Layout, mixing: Layout, settings: Settings) -> PairwisePlan:
    B, N, H, D = q.shape
    resident = is_resident(max(D, v.shape[-1]), N, q.dtype)
    c = tuning.resident(tuning.RESIDENT_FORWARD, N) if resident else _tiles(tuning.PAIRWISE_FORWARD, q, v)
    t, weights = _pairwise_tables(c, q, mixing, settings)
    align = alignment(q, k, v)
    numbers = (*_strides(align, q, k, v), *_mixing_strides(weights.strides), N, H, t.num_places, settings.eps)
    constants = _pairwise_constants(q, v, settings, align, t, c)
    if resident:
        constants |= dict(TILES=_ceil(t.num_places, c["BK"]), PREFETCH=t.run >= tuning.PREFETCH_RUN)
        launch = Launch(pairwise.resident_forward_kernel, (B * H,), numbers, constants)
    else:
        programs = B * H * _ceil(t.num_places, c["BQ"])
        launch = Launch(pairwise.pairwise_forward_kernel, (programs,), numbers, constants)
    return PairwisePlan(t, weights, launch)


def pairwise_forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, inverse: Tensor, out: Tensor, settings: Settings
) -> None:
    """Fill ``out`` [B, N, H, Dv] and, for the paper's normalizer, ``inverse`` [B, H, N]."""
    t, weights, launch = _pairwise_forward(layout(q), layout(k), layout(v), layout(mixing), settings)
    launch(q, k, v, weights(mixing), out, inverse, t.tokens)


class QueryPlan(NamedTuple):
    """The launch for gradients of queries and mixing.

    Attributes:
        sums: query runs and key runs of each head, up to whole tiles.
        at_once: batch items of a launch.
        fold: sums the gradients of pairs of runs, for heads that share the mixing and for heads that do not; None where
            runs are blocks.
    """

    places: Places
    weights: RunWeights
    launch: Launch
    sums: tuple[int, int]
    at_once: int
    fold: Launch | None


@planned
def _pairwise_backward_query(
    q: Layout, k: Layout, v: Layout, out: Layout, d_out: Layout, mixing: Layout, pack: int, settings: Settings
) -> QueryPlan:
    B, N, H, D = q.shape
    M = settings.blocks.num_blocks
    c = _tiles(tuning.PAIRWISE_BACKWARD_QUERY, q, v)
    t, weights = _pairwise_tables(c, q, mixing, settings)
    query_tiles, key_tiles = _ceil(t.num_places, c["BQ"]), _ceil(t.num_places, c["BK"])
    sums = (query_tiles * c["BQ"] // t.run, key_tiles * c["BK"] // t.run)
    align = alignment(q, k, v, out, d_out)
    numbers = (
        *_strides(align, q, k, v, out, d_out), *_mixing_strides(weights.strides), N, H, t.num_places, settings.eps,
    )  # fmt: skip
    constants = _pairwise_constants(q, v, settings, align, t, c) | dict(PACK=pack)
    launch = Launch(pairwise.pairwise_backward_query_kernel, (B * H * query_tiles,), numbers, constants)
    at_once = max(1, MIXING_GRADIENT_BYTES // (4 * H * sums[0] * sums[1]))
    fold = None
    if len(t.blocks) != M:
        programs = mixing.shape[:-2].numel() * _ceil(M, 16) ** 2
        constants = dict(TILE=64, BM=16, num_warps=4)
        fold = Launch(shared.fold_runs_kernel, (programs,), (len(t.blocks), *sums, M), constants)
    return QueryPlan(t, weights, launch, sums, at_once, fold)


def _run_weight_gradients(
    plan: QueryPlan, mixing: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, inverse: Tensor,
    d_q: Tensor, d_scale: Tensor,
) -> Tensor:  # fmt: skip
    """Fill gradients of queries and denominators, and compute those of the weights of pairs of runs."""
    B, _, H, _ = q.shape
    d_weights = q.new_empty(B, H, *plan.sums, dtype=torch.float32)
    weights = plan.weights(mixing)
    plan.launch(q, k, v, weights, out, inverse, d_out, d_q, d_scale, d_weights, plan.places.tokens)
    return _sum_leading(d_weights, 1 if mixing.ndim == 3 else 2)


def _mixing_gradient_of_runs(d_weights: Tensor, plan: QueryPlan, num_blocks: int) -> Tensor:
    """Sum the gradients of the weights of each pair of runs to those of the mixing: [(H,) M, M]."""
    if plan.fold is None:
        return d_weights[..., :num_blocks, :num_blocks].contiguous()
    d_mixing = d_weights.new_empty(*d_weights.shape[:-2], num_blocks, num_blocks)
    plan.fold(d_weights, d_mixing, plan.places.blocks)
    return d_mixing


@planned
def _pairwise_backward_key(
    q: Layout, k: Layout, v: Layout, d_out: Layout, mixing: Layout, pack: int, settings: Settings
) -> PairwisePlan:
    B, N, H, D = q.shape
    fits = q.gpu.shared_memory >= tuning.RESIDENT_BACKWARD_KB << 10
    resident = fits and is_resident(max(D, v.shape[-1]), N, q.dtype)
    c = tuning.resident(tuning.RESIDENT_BACKWARD_KEY, N) if resident else _tiles(tuning.PAIRWISE_BACKWARD_KEY, q, v)
    t, weights = _pairwise_tables(c, q, mixing, settings)
    align = alignment(q, k, v, d_out)
    numbers = (*_strides(align, q, k, v, d_out), *_mixing_strides(weights.strides), N, H, t.num_places, settings.eps)
    constants = _pairwise_constants(q, v, settings, align, t, c) | dict(PACK=pack)
    if resident:
        constants |= dict(TILES=_ceil(t.num_places, c["BQ"]))
        launch = Launch(pairwise.resident_backward_key_kernel, (B * H,), numbers, constants)
    else:
        programs = B * H * _ceil(t.num_places, c["BK"])
        launch = Launch(pairwise.pairwise_backward_key_kernel, (programs,), numbers, constants)
    return PairwisePlan(t, weights, launch)


def pairwise_backward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, out: Tensor, inverse: Tensor, d_out: Tensor,
    packed: Tensor | None, settings: Settings,
) -> Gradients:  # fmt: skip
    """Compute the gradients of all inputs; that of a denominator by place for the paper's normalizer, else by token."""
    B, N, H, _ = q.shape
    options = (layout(mixing), _pack(packed), settings)
    layouts = *inputs, _, l_d_out = [layout(x) for x in (q, k, v, out, d_out)]

    plan = _pairwise_backward_query(*layouts, *options)
    d_q = gradient(q, packed, 0)
    by_place = settings.normalizer == "paper"
    d_scale = q.new_empty(B, H, plan.places.num_places if by_place else N, dtype=torch.float32)
    tensors = (q, k, v, out, d_out, inverse, d_q, d_scale)
    if plan.at_once >= B:
        d_weights = _run_weight_gradients(plan, mixing, *tensors)
    else:
        sums = []
        for some in zip(*(x.split(plan.at_once) for x in tensors), strict=True):
            part = _pairwise_backward_query(*map(layout, some[:5]), *options)
            sums.append(_run_weight_gradients(part, mixing, *some))
        d_weights = torch.stack(sums).sum(0)
    d_mixing = _mixing_gradient_of_runs(d_weights, plan, settings.blocks.num_blocks)

    t, weights, launch = _pairwise_backward_key(*inputs, l_d_out, *options)
    d_k, d_v = gradient(k, packed, 1), gradient(v, packed, 2)
    launch(q, k, v, weights(mixing), inverse, d_out, d_scale, d_k, d_v, t.tokens)
    return Gradients(d_q, d_k, d_v, d_mixing, d_scale)


def _token_constants(q: Layout, v: Layout, settings: Settings, align: int, size: int, c: tuning.Tiles) -> dict:
    tiles = {name: value for name, value in c.items() if name != "ONE_TILE"}
    return dict(SINGLE=size <= c["BT"], num_stages=1) | _constants(q, v, settings, align) | tiles


def _token_parts(q: Layout, settings: Settings, c: tuning.Tiles) -> tuple[Tensor, int]:
    """Return the parts of blocks for kernels that compute each token by itself, and how many a block has."""
    split = _ceil(settings.blocks.max_block_size, c["BT"]) if c.get("ONE_TILE") else _split(settings)
    return parts(settings.blocks, split, q.device), split


class TokenPlan(NamedTuple):
    """The launch of a kernel of the summary regime, with the table of the tokens that a program takes."""

    table: Tensor
    launch: Launch


def _part_summaries(q: Tensor, v: Tensor, settings: Settings) -> Summaries:
    """Allocate summaries of parts: [B, H, C, D, Dv], float32 if they are still to be summed, and vectors [B, H, C, D].

    Only the paper's normalizer needs vectors; others get none, [B, H, 0, D].
    """
    B, _, H, D = q.shape
    split = _split(settings)
    C = settings.blocks.num_blocks * split
    dtype = numerics(q.dtype).storage if split == 1 else torch.float32
    vectors = C if settings.normalizer == "paper" else 0
    matrix = q.new_empty(B, H, C, D, v.shape[-1], dtype=dtype)
    return Summaries(matrix, q.new_empty(B, H, vectors, D, dtype=torch.float32))


def _sum_parts(of_parts: Summaries, q: Tensor, settings: Settings) -> Summaries:
    split = _split(settings)
    if split == 1:
        return of_parts
    matrix, vector = (x.unflatten(2, (-1, split)).sum(3) if x.numel() else x for x in of_parts)
    return Summaries(matrix.to(numerics(q.dtype).storage), vector)


@planned
def _summarize(k: Layout, v: Layout, settings: Settings) -> TokenPlan:
    B, _, H, _ = k.shape
    t = parts(settings.blocks, _split(settings), k.device)
    c = _tiles(tuning.SUMMARIZE, k, v)
    align = alignment(k, v)
    numbers = (*_strides(align, k, v), H, *t.shape, settings.eps)
    constants = _token_constants(k, v, settings, align, t.shape[1], c)
    return TokenPlan(t, Launch(summary.summarize_kernel, (B * H * len(t),), numbers, constants))


def summarize(k: Tensor, v: Tensor, settings: Settings) -> Summaries:
    """Compute the summaries S [B, H, M, D, Dv] and z [B, H, M, D] of keys and values."""
    t, launch = _summarize(layout(k), layout(v), settings)
    summaries = _part_summaries(k, v, settings)
    launch(k, v, *summaries, t)
    return _sum_parts(summaries, k, settings)


@planned
def _mix(matrix: Layout, vector: Layout, mixing: Layout, transposed: bool, settings: Settings) -> Launch:
    B, H, M = matrix.shape[:3]
    size = matrix.shape[3:].numel()
    c = tuning.mix_tiles(M, matrix.dtype)
    row_tiles, column_tiles, chunks = _ceil(M, c["BM"]), _ceil(size, c["BF"]), _ceil(M, c["BC"])
    shares = max(_ceil(column_tiles, c["per"]), _ceil(vector.shape[-1], VECTOR_TILE))
    *head, row, source = mixing.strides
    strides = _mixing_strides((*head, source, row) if transposed else mixing.strides)
    compute, precision, _ = numerics(matrix.dtype)
    constants = dict(
        SIZE=size, VECTOR_SIZE=vector.shape[-1], VECTOR_TILE=VECTOR_TILE, CHUNKS=chunks if chunks <= MAX_CHUNKS else 0,
        NORMALIZER=_normalizer(settings), COMPUTE=compute, PRECISION=precision,
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
    c = _tiles(tuning.APPLY, q, out)
    t, split = _token_parts(q, settings, c)
    align = alignment(q)
    numbers = (*_strides(align, q), N, H, settings.blocks.num_blocks, len(t), split, t.shape[1], settings.eps)
    constants = _token_constants(q, out, settings, align, t.shape[1], c)
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
    t = parts(settings.blocks, _split(settings), q.device)
    c = _tiles(tuning.BACKWARD_QUERY, q, d_out)
    if t.shape[1] > c["BT"]:
        c = _tiles(tuning.BACKWARD_QUERY_LONG, q, d_out)
    align = alignment(q, d_out)
    sizes = (N, H, settings.blocks.num_blocks, len(t), _split(settings), t.shape[1])
    constants = _token_constants(q, d_out, settings, align, t.shape[1], c) | dict(PACK=pack)
    numbers = (*_strides(align, q, d_out), *sizes, settings.eps)
    return TokenPlan(t, Launch(summary.backward_query_kernel, (B * H * len(t),), numbers, constants))


def backward_query(
    q: Tensor, mixed: Summaries, inverse: Tensor, d_out: Tensor, packed: Tensor | None, settings: Settings
) -> QueryGradients:
    B, N, H, D = q.shape
    t, launch = _backward_query(layout(q), layout(d_out), _pack(packed), settings)
    d_q = gradient(q, packed, 0)
    d_denominator = q.new_empty(B, H, N, dtype=torch.float32)
    summaries = _part_summaries(q, d_out, settings)
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
    c = tuning.mixing_gradient_tiles(M, R.dtype)
    row_tiles = _ceil(M, c["BM"])
    splits = max(1, min(_ceil(size, c["BF"] * 4), 1024 // (B * H * row_tiles * row_tiles)))
    compute, precision, _ = numerics(R.dtype)
    together = c["BM"] == 16 and row_tiles == 1
    *head, row, column = mixing.strides
    constants = dict(
        SIZE=size, VECTOR_SIZE=r.shape[-1], MIX=together,
        NORMALIZER=_normalizer(settings), COMPUTE=compute, PRECISION=precision, **c,
    )  # fmt: skip
    numbers = (*_mixing_strides((*head, column, row)), H, M, row_tiles, splits)
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
    return MixingGradients(_sum_leading(d_mixing, 2 if mixing.ndim == 3 else 3), mixed)


@planned
def _backward_key(k: Layout, v: Layout, pack: int, settings: Settings) -> TokenPlan:
    B, N, H, _ = k.shape
    c = _tiles(tuning.BACKWARD_KEY, k, v)
    t, split = _token_parts(k, settings, c)
    align = alignment(k, v)
    numbers = (*_strides(align, k, v), N, H, settings.blocks.num_blocks, len(t), split, t.shape[1], settings.eps)
    constants = _token_constants(k, v, settings, align, t.shape[1], c) | dict(PACK=pack)
    return TokenPlan(t, Launch(summary.backward_key_kernel, (B * H * len(t),), numbers, constants))


def backward_key(
    k: Tensor, v: Tensor, mixed: Summaries, packed: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of keys and values from the mixed summaries of queries and output gradients."""
    t, launch = _backward_key(layout(k), layout(v), _pack(packed), settings)
    d_k, d_v = gradient(k, packed, 1), gradient(v, packed, 2)
    launch(k, v, *mixed, d_k, d_v, t)
    return d_k, d_v


class RowSum(NamedTuple):
    """The launch of a sum of rows, in shares."""

    launch: Launch
    shares: int


@planned
def _sum_rows(rows: int, columns: int, device: torch.device) -> RowSum:
    column_tiles = _ceil(columns, 32)
    shares = 1 if rows <= 64 else min(_ceil(rows, 64), max(1, 264 // column_tiles))
    share = _ceil(rows, shares)
    shares = _ceil(rows, share)
    constants = dict(BR=64, BC=32, num_warps=4)
    return RowSum(Launch(shared.sum_rows_kernel, (column_tiles, shares), (rows, columns, share), constants), shares)


def _sum_leading(x: Tensor, dims: int) -> Tensor:
    """Sum over the first ``dims`` dims of a contiguous float32 tensor, in an order fixed by the shape.

    torch.sum takes eight times as long on a tall matrix.
    """
    shape = x.shape[dims:]
    x = x.reshape(-1, shape.numel())
    while len(x) > 1:
        launch, shares = _sum_rows(*x.shape, x.device)
        sums = x.new_empty(shares, x.shape[1])
        launch(x, sums)
        x = sums
    return x.view(shape)
