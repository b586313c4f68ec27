"""Runs depthwise convolutions on the token grid."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.ops import TokenGrid

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class GridConvolution(nn.Module):
    """Convolves the tokens depthwise on their grid.

    Args:
        dim: channels C.
        num_axes: axes of the token grid, 1 to 3.
        kernel_size: odd extent of the kernel along each axis.
        bias: add a bias.

    Shape:
        ``x`` [B, N, C] -> [B, N, C], for the N tokens of ``grid``. Prefix tokens pass unchanged; each
        repeated place is convolved with the same place of other tokens.
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

    def forward(self, x: Tensor, grid: TokenGrid) -> Tensor:
        repeats, num_prefix_places = grid.repeats, grid.num_prefix_tokens * grid.repeats
        prefix, tokens = x[:, :num_prefix_places], x[:, num_prefix_places:]
        if repeats > 1:  # give each place a grid of its own
            tokens = tokens.unflatten(1, (-1, repeats)).transpose(1, 2).flatten(0, 1)
        tokens = self.combine(tokens, self.convolve(tokens, grid.shape))
        if repeats > 1:
            tokens = tokens.unflatten(0, (-1, repeats)).transpose(1, 2).flatten(1, 2)
        return torch.cat([prefix, tokens], dim=1) if num_prefix_places else tokens

    def convolve(self, tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Convolve the tokens [B, N, C] of a grid alone."""
        return self.proj(tokens.transpose(1, 2).unflatten(2, shape)).flatten(2).transpose(1, 2)

    def flops(self, grid: TokenGrid) -> int:
        """Return the operations for the tokens of one image, multiply and add as two."""
        weights = sum(weight.numel() for name, weight in self.named_parameters() if name.endswith("weight"))
        return 2 * grid.repeats * grid.num_grid_tokens * weights

    def combine(self, tokens: Tensor, convolved: Tensor) -> Tensor:
        """Return the result for the tokens of the grid: here their convolution alone."""
        return convolved


class ConvPositionEncoding(GridConvolution):
    """Adds to tokens their depthwise convolution on the grid: conditional positional encoding (arXiv 2102.10882)."""

    def combine(self, tokens: Tensor, convolved: Tensor) -> Tensor:
        return tokens + convolved


class FactorisedPositionEncoding(ConvPositionEncoding):
    """Convolves the frames of a clip by 3 x 3 tokens and the result by 3 along time: 12 weights a channel, not 27.

    Tokens in raster order are images in channels-last format, which neither convolution copies. The convolution along
    time starts as the identity.

    Raises:
        InputError: if the grid has no time axis.
    """

    def __init__(self, dim: int, num_axes: int = 3, **factory: Any) -> None:
        if num_axes != 3:
            raise InputError(f"cpe='factorised' needs a grid of three axes, time first, got {num_axes}.")
        super().__init__(dim, 2, **factory)
        self.time = nn.Conv2d(dim, dim, (3, 1), padding=(1, 0), groups=dim, **factory)
        with torch.no_grad():
            nn.init.zeros_(self.time.weight)[:, :, 1] = 1
            nn.init.zeros_(cast(Tensor, self.time.bias))

    def convolve(self, tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
        frames, height, width = shape
        images = tokens.unflatten(1, shape).flatten(0, 1).permute(0, 3, 1, 2)  # [B T, C, H, W]
        places = self.proj(images).permute(0, 2, 3, 1).reshape(-1, frames, height * width, tokens.shape[2])
        return self.time(places.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)


POSITION_ENCODINGS: dict[bool | str, type[ConvPositionEncoding]] = {
    True: ConvPositionEncoding,
    "factorised": FactorisedPositionEncoding,
}
