"""Cut tokens into chunks, sum decays between tokens and run states from chunk to chunk, for both chunk forms.

B batch, N tokens, H heads, Dk and Dv head dims, r sub-heads, C chunks of T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def to_chunks(x: Tensor, length: int) -> Tensor:
    """Cut tokens into chunks, [B, N, H, ...] -> [B, H, C, T, ...].

    Places after the last token are zeros, which neither write, erase nor decay.
    """
    padding = -x.shape[1] % length
    if padding:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding))
    return x.transpose(1, 2).unflatten(2, (x.shape[1] // length, length))


def from_chunks(x: Tensor, tokens: int) -> Tensor:
    """Join chunks to tokens: [B, H, C, T, D] -> [B, N, H, D]."""
    return x.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def mask_chunks(mask: Tensor, length: int) -> Tensor:
    """Shape masks for chunks: [H, r, r] or [B, N, H, r, r] -> [1, H, 1, 1, r, r] or [B, H, C, T, r, r]."""
    return mask[None, :, None, None] if mask.ndim == 3 else to_chunks(mask, length)


def segment_sums(log_decay: Tensor) -> Tensor:
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


def solve_unit_lower(strictly_lower: Tensor, right: Tensor) -> Tensor:
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


def chunk_states(transition: Tensor, addition: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run S <- transition S + addition over the chunks.

    Args:
        transition: [B, H, C, Dk, Dk].
        addition: [B, H, C, Dk, Dv].
        initial_state: [B, H, Dk, Dv] or None.

    Returns:
        The state before each chunk, [B, H, C, Dk, Dv], and the last, [B, H, Dk, Dv].
    """
    state = torch.zeros_like(addition[:, :, 0]) if initial_state is None else initial_state.to(addition.dtype)
    starts = []
    # unbind, as the gradient of indexing would be a tensor of all chunks for each chunk.
    for step, added in zip(transition.unbind(2), addition.unbind(2), strict=True):
        starts.append(state)
        state = step @ state + added
    return torch.stack(starts, 2), state
