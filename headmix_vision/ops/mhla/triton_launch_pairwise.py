"""Launches the pairwise kernels: plans strides and grids for each layout, and allocates outputs.

B batch, N tokens, H heads, M blocks, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headmix_vision.ops.mhla import gluon_launch as hopper
from headmix_vision.ops.mhla import triton_pairwise as pairwise
from headmix_vision.ops.mhla import triton_tiles as shared
from headmix_vision.ops.mhla import triton_tuning as tuning
from headmix_vision.ops.mhla.settings import Settings
from headmix_vision.ops.mhla.triton_launch import (
    Gradients,
    ceil,
    choose_tiles,
    gradient,
    kernel_constants,
    mixing_strides,
    pack_size,
    row_strides,
    sum_leading,
)
from headmix_vision.ops.mhla.triton_tables import Places, block_of_token, places
from headmix_vision.ops.runtime import KernelFailed, Launch, Layout, alignment, layout, planned

# Bytes of the unsummed mixing gradients of the backward pass; larger batches take several launches.
MIXING_GRADIENT_BYTES = 1 << 26
RUN_TILE = 32


def _pairwise_constants(q: Layout, v: Layout, settings: Settings, align: int, t: Places, c: tuning.Tiles) -> dict:
    full = t.full and t.num_places % c["BQ"] == 0 and t.num_places % c["BK"] == 0
    return dict(RUN=t.run, FULL=full, num_stages=1) | kernel_constants(q, v, settings, align) | c


class RunWeights:
    """Spreads mixing weights to each pair of runs, up to whole tiles: [(H,) padded runs, padded runs]."""

    def __init__(self, mixing: Layout, t: Places) -> None:
        heads, runs = mixing.shape[:-2], t.padded_runs
        self.shape, self.strides, self.blocks = (*heads, runs, runs), (*[runs * runs] * len(heads), runs, 1), t.blocks
        self._launch = None
        if mixing.shape[-1] == runs:  # runs are blocks
            self.strides = mixing.strides
        else:
            numbers = (len(t.blocks), runs, *mixing_strides(mixing.strides))
            programs = heads.numel() * ceil(runs, RUN_TILE) ** 2
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


def is_resident(dim: int, num_tokens: int, dtype: torch.dtype, causal: bool) -> bool:
    """Tell whether pairwise kernels hold all keys and values, or queries and gradients, of a head on chip."""
    return not causal and dtype == torch.bfloat16 and dim <= 64 and num_tokens <= tuning.RESIDENT_TOKENS


class ForwardPlan(NamedTuple):
    """The launch of a forward kernel, with what makes its weights of the mixing, and the table of tokens it takes."""

    weights: Callable[[Tensor], Tensor]
    table: Tensor
    launch: Launch
    for_hopper: bool = False


@planned
def _pairwise_forward(q: Layout, k: Layout, v: Layout, mixing: Layout, settings: Settings) -> ForwardPlan:
    if hopper.takes_forward(q, k, v, settings):
        table = block_of_token(settings.blocks, q.device)
        return ForwardPlan(lambda mixing: mixing, table, hopper.forward_launch(q, k, v, mixing, settings), True)
    B, N, H, D = q.shape
    resident = is_resident(max(D, v.shape[-1]), N, q.dtype, settings.causal)
    c = tuning.resident(tuning.RESIDENT_FORWARD, N) if resident else choose_tiles(tuning.PAIRWISE_FORWARD, q, v)
    t, weights = _pairwise_tables(c, q, mixing, settings)
    align = alignment(q, k, v)
    sizes = (N, H, t.num_places)
    numbers = (*row_strides(align, q, k, v), *mixing_strides(weights.strides), *sizes, settings.eps)
    constants = _pairwise_constants(q, v, settings, align, t, c)
    if resident:
        constants |= dict(TILES=ceil(t.num_places, c["BK"]), PREFETCH=t.run >= tuning.PREFETCH_RUN)
        launch = Launch(pairwise.resident_forward_kernel, (B * H,), numbers, constants)
    else:
        programs, constants = B * H * ceil(t.num_places, c["BQ"]), constants | dict(CAUSAL=settings.causal)
        launch = Launch(pairwise.pairwise_forward_kernel, (programs,), numbers, constants)
    return ForwardPlan(weights, t.tokens, launch)


def pairwise_forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, inverse: Tensor, out: Tensor, settings: Settings
) -> None:
    """Fill ``out`` [B, N, H, Dv] and, for the paper's normalizer, ``inverse`` [B, H, N]."""
    layouts = layout(q), layout(k), layout(v), layout(mixing)
    weights, table, launch, for_hopper = _pairwise_forward(*layouts, settings)
    try:
        launch(q, k, v, weights(mixing), out, inverse, table)
    except KernelFailed as error:
        if not for_hopper:
            raise
        hopper.leave_out(error, settings)
        weights, table, launch, _ = _pairwise_forward(*layouts, settings)
        launch(q, k, v, weights(mixing), out, inverse, table)


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
    c = choose_tiles(tuning.PAIRWISE_BACKWARD_QUERY, q, v)
    t, weights = _pairwise_tables(c, q, mixing, settings)
    query_tiles, key_tiles = ceil(t.num_places, c["BQ"]), ceil(t.num_places, c["BK"])
    sums = (query_tiles * c["BQ"] // t.run, key_tiles * c["BK"] // t.run)
    align = alignment(q, k, v, out, d_out)
    numbers = (
        *row_strides(align, q, k, v, out, d_out), *mixing_strides(weights.strides), N, H, t.num_places, settings.eps,
    )  # fmt: skip
    constants = _pairwise_constants(q, v, settings, align, t, c) | dict(PACK=pack, CAUSAL=settings.causal)
    launch = Launch(pairwise.pairwise_backward_query_kernel, (B * H * query_tiles,), numbers, constants)
    at_once = max(1, MIXING_GRADIENT_BYTES // (4 * H * sums[0] * sums[1]))
    fold = None
    if len(t.blocks) != M:
        programs = mixing.shape[:-2].numel() * ceil(M, 16) ** 2
        constants = dict(TILE=64, BM=16, num_warps=4)
        fold = Launch(shared.fold_runs_kernel, (programs,), (len(t.blocks), *sums, M), constants)
    return QueryPlan(t, weights, launch, sums, at_once, fold)


def _run_weight_gradients(
    plan: QueryPlan, mixing: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, inverse: Tensor,
    d_q: Tensor, d_scale: Tensor,
) -> Tensor:  # fmt: skip
    """Fill gradients of queries and denominators, and compute those of the weights of pairs of runs."""
    B, _, H, _ = q.shape
    allocate = q.new_zeros if plan.launch.constants["CAUSAL"] else q.new_empty
    d_weights = allocate((B, H, *plan.sums), dtype=torch.float32)
    weights = plan.weights(mixing)
    plan.launch(q, k, v, weights, out, inverse, d_out, d_q, d_scale, d_weights, plan.places.tokens)
    return sum_leading(d_weights, 1 if mixing.ndim == 3 else 2)


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
    resident = fits and is_resident(max(D, v.shape[-1]), N, q.dtype, settings.causal)
    c = (
        tuning.resident(tuning.RESIDENT_BACKWARD_KEY, N)
        if resident
        else choose_tiles(tuning.PAIRWISE_BACKWARD_KEY, q, v)
    )
    t, weights = _pairwise_tables(c, q, mixing, settings)
    align = alignment(q, k, v, d_out)
    sizes = (N, H, t.num_places)
    numbers = (*row_strides(align, q, k, v, d_out), *mixing_strides(weights.strides), *sizes, settings.eps)
    constants = _pairwise_constants(q, v, settings, align, t, c) | dict(PACK=pack)
    if resident:
        constants |= dict(TILES=ceil(t.num_places, c["BQ"]))
        launch = Launch(pairwise.resident_backward_key_kernel, (B * H,), numbers, constants)
    else:
        programs, constants = B * H * ceil(t.num_places, c["BK"]), constants | dict(CAUSAL=settings.causal)
        launch = Launch(pairwise.pairwise_backward_key_kernel, (programs,), numbers, constants)
    return PairwisePlan(t, weights, launch)


def pairwise_backward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, out: Tensor, inverse: Tensor, d_out: Tensor,
    packed: Tensor | None, settings: Settings,
) -> Gradients:  # fmt: skip
    """Compute the gradients of all inputs; that of a denominator by place for the paper's normalizer, else by token."""
    B, N, H, _ = q.shape
    options = (layout(mixing), pack_size(packed), settings)
    layouts = *inputs, _, l_d_out = [layout(x) for x in (q, k, v, out, d_out)]
    if for_hopper := hopper.plan_backward(*layouts, *options):
        try:
            return hopper.run_backward(for_hopper, q, k, v, mixing, out, inverse, d_out, packed, settings)
        except KernelFailed as error:
            hopper.leave_out(error, settings)

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
