"""Masks of the padding in a batch.

B batch, N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.ops import SampleGrids
from headmix_vision.ops.dispatch import values_are_at_hand


def is_of_keys(attn_mask: Tensor, x: Tensor) -> bool:
    """Return whether an attention mask has one row for all queries and heads, [B or 1, 1, 1, N]."""
    if attn_mask.ndim != 4 or attn_mask.shape[0] not in (1, x.shape[0]):
        return False
    return attn_mask.shape[1:3] == (1, 1) and attn_mask.shape[3] == x.shape[1]


def join_key_masks(
    x: Tensor, key_mask: Tensor | None, of_keys: Tensor | None, samples: SampleGrids | None, num_prefix_tokens: int
) -> Tensor | None:
    """Return where all masks that are given have real tokens: bool [B, N], or None without any.

    Args:
        x: tokens [B, N, C].
        key_mask: bool [B, N].
        of_keys: attention mask of keys (:func:`is_of_keys`), bool, or 0 for real tokens and ``-inf`` or the smallest
            number of its type for padding.
        samples: grids of the samples.
        num_prefix_tokens: tokens in front of these grids.

    Raises:
        InputError: if a mask does not fit ``x``, and, on the CPU alone, if ``of_keys`` has other numbers or a sample
            has no real token: elsewhere reading them would hold up every call.
    """
    masks = [
        None if key_mask is None else _fitting(key_mask, x, "key_mask"),
        None if of_keys is None else _fitting(_as_key_mask(of_keys).expand(x.shape[0], -1), x, "attn_mask"),
        None if samples is None else _fitting(samples.mask(num_prefix_tokens), x, "the mask of samples and prefix"),
    ]
    joined: Tensor | None = None
    for mask in masks:
        if mask is not None:
            joined = mask if joined is None else joined & mask
    if joined is not None and values_are_at_hand(joined) and not joined.any(1).all():
        sample = int(joined.any(1).int().argmin())
        raise InputError(f"sample {sample} of the batch has no token: its mask is False everywhere. Leave it out.")
    return joined


def mask_with_grids(grids: SampleGrids, num_prefix_tokens: int, dtype: torch.dtype) -> Tensor:
    """Make a mask of keys to add to scores, [B, 1, 1, N], which carries the grids of the samples to swapped layers."""
    real = grids.mask(num_prefix_tokens)[:, None, None]
    mask = torch.zeros_like(real, dtype=dtype).masked_fill(~real, torch.finfo(dtype).min)
    mask.sample_grids = grids  # type: ignore[attr-defined]
    return mask


def grids_of(attn_mask: Tensor | None) -> SampleGrids | None:
    """Return the grids that a mask carries, or None."""
    grids = getattr(attn_mask, "sample_grids", None)
    return grids if isinstance(grids, SampleGrids) else None


def _as_key_mask(of_keys: Tensor) -> Tensor:
    mask = of_keys[:, 0, 0]
    if not mask.is_floating_point():
        return mask
    real = mask == 0
    if values_are_at_hand(mask) and not (real | (mask <= torch.finfo(mask.dtype).min)).all():
        raise InputError(
            "an attn_mask [B, 1, 1, N] must hold 0 for real tokens and -inf or the smallest number for padding in a"
            " layer that has no scores to add it to."
        )
    return real


def _fitting(mask: Tensor, x: Tensor, name: str) -> Tensor:
    if mask.dtype != torch.bool or mask.shape != x.shape[:2] or mask.device != x.device:
        raise InputError(
            f"{name} must be bool [B, N] = {list(x.shape[:2])} on {x.device}, True for real tokens: got {mask.dtype}"
            f" {list(mask.shape)} on {mask.device}."
        )
    return mask
