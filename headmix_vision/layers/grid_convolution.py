"""Run depthwise convolutions on the token grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.fx
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers.bare_modules import is_bare
from headmix_vision.ops import TokenGrid, TokenRanks, grid_conv
from headmix_vision.ops.grid_conv.torch_impl import convolve_grid
from headmix_vision.ops.token_ranks import flatten_tokens, unflatten_tokens

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class GridConvolution(nn.Module):
    """Convolve the tokens depthwise on their grid.

    The convolution ``proj`` holds the weights, which :func:`headmix_vision.ops.grid_conv` applies; where it has hooks,
    an adapter, another ``forward``, or strides, dilations or a padding of its own, it is called.

    Args:
        dim: channels C.
        num_axes: axes of the token grid, 1 to 3.
        kernel_size: odd extent of the kernel along each axis.
        bias: add a bias.
        silu: return SiLU of the result, of prefix tokens too.
        impl: of :func:`headmix_vision.ops.grid_conv`.

    Shape:
        ``x`` [B, N, C] -> [B, N, C], for the N tokens of ``grid``. Prefix tokens are not convolved; each
        repeated place is convolved with the same place of other tokens. Equal parts of the channels, as a list in place
        of ``x``, are convolved to as many tensors, which copies nothing; there is no bias then.
    """

    residual: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        num_axes: int = 2,
        kernel_size: int = 3,
        bias: bool = True,
        silu: bool = False,
        impl: str = "auto",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.silu, self.impl = silu, impl
        conv, padding = CONVOLUTIONS[num_axes - 1], kernel_size // 2
        self.proj = conv(dim, dim, kernel_size, padding=padding, groups=dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor | Sequence[Tensor], grid: TokenGrid) -> Any:
        options: dict[str, Any] = {"residual": self.residual, "silu": self.silu, "impl": self.impl}
        if isinstance(x, (tuple, list)):
            count = range(len(x))  # torch.fx does not iterate over chunks
            if _is_plain(self.proj):
                assert self.proj.bias is None
                weights = self.proj.weight.chunk(len(x))
                return [_grid_conv(x[i], weights[i], None, grid, **options) for i in count]
            parts = _convolve(torch.cat(x, -1), self.proj, grid, **options).chunk(len(x), -1)
            return [parts[i] for i in count]
        return _convolve(cast(Tensor, x), self.proj, grid, **options)

    def of_rank(self, x: Tensor, grid: TokenGrid, ranks: TokenRanks) -> Tensor:
        """Convolve the tokens [B, n, C] of a rank, where several share a grid: [B, n, C].

        Neighbouring ranks send the tokens that the kernel reaches.

        Raises:
            InputError: if a rank has fewer places along the axis that is parted than the kernel reaches.
        """
        held, axis = ranks.local(grid), 1 + ranks.axis
        spans = [ranks.span(grid, rank) for rank in range(ranks.size)]
        fewest = min(end - first for first, end in spans)
        reach = cast(nn.Conv2d, self.proj).kernel_size[ranks.axis] // 2
        if fewest < reach:
            raise InputError(
                f"{grid} over {ranks.size} ranks: one has {fewest} tokens along axis {ranks.axis}, the kernel reaches"
                f" {reach}."
            )
        prefix, places = unflatten_tokens(x, held, 1)
        wide = ranks.exchange_edges(places, reach, axis)
        wide_grid = replace(held, shape=tuple(wide.shape[1:-2]))
        prefix, out = unflatten_tokens(self(flatten_tokens(prefix, wide, 1), wide_grid), wide_grid, 1)
        return flatten_tokens(prefix, out.narrow(axis, reach * (ranks.rank > 0), places.shape[axis]), 1)

    def flops(self, grid: TokenGrid) -> int:
        """Return the operations for the tokens of one image, multiply and add as two."""
        weights = sum(weight.numel() for name, weight in self.named_parameters() if name.endswith("weight"))
        return 2 * grid.repeats * grid.num_grid_tokens * weights


def _is_plain(conv: nn.Module) -> bool:
    """Return whether a convolution is its weight and bias alone, with zeros around the grid."""
    if not is_bare(conv, *CONVOLUTIONS):
        return False
    options = cast(nn.Conv2d, conv)
    centred = options.padding == tuple(extent // 2 for extent in options.kernel_size)
    return centred and options.padding_mode == "zeros" and {*options.stride, *options.dilation} == {1}


def _convolve(
    x: Tensor, conv: nn.Module, grid: TokenGrid, residual: bool = False, silu: bool = False, impl: str = "auto"
) -> Tensor:
    if _is_plain(conv):
        return _grid_conv(x, cast(Tensor, conv.weight), cast("Tensor | None", conv.bias), grid, residual, silu, impl)
    return convolve_grid(x, conv, grid, residual, silu)


@torch.fx.wrap  # torch.fx records the call whole: the checks inside need real arguments
def _grid_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: TokenGrid, residual: bool, silu: bool, impl: str
) -> Tensor:
    x = x if residual else in_autocast_type(x)  # what a residual adds keeps its digits
    return grid_conv(x, weight, bias, grid=grid, residual=residual, silu=silu, impl=impl)


def in_autocast_type(x: Tensor) -> Tensor:
    """Round float32 on a GPU as convolutions and matrix products do under autocast."""
    if x.is_cuda and x.dtype is torch.float32 and torch.is_autocast_enabled("cuda"):
        return x.to(torch.get_autocast_dtype("cuda"))
    return x


class ConvPositionEncoding(GridConvolution):
    """Add to tokens their depthwise convolution on the grid: conditional positional encoding (arXiv 2102.10882)."""

    residual = True


class FactorisedPositionEncoding(ConvPositionEncoding):
    """Convolve the frames of a clip by 3 x 3 tokens and the result by 3 along time: 12 weights a channel, not 27.

    The convolution along time starts as the identity.

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

    @property
    def reach(self) -> int:
        return self.time.kernel_size[0] // 2

    def forward(self, x: Any, grid: TokenGrid) -> Any:
        T, H, W = grid.shape
        first = grid.repeats * grid.num_prefix_tokens
        tokens = x[:, first:]
        frames = tokens.unflatten(1, (T, -1)).flatten(0, 1)
        convolved = _convolve(frames, self.proj, TokenGrid((H, W), 0, grid.repeats))
        clips = convolved.unflatten(0, (-1, T)).flatten(1, 2)
        tokens = tokens + _convolve(clips, self.time, TokenGrid((T, H * W), 0, grid.repeats))
        return torch.cat([x[:, :first], tokens], 1) if first else tokens


POSITION_ENCODINGS: dict[bool | str, type[ConvPositionEncoding]] = {
    True: ConvPositionEncoding,
    "factorised": FactorisedPositionEncoding,
}
