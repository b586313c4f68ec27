"""Launches the Head-in-Head kernels: plans tiles, strides and grids for each layout, and allocates buffers.

B batch, N tokens, H heads, C chunks of T tokens, Dk and Dv head dims, r sub-heads, R = r T rows of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from headmix_vision.ops.head_in_head import triton_backward as backward
from headmix_vision.ops.head_in_head import triton_forward as forward
from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, numerics, planned, storage_dtype

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
    """Return T, the tokens that make 64 rows."""
    return 64 // r


def saved(q: Tensor, v: Tensor, mask: Tensor, save: bool) -> Saved:
    """Allocate the buffers; without ``save`` the last two are left out, C = 0."""
    (B, N, H, Dk), Dv, r = q.shape, v.shape[-1], mask.shape[-1]
    T = chunk_tokens(r)
    C, storage = -(-N // T), storage_dtype(q.dtype)
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


def _strides(align: int, *tensors: Layout) -> list[int]:
    return [stride // align for x in tensors for stride in x.strides[:3]]


def _mask_strides(mask: Layout) -> tuple[int, ...]:
    return (0, 0, mask.strides[0]) if len(mask.shape) == 3 else mask.strides[:3]


def _constants(k: Layout, mask: Layout, ordered: bool, align: int) -> dict[str, Any]:
    compute, precision = numerics(k.dtype, k.gpu, crowded=True)
    r, D = mask.shape[-1], k.shape[-1]
    return dict(
        T=chunk_tokens(r), SUB_HEADS=r, D=D, KEYS=_columns(D), ORDERED=ordered,
        COMPUTE=compute, PRECISION=precision, ALIGN=align,
    )  # fmt: skip


def _tiles(tiles: Tiles, k: Layout) -> Tiles:
    """Give the tiles fewer columns and more warps where a program would not fit."""
    wide = k.shape[-1] > 64
    if k.dtype == torch.bfloat16 and not wide:
        return tiles
    if "VALUES" not in tiles:
        return tiles | Tiles(num_warps=4)
    if k.dtype == torch.bfloat16:
        return tiles | Tiles(num_warps=4, num_stages=1)
    return tiles | Tiles(VALUES=32, num_warps=8 if wide else 4, num_stages=1)


def _columns(dim: int) -> int:
    """Count the columns of a tile that holds a head dim."""
    return max(16, triton.next_power_of_2(dim))


def _values(k: Layout, v: Layout, mask: Layout, tiles: Tiles) -> dict[str, Any]:
    tiles = _tiles(tiles, k)
    tiles |= Tiles(VALUES=min(_columns(v.shape[-1]), tiles["VALUES"]))
    return dict(DV=v.shape[-1], TOKEN_MASK=len(mask.shape) == 5, **tiles)


def _scan_tiles(heads: int, v: Layout, mask: Layout) -> Tiles:
    if v.gpu.has_tensor_memory or v.gpu.amd:
        # With stages Triton lets a product begin with the state before the decay has scaled it (triton #10993), where
        # sums are in tensor memory; AMD's GPUs have no shared memory for stages.
        return SCAN | Tiles(num_stages=1)
    if mask.shape[-1] > 1 or heads * -(-v.shape[-1] // SCAN["VALUES"]) <= v.gpu.processors:
        return SCAN
    return CROWDED_SCAN


@planned
def _forward(
    q: Layout, k: Layout, v: Layout, beta: Layout, log_decay: Layout, mask: Layout,
    initial: torch.dtype | None, ordered: bool, save: bool,
) -> tuple[Launch, Launch]:  # fmt: skip
    """Plan the kernels that prepare all chunks and that scan them, from an initial state of a type or from zero."""
    B, N, H, Dk = q.shape
    C = -(-N // chunk_tokens(mask.shape[-1]))
    align = alignment(q, k, v)
    constants, sizes = _constants(k, mask, ordered, align), (N, H, C, Dk**-0.5)
    strides = (*_strides(align, q, k), *beta.strides, *log_decay.strides, *_mask_strides(mask))
    prepare = Launch(
        forward.prepare_kernel, (B * H * C,), (*strides, *sizes), constants | _tiles(PREPARE, k)
    )  # fmt: skip
    values = _values(k, v, mask, _scan_tiles(B * H, v, mask))
    programs = B * H * -(-v.shape[-1] // values["VALUES"])
    strides = (*_strides(align, q, k, v), *beta.strides, *_mask_strides(mask))
    constants |= dict(INITIAL=initial is not None, SAVE=save) | values
    return prepare, Launch(forward.scan_kernel, (programs,), (*strides, *sizes), constants)


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor,
    initial: Tensor | None, order: Tensor | None, buffers: Saved, out: Tensor, final: Tensor,
) -> None:  # fmt: skip
    """Fill ``out`` [B, N, H, Dv], ``final`` [B, H, Dk, Dv] and the buffers."""
    q, k, v = _rows(q, k, v)
    mask, initial = mask.contiguous(), None if initial is None else initial.contiguous()
    layouts, save = map(layout, (q, k, v, beta, log_decay, mask)), buffers.states.shape[2] > 0
    prepare, scan = _forward(*layouts, None if initial is None else initial.dtype, order is not None, save)
    B, H, C, T, R = buffers.scores.shape
    spread = buffers.scores.new_empty(B, H, C, R, T)
    chunks = (buffers.decays, buffers.scores, buffers.inverse, spread)
    prepare(q, k, beta, log_decay, mask, order, *chunks)
    scan(q, k, v, beta, mask, initial, order, *chunks, out, final, buffers.states, buffers.corrections)


@planned
def _backward(
    q: Layout, k: Layout, v: Layout, beta: Layout, log_decay: Layout, mask: Layout, d_out: Layout,
    final: torch.dtype | None, ordered: bool,
) -> tuple[Launch, Launch]:  # fmt: skip
    """Plan the kernels that scan the chunks backward and that compute the gradients of the inputs."""
    B, N, H, Dk = q.shape
    C = -(-N // chunk_tokens(mask.shape[-1]))
    align = alignment(q, k, v, d_out)
    constants, sizes = _constants(k, mask, ordered, align), (N, H, C, Dk**-0.5)
    values = _values(k, v, mask, _scan_tiles(B * H, v, mask))
    programs = B * H * -(-v.shape[-1] // values["VALUES"])
    strides = (*_strides(align, q, k), *beta.strides, *_mask_strides(mask), *_strides(align, d_out))
    scan_constants = constants | dict(FINAL=final is not None) | values
    scan = Launch(backward.scan_backward_kernel, (programs,), (*strides, *sizes), scan_constants)

    strides = (*_strides(align, q, k, v), *beta.strides, *log_decay.strides, *_mask_strides(mask))
    numbers = (*strides, *_strides(align, d_out), *sizes)
    constants |= _values(k, v, mask, INPUTS_BACKWARD)
    return scan, Launch(backward.inputs_backward_kernel, (B * H * C,), numbers, constants)


def backward_pass(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor,
    order: Tensor | None, buffers: Saved, d_out: Tensor, d_final: Tensor | None,
) -> Gradients:  # fmt: skip
    (B, N, H, Dk), r = q.shape, mask.shape[-1]
    C = buffers.decays.shape[2]
    q, k, v, d_out = _rows(q, k, v, d_out)
    mask, d_final = mask.contiguous(), None if d_final is None else d_final.contiguous()
    layouts = map(layout, (q, k, v, beta, log_decay, mask, d_out))
    scan, inputs = _backward(*layouts, None if d_final is None else d_final.dtype, order is not None)

    d_states, d_errors = torch.empty_like(buffers.states), torch.empty_like(buffers.corrections)
    d_initial = q.new_empty(B, H, Dk, v.shape[-1], dtype=torch.float32)
    chunks = (buffers.decays, buffers.scores, buffers.inverse)
    scan(q, k, beta, mask, d_out, d_final, order, *chunks, d_states, d_errors, d_initial)

    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_beta, d_log_decay = (q.new_empty(B, N, H, dtype=torch.float32) for _ in range(2))
    d_mask = q.new_empty(*((B, H, C) if mask.ndim == 3 else (B, N, H)), r, r, dtype=torch.float32)
    states = (buffers.states, buffers.corrections, d_states, d_errors)
    inputs(
        q, k, v, beta, log_decay, mask, d_out, order, buffers.decays, *states, d_q, d_k, d_v, d_beta, d_log_decay,
        d_mask,
    )  # fmt: skip
    d_mask = d_mask if mask.ndim == 5 else d_mask.sum((0, 2))
    return Gradients(d_q, d_k, d_v, d_beta, d_log_decay, d_mask, d_initial)
