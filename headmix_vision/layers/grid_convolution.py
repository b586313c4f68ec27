"""Convolutions and positional encodings on the token grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class GridConvolution(nn.Module):
    """Depthwise convolution of the tokens on their grid.

    Args:
        dim: channels C.
        num_axes: axes of the token grid, 1 to 3.
        kernel_size: odd extent of the kernel along each axis.
        bias: add a bias.

    Shape:
        ``x`` [B, N, C] -> [B, N, C]; the first ``num_prefix_tokens`` tokens pass unchanged.
    """

    def __init__(
        self,
        dim: int,
        num_axes: int = 2,
        kernel_size: int = 3,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        conv, padding = CONVOLUTIONS[num_axes - 1], kernel_size // 2
        self.proj = conv(dim, dim, kernel_size, padding=padding, groups=dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: tuple[int, ...], num_prefix_tokens: int = 0) -> Tensor:
        prefix, tokens = x[:, :num_prefix_tokens], x[:, num_prefix_tokens:]
        tokens = self.combine(tokens, self.proj(tokens.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2))
        return torch.cat([prefix, tokens], dim=1) if num_prefix_tokens else tokens

    def combine(self, tokens: Tensor, convolved: Tensor) -> Tensor:
        return convolved


class ConvPositionEncoding(GridConvolution):
    """Conditional positional encoding: tokens plus their depthwise convolution on the grid (arXiv 2102.10882)."""

    def combine(self, tokens: Tensor, convolved: Tensor) -> Tensor:
        return tokens + convolved
