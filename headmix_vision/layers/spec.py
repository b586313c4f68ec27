"""Sizes of an attention layer, for its core and its head mix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headmix_vision.ops import TokenGrid


@dataclass(frozen=True)
class LayerSpec:
    """The sizes of an attention layer, from which its head mix and its core are built.

    Args:
        dim: C, the width of the layer's input.
        num_heads: H, the heads that the module gets.
        head_dim: D.
        grid: the tokens that it gets, prefix tokens and repeats included.
        block_grid: blocks along each axis of the grid; only block-wise cores read it.
        attn_drop: dropout on attention weights; only a core that forms them accepts more than 0.
        averages_places: of the core, see :class:`~headmix_vision.layers.AttentionCore`.
        device, dtype: of the parameters.
    """

    dim: int
    num_heads: int
    head_dim: int
    grid: TokenGrid
    block_grid: tuple[int, ...]
    attn_drop: float = 0.0
    averages_places: bool = True
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    @property
    def factory(self) -> dict[str, Any]:
        """Device and type as keyword arguments of a module."""
        return {"device": self.device, "dtype": self.dtype}
