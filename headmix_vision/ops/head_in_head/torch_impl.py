"""Compute Head-in-Head chunk by chunk, linear in N, in plain PyTorch for any device. README.md derives it.

B batch, N tokens, H heads, Dk and Dv head dims, r sub-heads of d = Dk / r dimensions, C chunks of T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headmix_vision.ops.head_in_head.chunks import (
    chunk_states,
    from_chunks,
    mask_chunks,
    segment_sums,
    solve_unit_lower,
    to_chunks,
)
from headmix_vision.ops.head_in_head.inputs import Inputs
from headmix_vision.ops.runtime import accumulation_dtype, autocast_off
from headmix_vision.ops.token_scan import ScanTables, reorder, restore


def head_in_head_torch(inputs: Inputs, scan: ScanTables | None) -> tuple[Tensor, Tensor]:
    """Compute :func:`headmix_vision.ops.head_in_head` chunk by chunk."""
    q, k, v, beta, log_decay, mask, initial_state = inputs
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        tokens, r = q.shape[1], mask.shape[-1]
        if scan is not None:
            q, k, v, beta, log_decay = reorder(scan, q, k, v, beta, log_decay)
            (mask,) = reorder(scan, mask) if mask.ndim == 5 else (mask,)

        length = min(tokens, _chunk_length(r, q.shape[-1], v.shape[-1]))
        q, k, v, beta, log_decay = (to_chunks(x.to(dtype), length) for x in (q, k, v, beta, log_decay))
        mask = mask_chunks(mask.to(dtype), length)  # [B or 1, H, C or 1, T or 1, r, r]
        sums = segment_sums(log_decay[..., None])[..., 0]  # [B, H, C, T, T + 1]
        within, since_start = sums[..., 1:].exp(), sums[..., 0].exp()  # e^(G_t - G_s), e^(G_t)
        to_end = within[..., -1, :]  # e^(G_end - G_s)

        q_sub, k_sub = (x.unflatten(-1, (r, -1)).transpose(-2, -3) for x in (q, k))  # [B, H, C, r, T, d]
        writes, reads = _solve(k, k_sub, v, beta, mask, within, since_start)

        # A chunk turns the state into transition S + addition; both are computed for all chunks at once.
        keys_to_end = (k_sub * to_end[..., None, :, None]).transpose(-1, -2)  # [B, H, C, r, d, T]
        decayed = torch.diag_embed(since_start[..., -1:].expand(*since_start.shape[:-1], k.shape[-1]))
        transition = decayed - (keys_to_end @ reads).flatten(-3, -2)  # [B, H, C, Dk, Dk]
        addition = (keys_to_end @ writes).flatten(-3, -2)  # [B, H, C, Dk, Dv]
        starts, final = chunk_states(transition, addition, initial_state)

        corrected = writes - reads @ starts[..., None, :, :]  # u, [B, H, C, r, T, Dv]
        scores = (q_sub @ k_sub.transpose(-1, -2)) * within[..., None, :, :]  # [B, H, C, r, T, T]
        own = scores.transpose(-2, -3).flatten(-2) @ corrected.flatten(-3, -2)  # over the r T pairs of the chunk
        out = since_start[..., None] * (q @ starts) + own
        out = from_chunks(q.shape[-1] ** -0.5 * out, tokens)
        return (out if scan is None else restore(scan, out)).to(out_dtype), final


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
    solution = solve_unit_lower(system, right.flatten(-3, -2))
    solution = solution.unflatten(-2, (length, r)).transpose(-2, -3)
    writes, reads = solution.split([v.shape[-1], k.shape[-1]], dim=-1)
    return writes, reads
