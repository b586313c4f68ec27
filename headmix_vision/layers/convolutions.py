"""Run depthwise convolutions on the token grid, and convolutions of patches that do not overlap.

B batch, N tokens, C channels, D width, P numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.ops import SampleGrids, TokenGrid, TokenRanks
from headmix_vision.ops.grid_conv.api import bind_grid_conv
from headmix_vision.ops.grid_conv.torch_impl import convolve_grid
from headmix_vision.ops.token_ranks import SEQUENCE, flatten_tokens, unflatten_tokens

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
        if isinstance(x, (tuple, list)):
            return _convolve(x, self.proj, grid, self.residual, self.silu, self.impl)
        return _convolve([cast(Tensor, x)], self.proj, grid, self.residual, self.silu, self.impl)[0]

    def of_rank(self, x: Tensor, grid: TokenGrid, ranks: TokenRanks) -> Tensor:
        """Convolve the tokens [B, n, C] of a rank, where several share a grid: [B, n, C].

        Neighbouring ranks send the tokens that the kernel reaches.

        Raises:
            InputError: if a rank has fewer places along the axis that is parted than the kernel reaches, or tokens are
                parted within rows.
        """
        if ranks.axis == SEQUENCE:
            raise InputError("a convolution needs ranks that part an axis of the grid, not the sequence of tokens.")
        held, axis = ranks.local(grid), 1 + ranks.axis
        spans = [ranks.span(grid, rank) for rank in range(ranks.size)]
        fewest = min(end - first for first, end in spans)
        reach = self.reach(ranks.axis)
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

    def of_padded(
        self, x: Tensor | Sequence[Tensor], grid: TokenGrid, key_mask: Tensor, sample_grids: SampleGrids | None
    ) -> Any:
        """Convolve the tokens [B, N, C], or parts of their channels, of a batch with padding, which is read as zeros.

        Args:
            x: as in ``forward``.
            grid: the tokens; with ``sample_grids`` its prefix tokens and repeats alone are read.
            key_mask: bool [B, N], False for padding.
            sample_grids: the grid of each sample, without prefix tokens; None where all have ``grid``.

        Returns:
            As ``forward``, zeros for padding.
        """
        single = isinstance(x, Tensor)
        given: list[Any] = [x] if single else list(x)
        parts: list[Tensor] = [y.masked_fill(~key_mask[..., None], 0) for y in given]
        layout = None
        if sample_grids is not None:
            gaps = tuple([self.reach(axis) for axis in range(len(sample_grids.shapes[0]))])
            grid, layout = sample_grids.sheet(gaps, grid.num_prefix_tokens, grid.repeats)
            *parts, key_mask = layout.spread(*parts, key_mask)
        out = self._of_real(parts[0] if single else parts, grid, key_mask)
        parts = [out] if single else out
        parts = layout.collect(*parts) if layout else [y.masked_fill(~key_mask[..., None], 0) for y in parts]
        return parts[0] if single else parts

    def _of_real(self, x: Tensor | Sequence[Tensor], grid: TokenGrid, key_mask: Tensor) -> Any:
        """Convolve tokens that are zero where ``key_mask`` [B, N] is False."""
        return self(x, grid)

    def reach(self, axis: int) -> int:
        """Return how many tokens away the kernel reads along an axis."""
        return cast(nn.Conv2d, self.proj).kernel_size[axis] // 2

    def flops(self, grid: TokenGrid) -> int:
        """Return the operations for the tokens of one image, multiply and add as two."""
        weights = sum(weight.numel() for name, weight in self.named_parameters() if name.endswith("weight"))
        return 2 * grid.repeats * grid.num_grid_tokens * weights


def is_bare(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Return whether a module of one of these types is its weight and bias alone, which others may then apply.

    Adapters, hooks and a replaced ``forward`` act when the module is called: pruning and offloading make weights there.
    """
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return type(module) in types and "forward" not in vars(module) and not any(hooks)


def _is_plain(conv: nn.Module) -> bool:
    """Return whether a convolution is its weight and bias alone, with zeros around the grid."""
    if not is_bare(conv, *CONVOLUTIONS):
        return False
    options = cast(nn.Conv2d, conv)
    centred = options.padding == tuple([extent // 2 for extent in options.kernel_size])
    return centred and options.padding_mode == "zeros" and {*options.stride, *options.dilation} == {1}


def _convolve(
    parts: Sequence[Tensor],
    conv: nn.Module,
    grid: TokenGrid,
    residual: bool = False,
    silu: bool = False,
    impl: str = "auto",
) -> list[Tensor]:
    if _is_plain(conv):
        weight, bias = cast(Tensor, conv.weight), cast("Tensor | None", conv.bias)
        out = _grid_conv(parts, weight, bias, grid, residual, silu, impl)
    else:
        x = torch.cat(list(parts), -1) if len(parts) > 1 else parts[0]
        out = convolve_grid(x, conv, grid, residual, silu).chunk(len(parts), -1)
    return [out[i] for i in range(len(parts))]  # torch.fx does not iterate over chunks


@torch.fx.wrap  # torch.fx records the call whole: the checks inside need real arguments
def _grid_conv(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    grid: TokenGrid,
    residual: bool,
    silu: bool,
    impl: str,
) -> Sequence[Tensor]:
    assert bias is None or len(parts) == 1
    parts = parts if residual else [in_autocast_type(x) for x in parts]  # what a residual adds keeps its digits
    weights = weight.chunk(len(parts)) if len(parts) > 1 else (weight,)
    call = bind_grid_conv(grid, residual=residual, silu=silu, impl=impl)
    runs = [call.planned(x, w, bias) for x, w in zip(parts, weights, strict=True)]
    return [run(x, w, bias) for run, x, w in zip(runs, parts, weights, strict=True)]


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

    def reach(self, axis: int) -> int:
        return super().reach(axis - 1) if axis else self.time.kernel_size[0] // 2

    def _of_real(self, x: Any, grid: TokenGrid, key_mask: Tensor) -> Any:
        return self(x, grid, key_mask)

    def forward(self, x: Any, grid: TokenGrid, key_mask: Tensor | None = None) -> Any:
        T, H, W = grid.shape
        first = grid.repeats * grid.num_prefix_tokens
        tokens = x[:, first:]
        frames = tokens.unflatten(1, (T, -1)).flatten(0, 1)
        (convolved,) = _convolve([frames], self.proj, TokenGrid((H, W), 0, grid.repeats))
        clips = convolved.unflatten(0, (-1, T)).flatten(1, 2)
        if key_mask is not None:  # the first convolution writes to padding, which the second one reads
            clips = clips.masked_fill(~key_mask[:, first:, None], 0)
        tokens = tokens + _convolve([clips], self.time, TokenGrid((T, H * W), 0, grid.repeats))[0]
        return torch.cat([x[:, :first], tokens], 1) if first else tokens


POSITION_ENCODINGS: dict[bool | str, type[ConvPositionEncoding]] = {
    True: ConvPositionEncoding,
    "factorised": FactorisedPositionEncoding,
}


class PatchConv2d(nn.Conv2d):
    """Compute a convolution whose stride is its kernel, without padding, dilation and groups, as a matrix product.

    cuDNN's gradient of the weights is slow for so few channels. The output lies channels last: tokens are contiguous.

    Shape:
        [B, C, \\*sizes], multiples of the kernel -> [B, D, \\*grid].
    """

    def forward(self, x: Tensor) -> Tensor:
        return _project_patches(x, self.weight, self.bias)


class PatchConv3d(nn.Conv3d):
    """Compute :class:`PatchConv2d` of clips."""

    def forward(self, x: Tensor) -> Tensor:
        return _project_patches(x, self.weight, self.bias)


@torch.fx.wrap  # torch.fx records the call whole
def _project_patches(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    patch = weight.shape[2:]
    for axis, size in enumerate(patch):
        x = x.unflatten(2 + 2 * axis, (-1, size))
    grid, within = range(2, x.ndim, 2), range(3, x.ndim, 2)
    rows = x.permute(0, *grid, 1, *within).flatten(-1 - len(patch))  # [B, *grid, P]
    return F.linear(rows, weight.flatten(1), bias).movedim(-1, 1)
