"""The tensors of the Head-in-Head ops.

B batch, N tokens, H heads, Dk and Dv head dims, r sub-heads.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
