"""The tensors of Head-in-Head, and its form in plain PyTorch, chunk by chunk: linear in N, on any device (README.md).

B batch, N tokens, H heads, Dk and Dv head dims, r sub-heads of d = Dk / r dimensions, C chunks of T tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.ops.numerics import accumulation_dtype, autocast_off
from headmix_vision.ops.symbolic_sizes import count_chunks, doublings, is_symbolic_in_export
from headmix_vision.ops.token_blocks import gather
from headmix_vision.ops.token_scan import ScanTables

RWKV7_CHUNK_LENGTH = 16  # decays by channel are held for all pairs of a chunk: T Dk numbers a token


class Inputs(NamedTuple):
    """The tensors of :func:`headmix_vision.ops.head_in_head`.

    Attributes:
        q, k: [B, N, H, Dk].
        v: [B, N, H, Dv].
        beta, log_decay: [B, N, H].
        mask: [H, r, r] or [B, N, H, r, r].
        initial_state: [B, H, Dk, Dv], or None for zeros.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor
    mask: Tensor
    initial_state: Tensor | None


class RWKV7Inputs(NamedTuple):
    """The tensors of :func:`headmix_vision.ops.head_in_head_rwkv7`.

    Attributes:
        q, k, a, b, log_decay: [B, N, H, Dk].
        v: [B, N, H, Dv].
        mask, initial_state: as in :class:`Inputs`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    log_decay: Tensor
    mask: Tensor
    initial_state: Tensor | None


def head_in_head_torch(inputs: Inputs, scan: ScanTables | None) -> tuple[Tensor, Tensor]:
    """Compute :func:`headmix_vision.ops.head_in_head` chunk by chunk."""
    q, k, v, beta, log_decay, mask, initial_state = inputs
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        tokens, r = q.shape[1], mask.shape[-1]
        if scan is not None:
            q, k, v, beta, log_decay, mask = _reorder(scan, mask, q, k, v, beta, log_decay)

        chunks = count_chunks(tokens, _chunk_length(r, q.shape[-1], v.shape[-1]))
        q, k, v, beta, log_decay = _to_chunks(chunks, dtype, q, k, v, beta, log_decay)
        mask = _mask_chunks(mask, chunks, dtype)  # [B or 1, H, C or 1, T or 1, r, r]
        sums = _segment_sums(log_decay[..., None])[..., 0]  # [B, H, C, T, T + 1]
        within, since_start = sums[..., 1:].exp(), sums[..., 0].exp()  # e^(G_t - G_s), e^(G_t)
        to_end = within[..., -1, :]  # e^(G_end - G_s)

        q_sub, k_sub = [x.unflatten(-1, (r, -1)).transpose(-2, -3) for x in (q, k)]  # [B, H, C, r, T, d]
        writes, reads = _solve(k, k_sub, v, beta, mask, within, since_start)

        # A chunk turns the state into transition S + addition; both are computed for all chunks at once.
        keys_to_end = (k_sub * to_end[..., None, :, None]).transpose(-1, -2)  # [B, H, C, r, d, T]
        decayed = torch.diag_embed(since_start[..., -1:].expand(*since_start.shape[:-1], k.shape[-1]))
        transition = decayed - (keys_to_end @ reads).flatten(-3, -2)  # [B, H, C, Dk, Dk]
        addition = (keys_to_end @ writes).flatten(-3, -2)  # [B, H, C, Dk, Dv]
        starts, final = _chunk_states(transition, addition, initial_state)

        corrected = writes - reads @ starts[..., None, :, :]  # u, [B, H, C, r, T, Dv]
        scores = (q_sub @ k_sub.transpose(-1, -2)) * within[..., None, :, :]  # [B, H, C, r, T, T]
        own = scores.transpose(-2, -3).flatten(-2) @ corrected.flatten(-3, -2)  # over the r T pairs of the chunk
        out = since_start[..., None] * (q @ starts) + own
        out = _from_chunks(q.shape[-1] ** -0.5 * out, tokens)
        return (out if scan is None else _restore(scan, out)).to(out_dtype), final


def _chunk_length(r: int, key_dim: int, value_dim: int) -> int:
    """Choose T so that a token needs as many numbers of the system, T r², as of the transition, Dk (Dk + Dv) / T."""
    balance = math.sqrt(key_dim * (key_dim + value_dim)) / r
    return min(64, max(16, 2 ** math.ceil(math.log2(balance))))


def _solve(
    k: Tensor, k_sub: Tensor, v: Tensor, beta: Tensor, mask: Tensor, within: Tensor, since_start: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve for the corrections u = writes - reads S of a chunk, for a state S yet unknown.

    Returns:
        writes [B, H, C, r, T, Dv] and reads [B, H, C, r, T, Dk].
    """
    r, length = mask.shape[-1], k.shape[-2]
    scores = (k_sub @ k_sub.transpose(-1, -2)) * (beta[..., None] * within)[..., None, :, :]  # [B, H, C, r (l), T, T]
    # Row (t, i), column (s, l): the r x r blocks on the diagonal are zero.
    system = scores.tril(-1).movedim(-3, -1)[..., :, None, :, :] * mask[..., :, :, None, :]
    system = system.flatten(-4, -3).flatten(-2)  # [B, H, C, T r, T r]

    masked_keys = mask.repeat_interleave(k.shape[-1] // r, -1) * k[..., None, :]  # [B, H, C, T, r, Dk]
    values = (beta[..., None] * v)[..., None, :].expand(*v.shape[:-1], r, v.shape[-1])
    right = torch.cat([values, (beta * since_start)[..., None, None] * masked_keys], dim=-1)
    solution = _solve_unit_lower(system, right.flatten(-3, -2))
    solution = solution.unflatten(-2, (length, r)).transpose(-2, -3)
    writes, reads = solution.split([v.shape[-1], k.shape[-1]], dim=-1)
    return writes, reads


def head_in_head_rwkv7_torch(inputs: RWKV7Inputs, scan: ScanTables | None) -> tuple[Tensor, Tensor]:
    """Compute :func:`headmix_vision.ops.head_in_head_rwkv7` chunk by chunk."""
    q, k, v, a, b, log_decay, mask, initial_state = inputs
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        tokens, r = q.shape[1], mask.shape[-1]
        if scan is not None:
            q, k, v, a, b, log_decay, mask = _reorder(scan, mask, q, k, v, a, b, log_decay)

        chunks = count_chunks(tokens, RWKV7_CHUNK_LENGTH)
        q, k, v, a, b, log_decay = _to_chunks(chunks, dtype, q, k, v, a, b, log_decay)
        mask = _mask_chunks(mask, chunks, dtype)
        sums = _segment_sums(log_decay)  # [B, H, C, T, T + 1, Dk]
        within, since_start = sums[..., 1:, :].exp(), sums[..., 0, :].exp()  # e^(G_t - G_s), e^(G_t)
        to_end = within[..., -1, :, :]  # e^(G_end - G_s), [B, H, C, T, Dk]

        writes, reads = _solve_rwkv7(k, v, a, b, mask, _one_token_earlier(sums).exp())

        b_to_end = (b * to_end).unflatten(-1, (r, -1)).movedim(-3, -1)  # [B, H, C, r, d, T]
        transition = torch.diag_embed(since_start[..., -1, :]) + (b_to_end @ reads).flatten(-3, -2)
        addition = (b_to_end @ writes).flatten(-3, -2) + (k * to_end).transpose(-1, -2) @ v
        starts, final = _chunk_states(transition, addition, initial_state)

        corrections = writes + reads @ starts[..., None, :, :]  # y, [B, H, C, r, T, Dv]
        decayed_q = q[..., :, None, :] * within  # [B, H, C, T, T, Dk]
        q_b = _sub_head_scores(decayed_q, b, r).movedim(-1, -3)  # [B, H, C, r, T, T]
        q_k = _sub_head_scores(decayed_q, k, 1)[..., 0]
        out = (q * since_start) @ starts + (q_b @ corrections).sum(-3) + q_k @ v
        out = _from_chunks(q.shape[-1] ** -0.5 * out, tokens)
        return (out if scan is None else _restore(scan, out)).to(out_dtype), final


def _one_token_earlier(sums: Tensor) -> Tensor:
    """Return the log decays up to the token before t, an empty sum for t = 0: [B, H, C, T, T + 1, Dk]."""
    empty = torch.zeros_like(sums[..., :1, :1, :])
    first = torch.cat([empty, empty.expand(*sums.shape[:-3], 1, sums.shape[-2] - 1, -1) - torch.inf], dim=-2)
    return torch.cat([first, sums[..., :-1, :, :]], dim=-3)


def _solve_rwkv7(k: Tensor, v: Tensor, a: Tensor, b: Tensor, mask: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Solve for the corrections y = writes + reads S of a chunk, for a state S yet unknown.

    Returns:
        writes [B, H, C, r, T, Dv] and reads [B, H, C, r, T, Dk].
    """
    r, length = mask.shape[-1], k.shape[-2]
    decayed_a = a[..., :, None, :] * before[..., 1:, :]  # [B, H, C, T, T, Dk], zero for s >= t
    a_b = _sub_head_scores(decayed_a, b, r)  # [B, H, C, T, T, r]
    a_k = _sub_head_scores(decayed_a, k, r)
    system = (a_b[..., :, None, :, :] * mask[..., :, :, None, :]).flatten(-4, -3).flatten(-2)  # [B, H, C, T r, T r]
    values = mask @ a_k.transpose(-1, -2)  # [B, H, C, T, r, T]
    values = values.flatten(-3, -2) @ v  # [B, H, C, T r, Dv]
    masked_a = mask.repeat_interleave(k.shape[-1] // r, -1) * (a * before[..., 0, :])[..., None, :]
    solution = _solve_unit_lower(-system, torch.cat([values, masked_a.flatten(-3, -2)], dim=-1))
    solution = solution.unflatten(-2, (length, r)).transpose(-2, -3)
    writes, reads = solution.split([v.shape[-1], k.shape[-1]], dim=-1)
    return writes, reads


def _sub_head_scores(x: Tensor, y: Tensor, r: int) -> Tensor:
    """Multiply x [..., T, T, Dk] by y_s [..., T, Dk] and sum within sub-heads: [..., T, T, r]."""
    return (x * y[..., None, :, :]).unflatten(-1, (r, -1)).sum(-1)


def _reorder(scan: ScanTables, mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Put the tokens of tensors [B, N, ...] and of masks [B, N, H, r, r] into the order of the scan; the mask last."""
    per_token = mask.ndim == 5
    ordered = gather((*tensors, mask) if per_token else tensors, 1, scan.order, None, scan.inverse)
    return ordered if per_token else [*ordered, mask]


def _restore(scan: ScanTables, x: Tensor) -> Tensor:
    """Put the tokens of [B, N, ...] from the order of the scan back into raster order."""
    return gather((x,), 1, scan.inverse, None, scan.order)[0]


def _to_chunks(chunks: tuple[int, int], dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Cut the tokens of tensors into C chunks of T, [B, N, H, ...] -> [B, H, C, T, ...].

    Places after the last token are zeros, which neither write, erase nor decay.
    """
    cut = []
    for x in tensors:
        x, padding = x.to(dtype), math.prod(chunks) - x.shape[1]
        if is_symbolic_in_export(padding) or padding:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding))
        cut.append(x.transpose(1, 2).unflatten(2, chunks))
    return cut


def _from_chunks(x: Tensor, tokens: int) -> Tensor:
    """Join chunks to tokens: [B, H, C, T, D] -> [B, N, H, D]."""
    return x.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def _mask_chunks(mask: Tensor, chunks: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Shape masks for chunks: [H, r, r] or [B, N, H, r, r] -> [1, H, 1, 1, r, r] or [B, H, C, T, r, r]."""
    return mask.to(dtype)[None, :, None, None] if mask.ndim == 3 else _to_chunks(chunks, dtype, mask)[0]


def _segment_sums(log_decay: Tensor) -> Tensor:
    """Sum the log decays between all pairs of moments of a chunk, without the difference of two large sums.

    Args:
        log_decay: [..., T, D].

    Returns:
        [..., T, T + 1, D]: entry (t, j) is the sum over tokens j to t: column 0 holds the log decay since the start
        of the chunk, column s + 1 that since token s; minus infinity where s > t.
    """
    length = log_decay.shape[-2]
    place = torch.arange(length, device=log_decay.device)
    start = torch.arange(length + 1, device=log_decay.device)
    inside = (place[:, None] >= start)[..., None]
    sums = torch.where(inside, log_decay[..., None, :], 0).cumsum(-3)
    return sums.masked_fill((place[:, None] + 1 < start)[..., None], -torch.inf)


def _solve_unit_lower(strictly_lower: Tensor, right: Tensor) -> Tensor:
    """Compute (I + L)^-1 R for strictly lower triangular L: [..., n, n] and [..., n, m] -> [..., n, m]."""
    if torch.onnx.is_in_onnx_export():  # ONNX has no solver
        return invert_unit_lower(strictly_lower) @ right
    return torch.linalg.solve_triangular(strictly_lower, right, upper=False, unitriangular=True)


def invert_unit_lower(strictly_lower: Tensor) -> Tensor:
    """Compute (I + L)^-1, [..., n, n], for strictly lower triangular L from inverses of ever larger diagonal blocks."""
    n = strictly_lower.shape[-1]
    levels = (n - 1).bit_length()
    padded = F.pad(strictly_lower, (0, 2**levels - n) * 2)
    inverse = torch.ones_like(padded[..., :1])[..., None]  # [..., blocks, size, size]
    for level in range(levels):
        size = 2**level
        pairs = padded.unflatten(-1, (-1, 2 * size)).unflatten(
            -3, (-1, 2 * size)
        )  # [..., pairs, 2 size, pairs, 2 size]
        below = pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., size:, :size]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        upper = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([upper, torch.cat([-second @ below @ first, second], dim=-1)], dim=-2)
    return inverse[..., 0, :n, :n]


def _chunk_states(transition: Tensor, addition: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run S <- transition S + addition over the chunks.

    Args:
        transition: [B, H, C, Dk, Dk].
        addition: [B, H, C, Dk, Dv].
        initial_state: [B, H, Dk, Dv] or None.

    Returns:
        The state before each chunk, [B, H, C, Dk, Dv], and the last, [B, H, Dk, Dv].
    """
    state = torch.zeros_like(addition[:, :, 0]) if initial_state is None else initial_state.to(addition.dtype)
    if is_symbolic_in_export(addition.shape[2]):
        return _doubled_states(transition, addition, state)
    starts = []
    # unbind, as the gradient of indexing would be a tensor of all chunks for each chunk.
    for step, added in zip(transition.unbind(2), addition.unbind(2), strict=True):
        starts.append(state)
        state = step @ state + added
    return torch.stack(starts, 2), state


def _doubled_states(transition: Tensor, addition: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`_chunk_states` of any number of chunks in one graph: each step joins spans of twice as many.

    Steps that join more chunks than there are change nothing, so that the graph needs enough for the most.
    """
    chunk = torch.arange(addition.shape[2], device=addition.device)

    def chunk_before(distance: int) -> tuple[Tensor, Tensor]:
        """Return whether there is one [C, 1, 1], and which [C]."""
        before = chunk - distance
        return (before >= 0)[:, None, None], before.clamp(min=0)

    exists, before = chunk_before(1)
    addition = addition + torch.where(exists, 0, transition @ state[:, :, None])
    for step in range(doublings(addition.shape[2])):
        joins, earlier = chunk_before(2**step)
        addition = addition + torch.where(joins, transition @ addition.index_select(2, earlier), 0)
        transition = torch.where(joins, transition @ transition.index_select(2, earlier), transition)
    return torch.where(exists, addition.index_select(2, before), state[:, :, None]), addition[:, :, -1]
