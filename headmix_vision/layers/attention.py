"""The attention layer of every model: project, mix heads, core, norm and gate, project.

B batch, N tokens, C width, H heads, D = C / H head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers.cores import CORES
from headmix_vision.layers.grid_convolution import ConvPositionEncoding
from headmix_vision.layers.head_mixes import HEAD_MIXES


class HeadMixAttention(nn.Module):
    """Self-attention over a token grid with a choice of core and head mix; parameter names follow timm's Attention.

    Args:
        dim: width C.
        num_heads: H, a divisor of ``dim``.
        core: ``"softmax"``, ``"linear"``, ``"mhla"`` or ``"hih"``.
        head_mix: mix across feature heads before the core, or None.
        grid: token grid, (H, W) or (T, H, W), prefix tokens left out.
        block_grid: blocks along each axis, for block-wise cores. It stays fixed when the grid changes.
        num_prefix_tokens: class and register tokens in front of the grid.
        core_args: further arguments of the core, such as ``normalizer`` or ``mixing_init`` for ``"mhla"``.
        qk_norm: RMSNorm of queries and keys over the full width.
        cpe: depthwise 3x3 convolutional positional encoding of the input.
        output_norm: RMSNorm of each head's output.
        output_gate: multiply the output by SiLU of a projection of the input, as in GLA.
        qkv_bias, proj_bias, scale_norm, attn_drop, proj_drop, norm_layer: as in timm's Attention.

    Shape:
        ``x`` [B, N, C] -> [B, N, C], tokens in raster order, prefix first. ``grid`` is another token grid for this
        call alone.

    Raises:
        InputError: for an unknown core or head mix, heads not dividing the width, or blocks not fitting the grid.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        core: str = "mhla",
        head_mix: str | None = None,
        grid: tuple[int, ...] = (14, 14),
        block_grid: tuple[int, ...] = (4, 4),
        num_prefix_tokens: int = 0,
        core_args: dict[str, Any] | None = None,
        qk_norm: bool = False,
        cpe: bool = False,
        output_norm: bool = False,
        output_gate: bool = False,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        scale_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise InputError(f"num_heads={num_heads} does not divide the width dim={dim}.")
        if core not in CORES:
            raise InputError(f"core must be one of {tuple(CORES)}, got {core!r}.")
        if head_mix is not None and head_mix not in HEAD_MIXES:
            raise InputError(f"head_mix must be None or one of {tuple(HEAD_MIXES)}, got {head_mix!r}.")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        head_dim = dim // num_heads
        self.num_heads, self.head_dim, self.num_prefix_tokens = num_heads, head_dim, num_prefix_tokens
        self.grid = tuple(grid)

        self.cpe = ConvPositionEncoding(dim, len(self.grid), **factory) if cpe else None
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.q_norm = nn.RMSNorm(dim, eps=1e-6, **factory) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(dim, eps=1e-6, **factory) if qk_norm else nn.Identity()
        self.head_mix = HEAD_MIXES[head_mix](num_heads, **factory) if head_mix else None
        needed: dict[str, Any] = {"dim": dim} if CORES[core].reads_input else {}
        self.core = CORES[core](
            num_heads,
            self.grid,
            tuple(block_grid),
            num_prefix_tokens,
            attn_drop=attn_drop,
            **factory,
            **needed,
            **(core_args or {}),
        )
        self.output_norm = nn.RMSNorm(head_dim, eps=1e-6, **factory) if output_norm else nn.Identity()
        self.gate = nn.Linear(dim, dim, bias=False, **factory) if output_gate else None
        self.norm = (norm_layer or nn.LayerNorm)(dim, **factory) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def set_grid(self, grid: tuple[int, ...]) -> None:
        """Use another token grid; weights are untouched."""
        self.core.set_grid(tuple(grid))
        self.grid = tuple(grid)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, ...] | None = None,
    ) -> Tensor:
        grid = self.grid if grid is None else grid
        _check_tokens(x, grid, self.num_prefix_tokens)
        if self.cpe is not None:
            x = self.cpe(x, grid, self.num_prefix_tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (self.num_heads, self.head_dim)) for y in (q, k, v))
        if self.head_mix is not None:
            q, k, v = self.head_mix(q, k, v)
        out = self.core(q, k, v, grid, attn_mask, is_causal, x if self.core.reads_input else None)
        out = self.output_norm(out).flatten(2)
        if self.gate is not None:
            out = out * F.silu(self.gate(x))
        return self.proj_drop(self.proj(self.norm(out)))


@torch.fx.wrap
def _check_tokens(x: Tensor, grid: tuple[int, ...], num_prefix_tokens: int) -> None:
    expected = num_prefix_tokens + math.prod(grid)
    if x.shape[1] != expected:
        shape = "x".join(map(str, grid))
        raise InputError(
            f"{x.shape[1]} tokens given, but the layer expects {expected}: "
            f"{num_prefix_tokens} prefix tokens and a {shape} grid."
        )
