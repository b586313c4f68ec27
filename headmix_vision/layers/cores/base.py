"""What every attention core is built from and called with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError


class AttentionCore(nn.Module):
    """Base of the cores: what every core is built from and called with.

    Args:
        num_heads: H.
        grid: token grid, prefix tokens left out.
        block_grid: blocks along each axis of the grid; only block-wise cores read it.
        num_prefix_tokens: tokens in front of the grid.
        attn_drop: dropout on attention weights; only a core that forms them accepts more than 0.

    A core with ``reads_input`` is also built with ``dim``, the width C of the layer, and called with its input ``x``.

    Shape:
        ``q``, ``k`` [B, N, H, D], ``v`` [B, N, H, Dv] and ``x`` [B, N, C] in raster order -> [B, N, H, Dv]. ``grid``
        is the grid of this call, which a dynamic image size may change.
    """

    forms_weights = False
    reads_input = False

    def __init__(
        self,
        num_heads: int,
        grid: tuple[int, ...],
        block_grid: tuple[int, ...],
        num_prefix_tokens: int = 0,
        attn_drop: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if attn_drop and not self.forms_weights:
            raise InputError(f"attn_drop={attn_drop} needs the 'softmax' core: {type(self).__name__} forms no weights.")
        self.attn_drop = attn_drop

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: tuple[int, ...],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        x: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError

    def set_grid(self, grid: tuple[int, ...]) -> None:
        """Adopt another token grid; most cores do not depend on it."""


def refuse_masks(core: str, attn_mask: Tensor | None, is_causal: bool) -> None:
    """Raise InputError for a mask; a module that calls this needs ``torch.fx.wrap("refuse_masks")`` to be traced."""
    if attn_mask is not None or is_causal:
        raise InputError(f"attn_mask and is_causal need the 'softmax' core, not {core}.")
