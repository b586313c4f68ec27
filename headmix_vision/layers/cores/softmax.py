"""Compute softmax attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.layers.cores.base import CORES, AttentionCore, LayerSpec
from headmix_vision.layers.positions import Rotation, rotate
from headmix_vision.ops import SampleGrids, TokenGrid, TokenWindow
from headmix_vision.ops.dispatch import kept


@CORES.register("softmax")
class SoftmaxCore(AttentionCore):
    """Compute scaled dot-product attention; PyTorch picks the kernel.

    Args:
        spec: sizes of the layer.
        window: None for attention to all tokens; an odd number of tokens along each axis, or one for each axis, for
            attention to the tokens around one alone (:class:`~headmix_vision.ops.TokenWindow`). It is a mask: the
            kernels of PyTorch compute all pairs, so a window changes what is learned and saves no time.

    Raises:
        InputError: if the window is even or larger than the grid, and, when called, for a mask beside a window.
    """

    forms_weights = True

    def __init__(self, spec: LayerSpec, window: int | tuple[int, ...] | None = None) -> None:
        super().__init__(spec)
        self.attn_drop = spec.attn_drop
        self.window = None if window is None else TokenWindow.of(spec.grid, window).extent

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        *,
        attn_mask: Tensor | None,
        is_causal: bool,
        rotation: Rotation | None = None,
        key_mask: Tensor | None = None,
        sample_grids: SampleGrids | None = None,
    ) -> Tensor:
        _check_mask(attn_mask, q)
        if rotation is not None:
            q, k = (rotate(y, rotation, grid).type_as(v) for y in (q, k))
        if self.window is not None:
            attn_mask = _window_mask(attn_mask, is_causal, grid, self.window, q)
        if key_mask is not None:
            attn_mask = _join_key_mask(attn_mask, is_causal, key_mask)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        dropout = self.attn_drop if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        out = out.transpose(1, 2)
        return out if key_mask is None else out.masked_fill(~key_mask[..., None, None], 0)

    def check_rotation(self) -> None:
        """Accept rotary positions, of queries and keys."""

    def check_padding(self, sample_grids: SampleGrids | None) -> None:
        """Refuse a window on grids that differ between samples."""
        if sample_grids is not None and self.window is not None:
            raise InputError(f"window={self.window} needs one grid for all samples of a batch.")

    def set_grid(self, grid: TokenGrid) -> None:
        """Adopt another token grid; a window must fit it."""
        if self.window is not None:
            TokenWindow(grid, self.window)

    def flops(self, grid: TokenGrid) -> int:
        """Count scores and outputs of the pairs of pseudo-tokens that see each other."""
        pairs = grid.num_tokens**2 if self.window is None else TokenWindow(grid, self.window).num_pairs
        return 4 * pairs * self.num_heads * self.head_dim

    def extra_repr(self) -> str:
        return "" if self.window is None else f"window={self.window}"


# torch.fx records these calls whole: checks need real arguments.
@torch.fx.wrap
def _window_mask(
    attn_mask: Tensor | None, is_causal: bool, grid: TokenGrid, extent: tuple[int, ...], like: Tensor
) -> Tensor:
    if attn_mask is not None or is_causal:
        raise InputError("attn_mask and is_causal cannot be joined with a window.")
    return _window(grid, extent).mask(like)


_window = kept(TokenWindow)


@torch.fx.wrap
def _join_key_mask(attn_mask: Tensor | None, is_causal: bool, key_mask: Tensor) -> Tensor:
    """Leave padding out of the keys of a mask, bool or added to scores."""
    if is_causal:
        raise InputError("is_causal cannot be joined with a key mask: give both in attn_mask.")
    keys = key_mask[:, None, None]
    if attn_mask is None:
        return keys
    return attn_mask & keys if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~keys, -torch.inf)


@torch.fx.wrap
def _check_mask(attn_mask: Tensor | None, q: Tensor) -> None:
    if attn_mask is None:
        return
    batch, tokens, heads, _ = q.shape
    pairs = zip(reversed(attn_mask.shape), (tokens, tokens, heads, batch), strict=False)
    if not 2 <= attn_mask.ndim <= 4 or any(size not in (1, whole) for size, whole in pairs):
        raise InputError(
            f"attn_mask must be [N, N] or [B, H, N, N] (each 1 or as given) with B, H, N = {(batch, heads, tokens)}, "
            f"got shape {tuple(attn_mask.shape)}."
        )
