"""Parts of the diffusion transformer (DiT, arXiv 2212.09748): patches, transformer block, last layer.

B batch, C latent channels, N tokens, D width, F frames of tokens with times of their own, 1 where they share one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from headmix_vision.layers import HeadMixAttention
from headmix_vision.layers.convolutions import PatchConv2d, PatchConv3d
from headmix_vision.layers.positions import Rotation


class PatchEmbedding(nn.Module):
    """Projection of non-overlapping patches: [B, C, *sizes] -> [B, N, D] in raster order, contiguous."""

    def __init__(self, patch: tuple[int, ...], in_channels: int, dim: int, **factory: Any) -> None:
        super().__init__()
        convolution = PatchConv2d if len(patch) == 2 else PatchConv3d
        self.proj = convolution(in_channels, dim, cast(Any, patch), cast(Any, patch), **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class DiTBlock(nn.Module):
    """Transformer block: attention and MLP, modulated by a condition (adaLN-Zero).

    Shape:
        ``x`` [B, N, D] and ``c`` [B, D], or [B, F, D] for F parts of N / F consecutive tokens -> [B, N, D].
    """

    def __init__(self, dim: int, mlp_ratio: float, attention: HeadMixAttention, **factory: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        gelu = cast(Any, partial(nn.GELU, approximate="tanh"))
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=gelu, **factory)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim, **factory))

    def forward(
        self, hidden_states: Tensor, c: Tensor, grid: tuple[int, ...], rotation: Rotation | None = None
    ) -> Tensor:  # caches of diffusers look for the first name
        return self._run(hidden_states, c, partial(self.attn, grid=grid, rotation=rotation))

    def stream(
        self, x: Tensor, c: Tensor, grid: tuple[int, ...], rotation: Rotation | None, state: Any
    ) -> tuple[Tensor, Any]:
        """Run the next tokens of a grid; see :meth:`headmix_vision.layers.HeadMixAttention.stream`."""

        def attend(tokens: Tensor) -> Tensor:
            nonlocal state
            out, state = self.attn.stream(tokens, state, grid, rotation)
            return out

        return self._run(x, c, attend), state

    def _run(self, x: Tensor, c: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = _by_frame(self.adaLN_modulation(c)).chunk(6, dim=-1)
        x = x.unflatten(1, (shift_a.shape[1], -1))  # [B, F, N / F, D]
        attended = torch.addcmul(shift_a, self.norm1(x), 1 + scale_a).flatten(1, 2)
        x = x + gate_a * attend(attended).view_as(x)
        x = x + gate_m * self.mlp(torch.addcmul(shift_m, self.norm2(x), 1 + scale_m))
        return x.flatten(1, 2)


class FinalLayer(nn.Module):
    """Modulated norm and projection to patches: [B, N, D] and a condition -> [B, N, numbers of a patch]."""

    def __init__(self, dim: int, patch_numbers: int, **factory: Any) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(dim, patch_numbers, **factory)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim, **factory))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = _by_frame(self.adaLN_modulation(c)).chunk(2, dim=-1)
        x = x.unflatten(1, (shift.shape[1], -1))
        return self.linear(torch.addcmul(shift, self.norm_final(x), 1 + scale)).flatten(1, 2)


def _by_frame(modulation: Tensor) -> Tensor:
    """Reshape a modulation [B, D] or [B, F, D] to [B, F, 1, D], the axes of tokens by frame."""
    return modulation[:, None, None] if modulation.ndim == 2 else modulation[:, :, None]
