"""Computes linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headmix_vision.checks import check_numbers
from headmix_vision.errors import InputError
from headmix_vision.layers.cores.base import CORES, AttentionCore
from headmix_vision.layers.positions import Rotation, rotate
from headmix_vision.layers.spec import LayerSpec
from headmix_vision.ops import TokenBlocks, TokenGrid, TokenRanks, mhla
from headmix_vision.ops.mhla.api import check_options
from headmix_vision.ops.mhla.settings import apply_feature_map
from headmix_vision.ops.runtime import accumulation_dtype
from headmix_vision.ops.token_blocks import BlocksOfRank


@CORES.register("linear")
class LinearCore(AttentionCore):
    """Computes linear attention (Katharopoulos et al., 2020): MHLA with all tokens, prefix included, in one block.

    Args:
        spec: sizes of the layer.
        normalizer, feature_map, eps, impl: of :func:`headmix_vision.ops.mhla`.

    Raises:
        InputError: if an option is unknown, or ``eps`` is negative or not finite.
    """

    def __init__(
        self,
        spec: LayerSpec,
        normalizer: str | None = "paper",
        feature_map: str = "relu",
        eps: float = 1e-6,
        impl: str = "auto",
    ) -> None:
        super().__init__(spec)
        check_options(normalizer, feature_map, impl)
        check_numbers(0, eps=eps)
        self.options: dict[str, Any] = {
            "normalizer": normalizer,
            "feature_map": feature_map,
            "eps": eps,
            "impl": impl,
        }

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
        return _linear_attention(q, k, v, grid, rotation, ranks, self.options)

    def check_rotation(self) -> None:
        """Refuse rotary positions beside the normalizer of the released code, which has no rotated form."""
        if self.options["normalizer"] == "source_block":
            raise InputError("rotary positions need the normalizer 'paper' or None, not 'source_block'.")

    def check_ranks(self) -> None:
        """Refuse causal attention, and the normalizer of the released code, which takes queries of all blocks."""
        if self.options.get("causal"):
            raise InputError("causal attention needs all tokens on one rank.")
        if self.options["normalizer"] == "source_block":
            raise InputError("tokens on several ranks need the normalizer 'paper' or None, not 'source_block'.")

    def flops(self, grid: TokenGrid) -> int:
        """Count each token's part of the memory and its query of it, with their normaliser."""
        return 4 * self.num_heads * grid.num_tokens * self._memory

    @property
    def _memory(self) -> int:
        """Numbers in the memory of a head: D x D, and D of the normaliser."""
        return self.head_dim * (self.head_dim + (self.options["normalizer"] is not None))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


@torch.fx.wrap  # torch.fx records the call whole: the checks inside need real arguments
def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: TokenGrid,
    rotation: Rotation | None,
    ranks: TokenRanks | None,
    options: dict[str, Any],
) -> Tensor:
    blocks = TokenBlocks.from_grid((q.shape[1],), (1,))
    if ranks is not None:  # prefix tokens have to be a block of their own
        blocks = TokenBlocks(grid, (1,) * len(grid.shape))
    mixing = per_token(q.new_ones(blocks.num_blocks, blocks.num_blocks), grid, options)
    if ranks is not None:
        blocks = blocks.of_rank(ranks)
    if rotation is not None:
        return rotated_mhla(q, k, v, mixing, blocks, rotation, grid, **options)
    return mhla(q, k, v, mixing, blocks, **options)


def rotated_mhla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    blocks: TokenBlocks,
    rotation: Rotation,
    grid: TokenGrid,
    *,
    normalizer: str | None,
    feature_map: str,
    eps: float,
    attend: Callable[..., Tensor] = mhla,
    **options: Any,
) -> Tensor:
    """Compute :func:`headmix_vision.ops.mhla` with features rotated in the numerator, not in the denominator.

    ``attend`` takes the place of ``mhla``, with its arguments. Rotated features may be negative: a denominator of them
    could be zero. In types below float32 both sums are rounded before they are divided.
    """
    q, k = (apply_feature_map(y.to(accumulation_dtype(y.dtype)), feature_map, eps) for y in (q, k))
    if normalizer is not None:  # cancels, and keeps sums within the range of float16
        mixing = mixing / TokenBlocks(blocks.grid, blocks.block_grid).max_block_size
    grid = blocks.held if isinstance(blocks, BlocksOfRank) else grid

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plain = {"normalizer": None, "feature_map": "identity", **options}
        return attend(q.type_as(v), k.type_as(v), v, mixing, blocks, **plain)

    out = mix(rotate(q, rotation, grid), rotate(k, rotation, grid), v)
    return out if normalizer is None else out / mix(q, k, v.new_ones(*v.shape[:3], 1))


def per_token(mixing: Tensor, grid: TokenGrid, options: dict[str, Any]) -> Tensor:
    """Weigh the places of a token as one: outputs do not grow with the repeats, nor denominators against ``eps``."""
    return mixing if options["normalizer"] == "paper" or grid.repeats == 1 else mixing / grid.repeats
