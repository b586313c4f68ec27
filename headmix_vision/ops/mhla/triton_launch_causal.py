"""Launches the kernels of causal attention by summaries: spreads the mixing over parts of blocks, and plans launches.

B batch, N tokens, H heads, M blocks, C parts of blocks, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headmix_vision.ops.mhla import triton_causal as causal
from headmix_vision.ops.mhla import triton_launch_summary as summary
from headmix_vision.ops.mhla import triton_tuning as tuning
from headmix_vision.ops.mhla.settings import Settings
from headmix_vision.ops.mhla.triton_launch import (
    Gradients,
    ceil,
    choose_tiles,
    gradient,
    kernel_constants,
    pack_size,
    row_strides,
)
from headmix_vision.ops.mhla.triton_launch_summary import Summaries, TokenPlan
from headmix_vision.ops.mhla.triton_tables import parts
from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, planned


class PartWeights(NamedTuple):
    """The mixing of parts: of the parts before each [(H,) C, C], zero elsewhere, and of each for itself [(H,) C]."""

    before: Tensor
    own: Tensor

    @classmethod
    def of(cls, mixing: Tensor, settings: Settings) -> PartWeights:
        split = summary.parts_of_a_block(settings)
        own = mixing.diagonal(dim1=-2, dim2=-1).repeat_interleave(split, -1).float()
        return cls(mixing.repeat_interleave(split, -2).repeat_interleave(split, -1).tril(-1), own)

    @property
    def own_stride(self) -> int:
        return self.own.stride(0) if self.own.ndim == 2 else 0


@planned
def _plan(
    kernel: str, by_tile: bool, rows: Sequence[Layout], v: Layout, own_stride: int | None, settings: Settings,
    pack: int | None = None,
) -> TokenPlan:  # fmt: skip
    """Plan one program for each part or each of its tiles; ``rows`` are q and what else the kernel reads by token."""
    q = rows[0]
    B, N, H, _ = q.shape
    t = parts(settings.blocks, summary.parts_of_a_block(settings), q.device)
    c = choose_tiles(tuning.CAUSAL, q, v)
    C, size = t.shape
    tiles = ceil(size, c["BT"])
    align = alignment(*rows)
    sizes = (N, H, C, tiles, size) if by_tile else (N, H, C, size)
    numbers = (*row_strides(align, *rows), *(() if own_stride is None else (own_stride,)), *sizes, settings.eps)
    constants = dict(num_stages=1) | kernel_constants(q, v, settings, align) | c
    if pack is not None:
        constants["PACK"] = pack
    return TokenPlan(t, Launch(getattr(causal, kernel), (B * H * C * (tiles if by_tile else 1),), numbers, constants))


def causal_forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, inverse: Tensor, out: Tensor, settings: Settings
) -> Summaries:
    """Fill ``out`` and, for the paper's normalizer, ``inverse``, and return the summaries of the parts."""
    weights = PartWeights.of(mixing, settings)
    summaries = summary.summarize(k, v, settings)
    mixed = summary.mix(summaries, weights.before, settings)
    rows = (layout(q), layout(k), layout(v))
    t, launch = _plan("causal_apply_kernel", True, rows, rows[2], weights.own_stride, settings)
    launch(q, k, v, *mixed, weights.own, out, inverse, t)
    return summaries


def causal_backward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, out: Tensor, summaries: Summaries, inverse: Tensor, d_out: Tensor,
    packed: Tensor | None, settings: Settings,
) -> Gradients:  # fmt: skip
    """Compute the gradients of all inputs from the summaries of the forward pass."""
    B, N, H, _ = q.shape
    weights, pack = PartWeights.of(mixing, settings), pack_size(packed)
    l_q, l_k, l_v, l_out, l_d_out = (layout(x) for x in (q, k, v, out, d_out))
    stride = weights.own_stride

    mixed = summary.mix(summaries, weights.before, settings)
    t, launch = _plan(
        "causal_backward_query_kernel", True, (l_q, l_k, l_v, l_out, l_d_out), l_v, stride, settings, pack
    )
    d_q, d_scale = gradient(q, packed, 0), q.new_empty(B, H, N, dtype=torch.float32)
    d_own = q.new_empty(B, H, len(t), launch.grid[0] // (B * H * len(t)), dtype=torch.float32)
    launch(q, k, v, *mixed, weights.own, out, inverse, d_out, d_q, d_scale, d_own, t)
    del mixed

    t, launch = _plan("summarize_gradients_kernel", False, (l_q, l_d_out), l_v, None, settings)
    of_gradients = summary.part_summaries(q, v, settings)
    launch(q, inverse, d_out, d_scale, *of_gradients, t)
    from_mixing = summary.mixing_gradient(of_gradients, summaries, weights.before, settings)

    t, launch = _plan("causal_backward_key_kernel", True, (l_q, l_k, l_v, l_d_out), l_v, stride, settings, pack)
    d_k, d_v = gradient(k, packed, 1), gradient(v, packed, 2)
    launch(q, k, v, *from_mixing.mixed, weights.own, inverse, d_out, d_scale, d_k, d_v, t)

    d_parts = from_mixing.mixing.tril(-1) + d_own.sum((0, 3) if mixing.ndim == 3 else (0, 1, 3)).diag_embed()
    split = summary.parts_of_a_block(settings)
    d_mixing = d_parts.unflatten(-1, (-1, split)).sum(-1).unflatten(-2, (-1, split)).sum(-2)
    return Gradients(d_q, d_k, d_v, d_mixing, d_scale)
