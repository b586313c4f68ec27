"""Computes multi-head linear attention over token blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headmix_vision.checks import check_flags
from headmix_vision.layers.block_mixing import MixingMatrix, mixing_of_first
from headmix_vision.layers.cores.base import CORES
from headmix_vision.layers.cores.linear import LinearCore, per_token, rotated_mhla
from headmix_vision.layers.positions import Rotation
from headmix_vision.layers.spec import LayerSpec
from headmix_vision.ops import TokenBlocks, TokenGrid, TokenRanks, mhla


@CORES.register("mhla")
class MHLACore(LinearCore):
    """Computes multi-head linear attention (arXiv 2601.07832): linear attention whose block memories are mixed.

    A clip of fewer frames than there are blocks along time has a block for each frame, mixed as the first blocks are.

    Args:
        spec: sizes of the layer, with the blocks along each axis of the grid.
        mixing_init, mixing_trainable: ``init`` and ``trainable`` of :class:`~headmix_vision.layers.MixingMatrix`.
        mixing_per_head: a mixing matrix for each head instead of one for all.
        options: ``normalizer``, ``feature_map``, ``eps`` and ``impl`` of :func:`headmix_vision.ops.mhla`.

    Raises:
        InputError: if the blocks do not fit the grid, or an option is unknown.
    """

    def __init__(
        self,
        spec: LayerSpec,
        mixing_init: str = "locality",
        mixing_trainable: bool = True,
        mixing_per_head: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        check_flags(mixing_trainable=mixing_trainable, mixing_per_head=mixing_per_head)
        heads = spec.num_heads if mixing_per_head else None
        blocks = TokenBlocks(spec.grid, spec.block_grid)
        self.mixing = MixingMatrix(blocks, heads, mixing_init, mixing_trainable, **spec.factory)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        *,
        rotation: Rotation | None = None,
        ranks: TokenRanks | None = None,
    ) -> Tensor:
        return _mhla(q, k, v, self.mixing(), grid, self.mixing.blocks.block_grid, rotation, ranks, self.options)

    def flops(self, grid: TokenGrid) -> int:
        """Count linear attention, and the mixing of the memories of all blocks."""
        return super().flops(grid) + 2 * self.num_heads * self.mixing.blocks.num_blocks**2 * self._memory

    def set_grid(self, grid: TokenGrid) -> None:
        """Adopt another token grid: blocks change their size, their number stays."""
        self.mixing.set_blocks(TokenBlocks(grid, self.mixing.blocks.block_grid))

    def set_block_grid(self, block_grid: tuple[int, ...]) -> None:
        """Cut the token grid into other blocks, resampling the mixing matrix."""
        self.mixing.set_blocks(TokenBlocks(self.mixing.blocks.grid, block_grid))


@torch.fx.wrap  # torch.fx records the call whole: the checks inside need real arguments
def _mhla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    grid: TokenGrid,
    block_grid: tuple[int, ...],
    rotation: Rotation | None,
    ranks: TokenRanks | None,
    options: dict[str, Any],
) -> Tensor:
    blocks = TokenBlocks.of_clip(grid, block_grid)
    mixing = per_token(mixing_of_first(mixing, blocks), grid, options)
    if ranks is not None:
        blocks = blocks.of_rank(ranks)
    if rotation is not None:
        return rotated_mhla(q, k, v, mixing, blocks, rotation, grid, **options)
    return mhla(q, k, v, mixing, blocks, **options)
