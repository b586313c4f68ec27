"""Compute Head-in-Head with the transition of RWKV-7 chunk by chunk, linear in N, in plain PyTorch for any device.

README.md derives it. B batch, N tokens, H heads, Dk and Dv head dims, r sub-heads of d = Dk / r dimensions,
C chunks of T tokens.
"""

from __future__ import annotations

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
from headmix_vision.ops.head_in_head.inputs import RWKV7Inputs
from headmix_vision.ops.runtime import accumulation_dtype, autocast_off
from headmix_vision.ops.token_scan import ScanTables, reorder, restore

CHUNK_LENGTH = 16  # decays by channel are held for all pairs of a chunk: T Dk numbers a token


def head_in_head_rwkv7_torch(inputs: RWKV7Inputs, scan: ScanTables | None) -> tuple[Tensor, Tensor]:
    """Compute :func:`headmix_vision.ops.head_in_head_rwkv7` chunk by chunk."""
    q, k, v, a, b, log_decay, mask, initial_state = inputs
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        tokens, r = q.shape[1], mask.shape[-1]
        if scan is not None:
            q, k, v, a, b, log_decay = reorder(scan, q, k, v, a, b, log_decay)
            (mask,) = reorder(scan, mask) if mask.ndim == 5 else (mask,)

        length = min(tokens, CHUNK_LENGTH)
        q, k, v, a, b, log_decay = (to_chunks(x.to(dtype), length) for x in (q, k, v, a, b, log_decay))
        mask = mask_chunks(mask.to(dtype), length)
        sums = segment_sums(log_decay)  # [B, H, C, T, T + 1, Dk]
        within, since_start = sums[..., 1:, :].exp(), sums[..., 0, :].exp()  # e^(G_t - G_s), e^(G_t)
        to_end = within[..., -1, :, :]  # e^(G_end - G_s), [B, H, C, T, Dk]

        writes, reads = _solve(k, v, a, b, mask, _one_token_earlier(sums).exp())

        b_to_end = (b * to_end).unflatten(-1, (r, -1)).movedim(-3, -1)  # [B, H, C, r, d, T]
        transition = torch.diag_embed(since_start[..., -1, :]) + (b_to_end @ reads).flatten(-3, -2)
        addition = (b_to_end @ writes).flatten(-3, -2) + (k * to_end).transpose(-1, -2) @ v
        starts, final = chunk_states(transition, addition, initial_state)

        corrections = writes + reads @ starts[..., None, :, :]  # y, [B, H, C, r, T, Dv]
        decayed_q = q[..., :, None, :] * within  # [B, H, C, T, T, Dk]
        q_b = _sub_head_scores(decayed_q, b, r).movedim(-1, -3)  # [B, H, C, r, T, T]
        q_k = _sub_head_scores(decayed_q, k, 1)[..., 0]
        out = (q * since_start) @ starts + (q_b @ corrections).sum(-3) + q_k @ v
        out = from_chunks(q.shape[-1] ** -0.5 * out, tokens)
        return (out if scan is None else restore(scan, out)).to(out_dtype), final


def _one_token_earlier(sums: Tensor) -> Tensor:
    """Return the log decays up to the token before t, those of an empty sum for t = 0: [B, H, C, T, T + 1, Dk]."""
    empty = torch.zeros_like(sums[..., :1, :1, :])
    first = torch.cat([empty, empty.expand(*sums.shape[:-3], 1, sums.shape[-2] - 1, -1) - torch.inf], dim=-2)
    return torch.cat([first, sums[..., :-1, :, :]], dim=-3)


def _solve(k: Tensor, v: Tensor, a: Tensor, b: Tensor, mask: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
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
    solution = solve_unit_lower(-system, torch.cat([values, masked_a.flatten(-3, -2)], dim=-1))
    solution = solution.unflatten(-2, (length, r)).transpose(-2, -3)
    writes, reads = solution.split([v.shape[-1], k.shape[-1]], dim=-1)
    return writes, reads


def _sub_head_scores(x: Tensor, y: Tensor, r: int) -> Tensor:
    """Multiply x [..., T, T, Dk] by y_s [..., T, Dk] and sum within sub-heads: [..., T, T, r]."""
    return (x * y[..., None, :, :]).unflatten(-1, (r, -1)).sum(-1)
