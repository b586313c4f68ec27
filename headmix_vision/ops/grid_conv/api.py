"""The public entry of the depthwise convolution: it validates the arguments and chooses the implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from headmix_vision.errors import InputError, check_choice, check_flags
from headmix_vision.ops.dispatch import Bound, check_tensors, check_types, kept, select, why_no_kernel_takes
from headmix_vision.ops.grid_conv.reference import grid_conv_reference
from headmix_vision.ops.grid_conv.torch_impl import grid_conv_torch
from headmix_vision.ops.hardware import NO_KERNELS
from headmix_vision.ops.token_grid import TokenGrid

IMPL_NAMES = ("auto", "reference", "torch", "triton")


def validate_grid_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: TokenGrid, residual: bool, silu: bool, impl: str
) -> None:
    """Raise InputError, naming the argument, unless ``grid_conv`` can run on these arguments."""
    check_choice("impl", impl, IMPL_NAMES)
    check_flags(residual=residual, silu=silu)
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    check_tensors(x=x, **others)
    if x.ndim != 3 or x.shape[1] != grid.num_tokens or x.shape[2] < 1:
        raise InputError(f"x must be [B, N, C] with the N = {grid.num_tokens} of {grid}, got shape {tuple(x.shape)}.")
    C, axes = x.shape[2], len(grid.shape)
    extents = weight.shape[2:]
    if weight.shape[:2] != (C, 1) or len(extents) != axes or not all(extent % 2 for extent in extents):
        raise InputError(
            f"weight must be [C, 1, *extents] with C = {C} channels and an odd extent for each of {axes} axes, "
            f"got shape {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != (C,):
        raise InputError(f"bias must be [C] with C = {C} channels, got shape {tuple(bias.shape)}.")
    check_types({"x": x}, others)


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"reference": grid_conv_reference, "torch": grid_conv_torch}
if NO_KERNELS is None:
    from headmix_vision.ops.grid_conv.triton_op import grid_conv_triton

    IMPLEMENTATIONS |= {"triton": grid_conv_triton, "auto": partial(grid_conv_triton, fallback=True)}

MAX_EXTENT = 5  # of the kernels: their loops over taps are unrolled


def grid_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    grid: TokenGrid | tuple[int, ...],
    residual: bool = False,
    silu: bool = False,
    impl: str = "auto",
) -> Tensor:
    r"""Convolve each channel of the tokens on their grid, with zeros around it::

        y[b, n, c] = bias[c] + sum_j weight[c, 0, j] x[b, n + j - extents // 2, c]      n, j: positions on the grid

    Prefix tokens are not convolved. A pseudo-token of a head mix is convolved with the same pseudo-token of
    other tokens. Sums run in float32 (float64 for float64 inputs) whatever the input type, also under autocast.

    Args:
        x: [B, N, C] in raster order, prefix tokens first; any floating type, any strides. Kernels read it in place if
            the channels of a token are contiguous, as in a view of a packed projection.
        weight: [C, 1, \*extents] as of ``torch.nn.Conv1d``, ``Conv2d`` and ``Conv3d``, of an odd extent for each axis;
            floating type, not necessarily that of ``x``.
        bias: [C] of any floating type, or None.
        grid: the grid of the N tokens, or its shape if there is no prefix.
        residual: add ``x`` to the tokens of the grid: ``x + y``.
        silu: return SiLU of the result, of prefix tokens too.
        impl: ``"auto"``: Triton on CUDA where the kernels can run, else torch. ``"triton"``: kernels for bfloat16,
            float16 and float32 and extents up to 5, differentiable once. ``"torch"``: PyTorch's convolution, any
            device. ``"reference"``: a specification.

    Returns:
        [B, N, C] of the type of ``x``; contiguous from the kernels.

    Raises:
        InputError: naming the argument, if shapes, types or devices do not fit, or ``impl`` cannot run them.
    """
    call = bind_grid_conv(TokenGrid.of(grid), residual=residual, silu=silu, impl=impl)
    out: Tensor = call(x, weight, bias)
    return out


@kept
def bind_grid_conv(grid: TokenGrid, *, residual: bool, silu: bool, impl: str) -> Bound:
    """Fix all arguments of :func:`grid_conv` but its tensors, which the returned call takes."""

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
        validate_grid_conv(x, weight, bias, grid, residual, silu, impl)
        name = select(impl, x.is_cuda, lambda: _why_not_triton(x, weight))
        return partial(IMPLEMENTATIONS[name], grid=grid, residual=residual, silu=silu)

    return Bound(plan)


def _why_not_triton(x: Tensor, weight: Tensor) -> str | None:
    if reason := why_no_kernel_takes(x, "x"):
        return reason
    extents = tuple(weight.shape[2:])
    if max(extents) > MAX_EXTENT:
        return f"weight has extents {extents}: the kernels take up to {MAX_EXTENT}"
    return None
