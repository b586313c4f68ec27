"""Plan the launches of Head-in-Head's kernels for each layout, and run the forward and the backward pass.

B batch, N tokens, H heads, C chunks of T tokens, S segments of chunks, Dk and Dv head dims, r sub-heads, R = r T rows
of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from headmix_vision.ops.hardware import gpu_behind
from headmix_vision.ops.head_in_head.torch_impl import Inputs
from headmix_vision.ops.head_in_head.triton_kernels import (
    inputs_backward_kernel,
    join_kernel,
    prepare_kernel,
    scan_backward_kernel,
    scan_kernel,
)
from headmix_vision.ops.numerics import numerics, storage_dtype
from headmix_vision.ops.runtime import Launch, Layout, alignment, layout, planned

Tiles = dict[str, int]
# These are the best of sweeps on an H200 for bfloat16, up to 64 rows and keys. More stages hide the latency of memory
# where they do not crowd out a second program on a processor. Scans of one sub-head take most shared memory: they get
# fewer stages, unless heads are so few that each program has a processor to itself.
PREPARE = Tiles(num_warps=1, num_stages=1)
SCAN = Tiles(VALUES=64, num_warps=4, num_stages=3)
CROWDED_SCAN = SCAN | Tiles(num_stages=2)
INPUTS_BACKWARD = Tiles(VALUES=64, num_warps=4, num_stages=1)
# With mma.sync, registers do not hold 64 columns of values in a scan of one sub-head and in gradients of inputs. A scan
# of two with three stages leaves shared memory for one program. Timed on an H200 in place of an RTX card.
NARROW_SCAN = Tiles(VALUES=32, num_warps=4, num_stages=2)
NARROW_INPUTS_BACKWARD = Tiles(VALUES=32, num_warps=4, num_stages=2)
# Joins are chains of short steps. Value columns need nothing of each other, so that narrow tiles give more programs.
JOIN = Tiles(VALUES=16, num_warps=4, num_stages=4)

# Segments of a sequence are scanned at once, each twice: for what it does to the state, then for its results.
SEGMENT = 16  # chunks
LEAST_TOKENS = 16384  # of a sequence in segments
BLOCK_SHARE = 6  # of the backward pass: how many times the bytes of q the buffers of a block of segments may have


class Saved(NamedTuple):
    """The tensors that the forward pass saves for the backward pass.

    In S segments, ``inverse`` holds the transition of each segment, [B, H, S, Dk, Dk], and ``states`` the state before
    each segment, [B, H, S, Dv, Dk]. The other tensors have C = 0.

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

    @property
    def segments(self) -> int:
        """The number of segments, 0 for a sequence that is scanned as one."""
        return 0 if self.decays.shape[2] else self.states.shape[2]


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


def pays_in_segments(q: Tensor, v: Tensor, mask: Tensor) -> bool:
    """Return whether to scan a sequence in segments: it is long, and its heads alone leave most of the GPU idle.

    Measured on an H200 in bf16 with 64 dims: 32 heads of 16,384 tokens are faster in segments at r = 1, 2 and 4. With
    gradients, 32 heads of 2,048 or 4,096 tokens, 128 heads of 4,096 and 384 heads of 1,024 are slower.
    """
    if q.shape[1] < LEAST_TOKENS or mask.shape[-1] > 4:
        return False
    if q.dtype != torch.bfloat16 or max(q.shape[-1], v.shape[-1]) > SCAN["VALUES"]:
        return False
    gpu = gpu_behind(q.device)
    return gpu.capability == (9, 0) and 4 * q.shape[0] * q.shape[2] <= gpu.processors  # the batch may be a symbol


def count_segments(q: Tensor, v: Tensor, mask: Tensor) -> int:
    """Return the number of segments, whole blocks of them, of which the last may be empty; 0 to scan as one."""
    if not pays_in_segments(q, v, mask):
        return 0
    segments = -(-q.shape[1] // (chunk_tokens(mask.shape[-1]) * SEGMENT))
    count = block_segments(q, v, mask)
    return -(-segments // count) * count


def block_segments(q: Tensor | Layout, v: Tensor | Layout, mask: Tensor | Layout) -> int:
    """Choose how many segments the backward pass takes at a time, so that their buffers are small beside its results.

    A batch that is a symbol is compared, not computed with.
    """
    (B, N, H, Dk), Dv, r = q.shape, v.shape[-1], mask.shape[-1]
    T = chunk_tokens(r)
    numbers = 2 * T * r * T + r * T * (r * T + Dk) + 2 * Dv * (Dk + r * T)  # of a chunk
    chunks = BLOCK_SHARE * N * Dk * q.dtype.itemsize / (numbers * storage_dtype(q.dtype).itemsize)
    segments = -(-N // (T * SEGMENT))
    count = max(1, int(chunks / SEGMENT))
    while count < segments and B * H * count < gpu_behind(q.device).processors:
        count *= 2
    return -(-segments // -(-segments // count))


def saved(q: Tensor, v: Tensor, mask: Tensor, save: bool, inline: bool = False) -> Saved:
    """Allocate the buffers; without ``save`` the last two are left out, C = 0.

    A graph that launches the kernels itself, ``inline``, scans all sequences as one.
    """
    segments = 0 if inline else count_segments(q, v, mask)
    if segments:
        B, _, H, Dk = q.shape
        transitions = q.new_empty(B, H, segments, Dk, Dk, dtype=storage_dtype(q.dtype))
        states = q.new_empty(B, H, segments, v.shape[-1], Dk, dtype=storage_dtype(q.dtype))
        return chunk_buffers(q, v, mask, 0, 0, 0)._replace(inverse=transitions, states=states)
    C = -(-q.shape[1] // chunk_tokens(mask.shape[-1]))
    return chunk_buffers(q, v, mask, C, C, C if save else 0)


def chunk_buffers(q: Tensor, v: Tensor, mask: Tensor, C: int, inverses: int, states: int) -> Saved:
    """Allocate the buffers of C chunks, with so many inverses, and so many states and corrections."""
    (B, _, H, Dk), Dv, r = q.shape, v.shape[-1], mask.shape[-1]
    T, storage = chunk_tokens(r), storage_dtype(q.dtype)
    return Saved(
        q.new_empty(B, H, C, 2, T, dtype=torch.float64 if q.dtype == torch.float32 else torch.float32),
        q.new_empty(B, H, C, T, r * T, dtype=storage),
        q.new_empty(B, H, inverses, r * T, r * T, dtype=storage),
        q.new_empty(B, H, states, Dv, Dk, dtype=storage),
        q.new_empty(B, H, states, Dv, r * T, dtype=storage),
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
    columns = min(_columns(v.shape[-1]), tiles["VALUES"])
    return dict(DV=v.shape[-1], TOKEN_MASK=len(mask.shape) == 5) | tiles | Tiles(VALUES=columns)


def _scan_tiles(heads: int, v: Layout, mask: Layout) -> Tiles:
    if v.gpu.has_tensor_memory or v.gpu.amd:
        # With stages Triton lets a product begin with the state before the decay has scaled it (triton #10993), where
        # sums are in tensor memory; AMD's GPUs have no shared memory for stages.
        return SCAN | Tiles(num_stages=1)
    if v.gpu.uses_mma_sync:
        return {1: NARROW_SCAN, 2: CROWDED_SCAN}.get(mask.shape[-1], SCAN)
    if mask.shape[-1] > 1 or heads * -(-v.shape[-1] // SCAN["VALUES"]) <= v.gpu.processors:
        return SCAN
    return CROWDED_SCAN


def _join_tiles(k: Layout, v: Layout) -> Tiles:
    tiles = JOIN | Tiles(VALUES=min(_columns(v.shape[-1]), JOIN["VALUES"]))
    fits = k.dtype == torch.bfloat16 and k.shape[-1] <= 64
    return tiles if fits else tiles | Tiles(num_stages=1)


@planned
def _plan(
    q: Layout, k: Layout, v: Layout, beta: Layout, log_decay: Layout, mask: Layout, d_out: Layout | None,
    given: torch.dtype | None, ordered: bool, save: bool, segments: int,
) -> list[dict[str, Launch]]:  # fmt: skip
    """Plan the launches of each block of segments by name, in the order of the pass; without segments one block is all.

    Args:
        d_out: layout of the output's gradient, None for the forward pass.
        given: type of the initial state, or of the final state's gradient; None for zeros.
        save: let the scan store states and corrections.
    """
    B, N, H, Dk = q.shape
    Dv, gradient = v.shape[-1], [] if d_out is None else [d_out]
    count = block_segments(q, v, mask) if segments and gradient else segments
    C = count * SEGMENT or -(-N // chunk_tokens(mask.shape[-1]))
    align = alignment(q, k, v, *gradient)
    constants = _constants(k, mask, ordered, align)
    values = _values(k, v, mask, _scan_tiles(B * H * (count or 1), v, mask))
    parts = -(-Dv // values["VALUES"])
    programs = B * H * (count or 1) * parts
    qk, qkv, d_strides = _strides(align, q, k), _strides(align, q, k, v), _strides(align, *gradient)
    gates, masks = (*beta.strides, *log_decay.strides), _mask_strides(mask)
    scanning = constants | values | dict(LENGTH=SEGMENT if segments else 0)
    begins = given is not None or segments > 0  # with a state that is not zero
    blocks = []
    for start in range(0, segments or 1, count or 1):
        sizes = (N, H, C, Dk**-0.5, start * SEGMENT if segments else None)
        numbers = (*qk, *gates, *masks, *sizes)
        block = {"prepare": Launch(prepare_kernel, (B * H * C,), numbers, constants | _tiles(PREPARE, k))}
        numbers = (*qkv, *beta.strides, *masks, *sizes, segments or None)
        forms = dict(INITIAL=begins, SAVE=save, SUMMARY=False)
        block["scan"] = Launch(scan_kernel, (programs,), numbers, scanning | forms)
        if segments and not gradient:
            summaries = B * H * count * -(-(Dv + Dk) // values["VALUES"])
            forms = dict(INITIAL=True, SAVE=False, SUMMARY=True)
            block["summarize"] = Launch(scan_kernel, (summaries,), numbers, scanning | forms)
        if gradient:
            numbers = (*qk, *beta.strides, *masks, *d_strides, *sizes)
            block["summarize"] = Launch(scan_backward_kernel, (programs,), numbers, scanning | dict(FINAL=False))
            block["scan_backward"] = Launch(scan_backward_kernel, (programs,), numbers, scanning | dict(FINAL=begins))
            numbers = (*qkv, *gates, *masks, *d_strides, *sizes)
            narrow = k.gpu.uses_mma_sync and (mask.shape[-1] == 1 or Dk <= 64)
            tiles = _values(k, v, mask, NARROW_INPUTS_BACKWARD if narrow else INPUTS_BACKWARD)
            block["inputs_backward"] = Launch(inputs_backward_kernel, (B * H * C,), numbers, constants | tiles)
        if segments:
            is_first = start + count == segments if gradient else start == 0
            same = {name: scanning[name] for name in ("D", "KEYS", "DV", "LENGTH", "COMPUTE", "PRECISION")}
            forms = dict(INITIAL=given is not None or not is_first, BACKWARD=bool(gradient))
            tiles = _join_tiles(k, v)
            numbers = (count, start * SEGMENT, segments)
            grid = (B * H * -(-Dv // tiles["VALUES"]),)
            block["join"] = Launch(join_kernel, grid, numbers, same | forms | tiles)
        blocks.append(block)
    return blocks[::-1] if gradient else blocks


def forward_pass(inputs: Inputs, order: Tensor | None, buffers: Saved, out: Tensor, final: Tensor) -> None:
    """Fill ``out`` [B, N, H, Dv], ``final`` [B, H, Dk, Dv] and the buffers."""
    q, k, v, beta, log_decay, mask, initial = inputs
    q, k, v = _rows(q, k, v)
    mask, initial = mask.contiguous(), None if initial is None else initial.contiguous()
    layouts, given = map(layout, (q, k, v, beta, log_decay, mask)), None if initial is None else initial.dtype
    segments, states, inverse = buffers.segments, buffers.states, buffers.inverse
    save = not segments and states.shape[2] > 0
    (block,) = _plan(*layouts, None, given, order is not None, save, segments)
    features = (q, k, v, beta, mask)
    if not segments:
        chunks: tuple[Tensor | None, ...] = (buffers.decays, buffers.scores, inverse, _for_values(buffers), None)
        block["prepare"](q, k, beta, log_decay, mask, order, *chunks)
        block["scan"](*features, initial, order, *chunks, out, final, states, buffers.corrections, None)
        return
    own = chunk_buffers(q, v, mask, segments * SEGMENT, 0, 0)
    chunks = (own.decays, own.scores, None, _for_values(own), _for_state(own, q))
    added = torch.empty_like(states, dtype=torch.float32)
    block["prepare"](q, k, beta, log_decay, mask, order, *chunks)
    block["summarize"](*features, None, order, *chunks, None, added, None, None, inverse)
    block["join"](initial, inverse, added, states, final)
    block["scan"](*features, states, order, *chunks, out, None, None, None, None)


def _for_values(buffers: Saved) -> Tensor:
    """Allocate the factors of the values in the corrections, [B, H, C, R, T]."""
    return buffers.scores.new_empty(buffers.scores.mT.shape)


def _for_state(buffers: Saved, q: Tensor) -> Tensor:
    """Allocate the factors of the state in the corrections, [B, H, C, R, Dk]."""
    B, H, C, _, R = buffers.scores.shape
    return buffers.scores.new_empty(B, H, C, R, q.shape[-1])


def backward_pass(
    inputs: Inputs, order: Tensor | None, buffers: Saved, d_out: Tensor, d_final: Tensor | None
) -> Gradients:
    """Compute the gradients; in segments block by block from the last, where all of the chunks is computed again."""
    q, k, v, beta, log_decay, mask, _ = inputs
    q, k, v, d_out = _rows(q, k, v, d_out)
    mask, d_final = mask.contiguous(), None if d_final is None else d_final.contiguous()
    (B, N, H, Dk), r, segments = q.shape, mask.shape[-1], buffers.segments
    layouts, given = map(layout, (q, k, v, beta, log_decay, mask, d_out)), None if d_final is None else d_final.dtype
    blocks = _plan(*layouts, given, order is not None, segments > 0, segments)

    own, for_values, for_state, d_ends = buffers, None, None, d_final
    if segments:
        C = segments // len(blocks) * SEGMENT
        own = chunk_buffers(q, v, mask, C, C, C)
        for_values, for_state = _for_values(own), _for_state(own, q)
        added, d_ends = (q.new_empty(B, H, C // SEGMENT, v.shape[-1], Dk, dtype=torch.float32) for _ in range(2))
    C = own.decays.shape[2]
    chunks = (own.decays, own.scores, own.inverse)
    d_states, d_errors = torch.empty_like(own.states), torch.empty_like(own.corrections)
    d_initial = q.new_empty(B, H, Dk, v.shape[-1], dtype=torch.float32)
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_beta, d_log_decay = (q.new_empty(B, N, H, dtype=torch.float32) for _ in range(2))
    per_token = mask.ndim == 5
    size = (B, N, H) if per_token else (len(blocks), B, H, C) if segments else (B, H, C)
    d_mask = q.new_empty(*size, r, r, dtype=torch.float32)
    features = (q, k, beta, mask, d_out)
    for i, block in enumerate(blocks):
        if segments:
            block["prepare"](q, k, beta, log_decay, mask, order, *chunks, for_values, for_state)
            block["scan"](
                q, k, v, beta, mask, buffers.states, order, *chunks, for_values, for_state, None, None, own.states,
                own.corrections, None,
            )  # fmt: skip
            block["summarize"](*features, None, order, *chunks[:2], None, for_state, None, None, added)
            block["join"](d_initial if i else d_final, buffers.inverse, added, d_ends, d_initial)
        first = None if segments else d_initial
        block["scan_backward"](*features, d_ends, order, *chunks, for_state, d_states, d_errors, first)
        block["inputs_backward"](
            q, k, v, beta, log_decay, mask, d_out, order, own.decays, own.states, own.corrections, d_states, d_errors,
            d_q, d_k, d_v, d_beta, d_log_decay, d_mask[i] if segments and not per_token else d_mask,
        )  # fmt: skip
    if not per_token:
        d_mask = d_mask.sum((0, 1, 3) if segments else (0, 2))
    return Gradients(d_q, d_k, d_v, d_beta, d_log_decay, d_mask, d_initial)
