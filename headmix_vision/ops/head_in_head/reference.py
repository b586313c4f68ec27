"""Compute Head-in-Head in a loop over tokens. It specifies the other implementations.

B batch, N tokens, H heads, Dk and Dv head dims, r sub-heads of Dk / r dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headmix_vision.ops.head_in_head.torch_impl import Inputs, RWKV7Inputs
from headmix_vision.ops.numerics import accumulation_dtype, autocast_off
from headmix_vision.ops.token_scan import ScanTables


def head_in_head_reference(inputs: Inputs, scan: ScanTables | None) -> tuple[Tensor, Tensor]:
    """Compute :func:`headmix_vision.ops.head_in_head` token by token."""
    q, k, v, beta, log_decay, mask, initial_state = inputs
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        q, k, v, beta, log_decay, mask = (x.to(dtype) for x in (q, k, v, beta, log_decay, mask))
        state = _initial(initial_state, k, v)
        identity = torch.eye(k.shape[-1], dtype=dtype, device=k.device)
        outputs: dict[int, Tensor] = {}
        for t in _order(scan, k):
            strength, decay = beta[:, t, :, None, None], log_decay[:, t, :, None, None].exp()  # [B, H, 1, 1]
            erase = _outer(k[:, t], k[:, t]) * _expand(_mask_of_token(mask, t), k.shape[-1])  # [B, H, Dk, Dk]
            state = decay * ((identity - strength * erase) @ state) + strength * _outer(k[:, t], v[:, t])
            outputs[t] = _read(q[:, t], state)
        return _stack(outputs).to(out_dtype), state


def head_in_head_rwkv7_reference(inputs: RWKV7Inputs, scan: ScanTables | None) -> tuple[Tensor, Tensor]:
    """Compute :func:`headmix_vision.ops.head_in_head_rwkv7` token by token."""
    q, k, v, a, b, log_decay, mask, initial_state = inputs
    with autocast_off(q):
        out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype)
        q, k, v, a, b, log_decay, mask = (x.to(dtype) for x in (q, k, v, a, b, log_decay, mask))
        state = _initial(initial_state, k, v)
        outputs: dict[int, Tensor] = {}
        for t in _order(scan, k):
            correction = _outer(b[:, t], a[:, t]) * _expand(_mask_of_token(mask, t), k.shape[-1])  # [B, H, Dk, Dk]
            transition = torch.diag_embed(log_decay[:, t].exp()) + correction
            state = transition @ state + _outer(k[:, t], v[:, t])
            outputs[t] = _read(q[:, t], state)
        return _stack(outputs).to(out_dtype), state


def _initial(initial_state: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    if initial_state is not None:
        return initial_state.to(k.dtype)
    return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])


def _order(scan: ScanTables | None, k: Tensor) -> list[int]:
    return list(range(k.shape[1])) if scan is None else scan.order.tolist()


def _mask_of_token(mask: Tensor, t: int) -> Tensor:
    return mask if mask.ndim == 3 else mask[:, t]


def _expand(mask: Tensor, dim: int) -> Tensor:
    """Expand a mask to E(M): every entry becomes a block of Dk / r x Dk / r equal entries."""
    size = dim // mask.shape[-1]
    return mask.repeat_interleave(size, -1).repeat_interleave(size, -2)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]


def _read(q: Tensor, state: Tensor) -> Tensor:
    """Compute Dk^-0.5 q^T S: [B, H, Dk] and [B, H, Dk, Dv] -> [B, H, Dv]."""
    return q.shape[-1] ** -0.5 * (q[..., None, :] @ state).squeeze(-2)


def _stack(outputs: dict[int, Tensor]) -> Tensor:
    return torch.stack([outputs[t] for t in range(len(outputs))], dim=1)
