"""Attention cores: the function from queries, keys and values to head outputs.

A new core is a subclass of :class:`AttentionCore`, here or in a file of its own, and a line in ``CORES``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.layers.block_mixing import MixingMatrix
from headmix_vision.layers.cores.base import AttentionCore, refuse_masks
from headmix_vision.layers.cores.head_in_head import HeadInHeadCore
from headmix_vision.ops import TokenBlocks, mhla

torch.fx.wrap("refuse_masks")  # recorded whole, as the functions below


class SoftmaxCore(AttentionCore):
    """Scaled dot-product attention."""

    forms_weights = True

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
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        dropout = self.attn_drop if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        return out.transpose(1, 2)


class LinearCore(AttentionCore):
    """Linear attention (Katharopoulos et al., 2020): MHLA with all tokens, prefix included, in one block.

    Further arguments: ``normalizer``, ``feature_map``, ``eps`` and ``impl`` of :func:`headmix_vision.ops.mhla`.
    """

    def __init__(
        self,
        num_heads: int,
        grid: tuple[int, ...],
        block_grid: tuple[int, ...],
        num_prefix_tokens: int = 0,
        attn_drop: float = 0.0,
        normalizer: str | None = "paper",
        feature_map: str = "relu",
        eps: float = 1e-6,
        impl: str = "auto",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, grid, block_grid, num_prefix_tokens, attn_drop)
        self.normalizer, self.feature_map, self.eps, self.impl = normalizer, feature_map, eps, impl

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
        refuse_masks(type(self).__name__, attn_mask, is_causal)
        return _linear_attention(q, k, v, self.normalizer, self.feature_map, self.eps, self.impl)


class MHLACore(LinearCore):
    """Multi-head linear attention over token blocks (arXiv 2601.07832).

    Further arguments: ``normalizer``, ``feature_map``, ``eps`` and ``impl`` of :func:`headmix_vision.ops.mhla`;
    ``mixing_init``, ``mixing_trainable`` and ``mixing_per_head`` for its :class:`~headmix_vision.layers.MixingMatrix`.
    """

    def __init__(
        self,
        num_heads: int,
        grid: tuple[int, ...],
        block_grid: tuple[int, ...],
        num_prefix_tokens: int = 0,
        attn_drop: float = 0.0,
        normalizer: str | None = "paper",
        feature_map: str = "relu",
        eps: float = 1e-6,
        impl: str = "auto",
        mixing_init: str = "locality",
        mixing_trainable: bool = True,
        mixing_per_head: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, grid, block_grid, num_prefix_tokens, attn_drop, normalizer, feature_map, eps, impl)
        blocks = TokenBlocks.from_grid(grid, block_grid, num_prefix_tokens)
        heads = num_heads if mixing_per_head else None
        self.mixing = MixingMatrix(blocks, heads, mixing_init, mixing_trainable, device=device, dtype=dtype)

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
        refuse_masks(type(self).__name__, attn_mask, is_causal)
        blocks = self.mixing.blocks
        return _mhla(
            *(q, k, v, self.mixing(), grid, blocks.block_grid, blocks.num_prefix_tokens),
            *(self.normalizer, self.feature_map, self.eps, self.impl),
        )

    def set_grid(self, grid: tuple[int, ...]) -> None:
        blocks = self.mixing.blocks
        self.mixing.set_blocks(TokenBlocks.from_grid(grid, blocks.block_grid, blocks.num_prefix_tokens))

    def set_block_grid(self, block_grid: tuple[int, ...]) -> None:
        """Cut the token grid into other blocks, resampling the mixing matrix."""
        blocks = self.mixing.blocks
        self.mixing.set_blocks(TokenBlocks.from_grid(blocks.grid, block_grid, blocks.num_prefix_tokens))


CORES: dict[str, type[AttentionCore]] = {
    "softmax": SoftmaxCore,
    "linear": LinearCore,
    "mhla": MHLACore,
    "hih": HeadInHeadCore,
}
# Options of the layer which the models of a core have on unless told otherwise.
LAYER_OPTIONS: dict[str, dict[str, bool]] = {"hih": {"output_norm": True}}


# torch.fx records these calls whole: the checks inside need real arguments.
@torch.fx.wrap
def _mhla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    grid: tuple[int, ...],
    block_grid: tuple[int, ...],
    num_prefix_tokens: int,
    normalizer: str | None,
    feature_map: str,
    eps: float,
    impl: str,
) -> Tensor:
    blocks = TokenBlocks.from_grid(grid, block_grid, num_prefix_tokens)
    return mhla(q, k, v, mixing, blocks, normalizer=normalizer, feature_map=feature_map, eps=eps, impl=impl)


@torch.fx.wrap
def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, normalizer: str | None, feature_map: str, eps: float, impl: str
) -> Tensor:
    blocks = TokenBlocks.from_grid((q.shape[1],), (1,))
    one = q.new_ones(1, 1)
    return mhla(q, k, v, one, blocks, normalizer=normalizer, feature_map=feature_map, eps=eps, impl=impl)
