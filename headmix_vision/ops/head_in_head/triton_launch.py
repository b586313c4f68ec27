"""Launches the Head-in-Head kernels: chooses tiles, computes strides and grids, and allocates buffers.

B batch, N tokens, H heads, C chunks of T tokens, Dk and Dv head dims, r sub-heads, R = r T rows of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from headmix_vision.ops.head_in_head import triton_backward as backward
from headmix_vision.ops.head_in_head import triton_forward as forward
from headmix_vision.ops.kernels import SMALL_FLOAT32_PRECISION, alignment, gpu_of, numerics

LEAST_TOKENS = 16  # fewest tokens of a chunk: no side of a product may be shorter
Tiles = dict[str, int]
# These are the best of sweeps on an H200 for bfloat16, up to 64 rows and keys. More stages hide the latency of memory
# where they do not crowd out a second program on a processor. Scans of one sub-head take most shared memory: they get
# fewer stages, unless heads are so few that each program has a processor to itself.
PREPARE = Tiles(num_warps=1, num_stages=1)
SCAN = Tiles(VALUES=64, num_warps=4, num_stages=3)
CROWDED_SCAN = SCAN | Tiles(num_stages=2)
INPUTS_BACKWARD = Tiles(VALUES=64, num_warps=4, num_stages=1)


class Saved(NamedTuple):
    """The tensors that the forward pass saves for the backward pass.

    Attributes:
        decays: [B, H, C, 2, T], log decay since the start of the chunk, and how many decays forgot everything; float64
            for float32 inputs, as differences of float32 sums would lose digits, else float32.
        scores: [B, H, C, T, R], of queries and keys of single sub-heads, decayed and scaled.
        inverse: [B, H, C, R, R], of the system of each chunk.
        states: [B, H, C, Dv, Dk], before each chunk.
        corrections: [B, H, C, Dv, R].
    """

    decays: Tensor
    scores: Tensor
    inverse: Tensor
    states: Tensor
    corrections: Tensor


class Gradients(NamedTuple):
    """The gradients of the inputs; the last four are float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor
    mask: Tensor
    initial_state: Tensor


def chunk_tokens(r: int) -> int:
    """Return T, the tokens that make 64 rows, but no fewer than the shortest chunk has."""
    return max(LEAST_TOKENS, 64 // r)


def saved(q: Tensor, v: Tensor, mask: Tensor, save: bool) -> Saved:
    """Allocate the buffers; without ``save`` the last two are left out, C = 0."""
    (B, N, H, Dk), Dv, r = q.shape, v.shape[-1], mask.shape[-1]
    T = chunk_tokens(r)
    C, storage = -(-N // T), numerics(q.dtype).storage
    kept = C if save else 0
    return Saved(
        q.new_empty(B, H, C, 2, T, dtype=torch.float64 if q.dtype == torch.float32 else torch.float32),
        q.new_empty(B, H, C, T, r * T, dtype=storage),
        q.new_empty(B, H, C, r * T, r * T, dtype=storage),
        q.new_empty(B, H, kept, Dv, Dk, dtype=storage),
        q.new_empty(B, H, kept, Dv, r * T, dtype=storage),
    )


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Copy the tensors whose rows are not contiguous."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _strides(align: int, *tensors: Tensor) -> list[int]:
    return [stride // align for x in tensors for stride in x.stride()[:3]]


def _mask_strides(mask: Tensor) -> tuple[int, ...]:
    return (0, 0, mask.stride(0)) if mask.ndim == 3 else mask.stride()[:3]


def _constants(k: Tensor, mask: Tensor, order: Tensor | None, align: int) -> dict[str, Any]:
    compute, precision, _ = numerics(k.dtype)
    if k.dtype == torch.float32:
        precision = SMALL_FLOAT32_PRECISION
    # On Hopper the ptxas 12.8 of Triton 3.6 gets products of bf16 with fewer than 64 columns wrong, also the six that
    # make one of float32; with TRITON_PTXAS_PATH at ptxas 13.4 they are right.
    r, D, keys = mask.shape[-1], k.shape[-1], max(64, _columns(k.shape[-1]))
    return dict(
        T=chunk_tokens(r), SUB_HEADS=r, D=D, KEYS=keys, ORDERED=order is not None,
        COMPUTE=compute, PRECISION=precision, ALIGN=align,
    )  # fmt: skip


def _is_large(k: Tensor, mask: Tensor) -> bool:
    """Tell whether the tile of a chunk's keys has 128 x 128 numbers or more."""
    r = mask.shape[-1]
    return r * chunk_tokens(r) * _columns(k.shape[-1]) >= 128 * 128


def _tiles(tiles: Tiles, k: Tensor, mask: Tensor) -> Tiles:
    """Give the tiles fewer columns and more warps where a program would not fit."""
    tall = mask.shape[-1] * chunk_tokens(mask.shape[-1]) > 64
    wide = tall or k.shape[-1] > 64
    if k.dtype == torch.bfloat16 and not wide:
        return tiles
    if "VALUES" not in tiles:
        return tiles | Tiles(num_warps=8 if tall else 4)
    if k.dtype == torch.bfloat16:
        return tiles | Tiles(num_warps=8 if tall else 4, num_stages=1)
    return tiles | Tiles(VALUES=16 if _is_large(k, mask) else 32, num_warps=8 if wide else 4, num_stages=1)


def _columns(dim: int) -> int:
    """Count the columns of a tile that holds a head dim."""
    return max(16, triton.next_power_of_2(dim))


def _values(k: Tensor, v: Tensor, mask: Tensor, tiles: Tiles) -> dict[str, Any]:
    tiles = _tiles(tiles, k, mask)
    tiles |= Tiles(VALUES=min(_columns(v.shape[-1]), tiles["VALUES"]))
    return dict(DV=v.shape[-1], TOKEN_MASK=mask.ndim == 5, **tiles)


def _scan_tiles(heads: int, v: Tensor, mask: Tensor) -> Tiles:
    if mask.shape[-1] > 1 or heads * -(-v.shape[-1] // SCAN["VALUES"]) <= gpu_of(v).processors:
        return SCAN
    return CROWDED_SCAN


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor,
    initial: Tensor | None, order: Tensor | None, buffers: Saved, out: Tensor, final: Tensor,
) -> None:  # fmt: skip
    """Fill ``out`` [B, N, H, Dv], ``final`` [B, H, Dk, Dv] and the buffers."""
    B, N, H, Dk = q.shape
    C = buffers.decays.shape[2]
    q, k, v = _rows(q, k, v)
    mask, initial = mask.contiguous(), None if initial is None else initial.contiguous()
    align = alignment(q, k, v)
    constants = _constants(k, mask, order, align)
    spread = torch.empty_like(buffers.scores).view(B, H, C, -1, buffers.decays.shape[-1])  # [B, H, C, R, T]
    forward.prepare_kernel[(B * H * C,)](
        q, k, beta, log_decay, mask, order, buffers.decays, buffers.scores, buffers.inverse, spread,
        *_strides(align, q, k), *beta.stride(), *log_decay.stride(), *_mask_strides(mask), N, H, C, Dk**-0.5,
        **constants, **_tiles(PREPARE, k, mask),
    )  # fmt: skip
    values = _values(k, v, mask, _scan_tiles(B * H, v, mask))
    forward.scan_kernel[(B * H * -(-v.shape[-1] // values["VALUES"]),)](
        q, k, v, beta, mask, initial, order, buffers.decays, buffers.scores, buffers.inverse, spread, out, final,
        buffers.states, buffers.corrections,
        *_strides(align, q, k, v), *beta.stride(), *_mask_strides(mask), N, H, C, Dk**-0.5,
        INITIAL=initial is not None, SAVE=buffers.states.shape[2] > 0, **constants, **values,
    )  # fmt: skip


def backward_pass(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor,
    order: Tensor | None, buffers: Saved, d_out: Tensor, d_final: Tensor | None,
) -> Gradients:  # fmt: skip
    (B, N, H, Dk), r = q.shape, mask.shape[-1]
    C = buffers.decays.shape[2]
    q, k, v, d_out = _rows(q, k, v, d_out)
    mask, d_final = mask.contiguous(), None if d_final is None else d_final.contiguous()
    align = alignment(q, k, v, d_out)
    constants = _constants(k, mask, order, align)

    d_states, d_errors = torch.empty_like(buffers.states), torch.empty_like(buffers.corrections)
    d_initial = q.new_empty(B, H, Dk, v.shape[-1], dtype=torch.float32)
    values = _values(k, v, mask, _scan_tiles(B * H, v, mask))
    backward.scan_backward_kernel[(B * H * -(-v.shape[-1] // values["VALUES"]),)](
        q, k, beta, mask, d_out, d_final, order, buffers.decays, buffers.scores, buffers.inverse,
        d_states, d_errors, d_initial,
        *_strides(align, q, k), *beta.stride(), *_mask_strides(mask), *_strides(align, d_out), N, H, C, Dk**-0.5,
        FINAL=d_final is not None, **constants, **values,
    )  # fmt: skip

    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_beta, d_log_decay = (q.new_empty(B, N, H, dtype=torch.float32) for _ in range(2))
    d_mask = q.new_empty(*((B, H, C) if mask.ndim == 3 else (B, N, H)), r, r, dtype=torch.float32)
    values = _values(k, v, mask, INPUTS_BACKWARD)
    backward.inputs_backward_kernel[(B * H * C,)](
        q, k, v, beta, log_decay, mask, d_out, order, buffers.decays, buffers.states, buffers.corrections,
        d_states, d_errors, d_q, d_k, d_v, d_beta, d_log_decay, d_mask,
        *_strides(align, q, k, v), *beta.stride(), *log_decay.stride(), *_mask_strides(mask), *_strides(align, d_out),
        N, H, C, Dk**-0.5, **constants, **values,
    )  # fmt: skip
    d_mask = d_mask if mask.ndim == 5 else d_mask.sum((0, 2))
    return Gradients(d_q, d_k, d_v, d_beta, d_log_decay, d_mask, d_initial)
