"""Computes multi-head linear attention over token blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headmix_vision.checks import check_flags
from headmix_vision.errors import InputError
from headmix_vision.layers.block_mixing import MixingMatrix, mixing_of_first
from headmix_vision.layers.cores.base import CORES
from headmix_vision.layers.cores.linear import LinearCore, per_token, rotated_mhla
from headmix_vision.layers.positions import Rotation
from headmix_vision.layers.spec import LayerSpec
from headmix_vision.ops import MHLAState, TokenBlocks, TokenGrid, TokenRanks, mhla, mhla_step


@CORES.register("mhla")
class MHLACore(LinearCore):
    """Computes multi-head linear attention (arXiv 2601.07832): linear attention whose block memories are mixed.

    A clip of fewer frames than there are blocks along time has a block for each frame, mixed as the first blocks are.

    Args:
        spec: sizes of the layer, with the blocks along each axis of the grid.
        mixing_init, mixing_trainable: ``init`` and ``trainable`` of :class:`~headmix_vision.layers.MixingMatrix`.
        mixing_per_head: a mixing matrix for each head instead of one for all.
        causal: tokens see themselves and those before them in the order of the blocks, so that no row of blocks along
            the first axis, time in a clip, sees a later one. Prefix tokens see prefix tokens alone.
        options: ``normalizer``, ``feature_map``, ``eps`` and ``impl`` of :func:`headmix_vision.ops.mhla`.

    Raises:
        InputError: if the blocks do not fit the grid, an option is unknown, or ``causal`` meets a head mix that makes
            several places of a token.
    """

    def __init__(
        self,
        spec: LayerSpec,
        mixing_init: str = "locality",
        mixing_trainable: bool = True,
        mixing_per_head: bool = False,
        causal: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        check_flags(mixing_trainable=mixing_trainable, mixing_per_head=mixing_per_head, causal=causal)
        if causal and spec.grid.repeats > 1:
            raise InputError(
                f"causal=True cannot be joined with a head mix that makes {spec.grid.repeats} places of a token:"
                " places of one token would not see each other."
            )
        self.causal = self.options["causal"] = causal
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

    def stream(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        state: tuple[MHLAState, ...] | None = None,
        *,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, tuple[MHLAState, ...]]:
        """Compute the next rows of blocks along the first axis, as ``forward`` of the whole grid does.

        Prefix tokens come with the first of them. The state is that of the op; with rotary positions and a normalizer
        that of the denominators stands beside it.
        """
        if not self.causal:
            return super().stream(q, k, v, grid, state, rotation=rotation)
        blocks = TokenBlocks.of_clip(grid, self.mixing.blocks.block_grid)
        first = 0 if state is None else state[0].num_tokens
        _check_rows(blocks, first, q.shape[1])
        part = blocks.order(q)[first : first + q.shape[1]] - first
        back, before, after = part.argsort(), iter(state or (None, None)), []

        def attend(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, blocks: TokenBlocks, **options: Any) -> Tensor:
            out, new = mhla_step(q[:, part], k[:, part], v[:, part], mixing, blocks, next(before), **options)
            after.append(new)
            return out[:, back]

        mixing = mixing_of_first(self.mixing(), blocks)
        options = {name: value for name, value in self.options.items() if name not in ("impl", "causal")}
        if rotation is None:
            return attend(q, k, v, mixing, blocks, **options), tuple(after)
        prefix = grid.num_prefix_tokens
        piece = TokenGrid((q.shape[1] - (0 if first else prefix),), 0 if first else prefix)
        cos, sin = (table[max(first - prefix, 0) : first + q.shape[1] - prefix] for table in rotation)
        out = rotated_mhla(q, k, v, mixing, blocks, (cos, sin), piece, attend=attend, **options)
        return out, tuple(after)

    def flops(self, grid: TokenGrid) -> int:
        """Count linear attention, and the mixing of the memories of all blocks.

        Causal queries read the memory of their own block apart from that of the blocks before, which alone are mixed.
        """
        blocks = self.mixing.blocks.num_blocks
        pairs, again = (blocks * (blocks - 1) // 2, grid.num_tokens) if self.causal else (blocks**2, 0)
        return super().flops(grid) + 2 * self.num_heads * (pairs + again) * self._memory

    def set_grid(self, grid: TokenGrid) -> None:
        """Adopt another token grid: blocks change their size, their number stays."""
        self.mixing.set_blocks(TokenBlocks(grid, self.mixing.blocks.block_grid))

    def set_block_grid(self, block_grid: tuple[int, ...]) -> None:
        """Cut the token grid into other blocks, resampling the mixing matrix."""
        self.mixing.set_blocks(TokenBlocks(self.mixing.blocks.grid, block_grid))


def _check_rows(blocks: TokenBlocks, first: int, count: int) -> None:
    if not count or first + count not in blocks.row_ends:
        row, prefix = math.prod(blocks.grid.shape[1:]), blocks.grid.num_prefix_tokens
        ends = ", ".join(str((end - prefix) // row) for end in blocks.row_ends)
        raise InputError(
            f"pieces of {blocks.grid} must end with its rows of blocks, after {ends} of {blocks.grid.shape[0]} on the"
            f" first axis: {count} tokens after {first} do not."
        )


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
