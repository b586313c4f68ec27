"""The learned block mixing matrix of MHLA (arXiv 2601.07832, section 4.2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_choice, check_counts
from headmix_vision.ops import TokenBlocks
from headmix_vision.ops.dispatch import as_function

MIXING_INITS = ("locality", "uniform")
LOWER, UPPER = 1e-6, 1.0


def mixing_of_first(mixing: Tensor, blocks: TokenBlocks) -> Tensor:
    """Return the part [..., M, M] of mixing weights that is of the first M blocks, for a clip that has no more."""
    count = blocks.num_blocks
    return mixing if mixing.shape[-1] == count else mixing[..., :count, :count]


def mixing_of_rows(mixing: Tensor, row_blocks: int, count: int) -> Tensor:
    """Carry mixing weights over to any number of rows of blocks along the first axis, none of which sees a later one.

    The first rows are mixed as they are given. All others are mixed as the last one given, by their distance, and do
    not see rows that are farther away than the first is from the last.

    Args:
        mixing: [..., R P, R P] for R rows of P blocks.
        row_blocks: P.
        count: T, the number of rows.

    Returns:
        [..., T P, T P], zero where a block is not seen.
    """
    mixing = mixing.unflatten(-1, (-1, row_blocks)).unflatten(-3, (-1, row_blocks)).transpose(-3, -2)
    row, last = torch.arange(count, device=mixing.device), mixing.shape[-3] - 1
    query = row.clamp(max=last)[:, None]
    source = query - (row[:, None] - row)
    seen = (source >= 0) & (source <= query)
    weight = mixing[..., query, source.clamp(0, last), :, :] * seen[:, :, None, None]  # [..., T, T, P, P]
    return weight.transpose(-3, -2).flatten(-2).flatten(-3, -2)


class MixingMatrix(nn.Module):
    """Hold the non-negative M x M weights of key blocks (columns) for query blocks (rows).

    The paper clips the weights to (0, 1) at every update. Here the clipping is part of the module, so any optimizer and
    trainer keeps it: ``forward`` returns the clipped weights, and at a bound only the gradient that leads back inside
    passes, so a weight never drifts away out of reach.

    The state dict holds the block grid beside the weights, so that weights of another grid are resampled when they are
    loaded, also where the number of blocks is the same. Weights without one, of version 0.1.0, are taken to be of this
    module's grid if they have as many blocks, else of the grid in its proportions.

    Args:
        blocks: partition of the tokens; M is its number of blocks.
        num_heads: None for one matrix shared by the heads (the paper), H for one per head.
        init: ``"locality"`` (the paper: ``1 - dist(i, j) / max_k dist(i, k)`` between block centres, rows normalised
            to sum 1; the prefix block is at distance 0 from every block and weighs all blocks alike) or ``"uniform"``.
        trainable: False keeps the initial weights as a buffer of the same name.
        clip: False takes weights of any size and sign, as the released code does.

    Shape:
        ``forward() -> [M, M]`` or ``[H, M, M]``.

    Raises:
        InputError: for an unknown ``init``, and for loaded weights that do not fit their block grid.
    """

    undecayed = ("weight",)  # weight decay would pull weights towards zero for no reason
    block_grid: Tensor

    def __init__(
        self,
        blocks: TokenBlocks,
        num_heads: int | None = None,
        init: str = "locality",
        trainable: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        clip: bool = True,
    ) -> None:
        super().__init__()
        if num_heads is not None:
            check_counts(1, num_heads=num_heads)
        check_choice("mixing init", init, MIXING_INITS)
        self.blocks, self.init, self.clip = blocks, init, clip
        heads = () if num_heads is None else (num_heads,)
        weight = torch.empty(*heads, blocks.num_blocks, blocks.num_blocks, device=device, dtype=dtype)
        if trainable:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)
        self.register_buffer("block_grid", torch.empty(len(blocks.block_grid), dtype=torch.long, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        m = self.blocks.num_blocks
        weight = locality_weights(self.blocks) if self.init == "locality" else torch.full((m, m), 1 / m)
        self.weight.copy_(weight)
        self._store_block_grid()

    def _store_block_grid(self) -> None:
        self.block_grid.copy_(torch.tensor(self.blocks.block_grid))

    def forward(self) -> Tensor:
        return clip_keep_inward_gradient(self.weight) if self.clip else self.weight

    def set_blocks(self, blocks: TokenBlocks) -> None:
        """Adopt another partition; for another block grid, replace the parameter by its resampled weights."""
        if blocks.num_prefix_blocks != self.blocks.num_prefix_blocks:
            raise InputError("a mixing matrix cannot gain or lose its prefix block.")
        if blocks.block_grid != self.blocks.block_grid:
            weight = resample_mixing(
                self.weight.detach(), self.blocks.block_grid, blocks.block_grid, blocks.num_prefix_blocks
            )
            if isinstance(self.weight, nn.Parameter):
                weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
            self.weight = weight
        self.blocks = blocks
        self._store_block_grid()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Resample weights stored for another block grid, then load as usual."""
        weight, block_grid = state_dict.get(prefix + "weight"), state_dict.get(prefix + "block_grid")
        if weight is not None:
            new, prefix_blocks = self.blocks.block_grid, self.blocks.num_prefix_blocks
            if block_grid is not None:
                old = tuple(int(axis) for axis in block_grid.flatten().tolist())
            else:
                old = infer_block_grid(weight.shape[-1] - prefix_blocks, new)
            if old != new or weight.shape[-1] != self.weight.shape[-1]:
                state_dict[prefix + "weight"] = resample_mixing(weight, old, new, prefix_blocks)
            state_dict[prefix + "block_grid"] = torch.tensor(new, device=weight.device)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.blocks}, init={self.init}, shape={tuple(self.weight.shape)}"


def _clip(weight: Tensor, lower: float, upper: float) -> Tensor:
    return weight.clamp(lower, upper)


def _setup_clip(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.bounds = inputs[1:]


def _setup_clip_with_tangents(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    _setup_clip(ctx, inputs, output)
    ctx.save_for_forward(inputs[0])


def _pass_inward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
    (weight,), (grad,), (lower, upper) = ctx.saved_tensors, grads, ctx.bounds
    return grad * torch.where(grad > 0, weight > lower, weight < upper), None, None  # NaN stays NaN


def _clip_tangent(ctx: Any, *tangents: Tensor) -> Tensor:
    (weight,), (lower, upper) = ctx.saved_tensors, ctx.bounds
    return tangents[0].masked_fill((weight < lower) | (weight > upper), 0)


class _Clip(torch.autograd.Function):
    """Clip where torch.compile looks on, which cannot trace derivatives in forward mode."""

    generate_vmap_rule = True
    forward = staticmethod(_clip)
    setup_context = staticmethod(_setup_clip)
    backward = staticmethod(_pass_inward)


class _ClipWithTangents(_Clip):
    """Add the derivative in forward mode: one within the bounds, zero outside."""

    setup_context = staticmethod(_setup_clip_with_tangents)
    jvp = staticmethod(_clip_tangent)


_clip_eagerly = as_function(_clip, _setup_clip_with_tangents, _pass_inward, _clip_tangent)


@torch.fx.wrap
def clip_keep_inward_gradient(weight: Tensor, lower: float = LOWER, upper: float = UPPER) -> Tensor:
    """Clip weights to an interval, (0, 1); pass the gradient, except where its step would leave the interval.

    Whether it would is decided in each backward pass: of a weight at a bound, gradients of parts of a batch, on several
    devices or accumulated, need not sum to that of the whole.
    """
    clipped: Tensor
    if torch.compiler.is_compiling():
        clipped = _Clip.apply(weight, lower, upper)
    elif torch._C._are_functorch_transforms_active():
        clipped = _ClipWithTangents.apply(weight, lower, upper)
    else:
        clipped = _clip_eagerly(weight, lower, upper)
    return clipped


def locality_weights(blocks: TokenBlocks) -> Tensor:
    """Compute the paper's initial mixing matrix (section 4.2), rows summing to 1: float64 [M, M]."""
    centers = blocks.block_centers()
    distance = torch.cdist(centers, centers)
    weight = 1 - distance / distance.amax(1, keepdim=True).clamp(min=torch.finfo(distance.dtype).tiny)
    weight = nn.functional.pad(weight, (blocks.num_prefix_blocks, 0, blocks.num_prefix_blocks, 0), value=1.0)
    return weight / weight.sum(1, keepdim=True)


def resample_mixing(
    weight: Tensor, old_block_grid: tuple[int, ...], new_block_grid: tuple[int, ...], num_prefix_blocks: int = 0
) -> Tensor:
    """Carry mixing weights over to another block grid.

    A weight is a function of two positions, constant on pairs of blocks; the new weight is its mean over the new pair
    of blocks. Splitting blocks therefore leaves the attention exactly as it was, and weights stay within their bounds.

    Args:
        weight: [..., M, M] for ``old_block_grid``, prefix blocks first.
        old_block_grid, new_block_grid: blocks along each axis, equally many axes.
        num_prefix_blocks: leading rows and columns without a position.

    Returns:
        [..., M', M'] for ``new_block_grid``.

    Raises:
        InputError: if ``weight`` does not fit ``old_block_grid`` or the number of axes changes.
    """
    m = num_prefix_blocks + math.prod(old_block_grid)
    if len(old_block_grid) != len(new_block_grid):
        raise InputError(f"block grids {old_block_grid} and {new_block_grid} differ in their number of axes.")
    if tuple(weight.shape[-2:]) != (m, m):
        raise InputError(
            f"mixing of shape {tuple(weight.shape)} does not fit the block grid {old_block_grid}: {m} blocks."
        )
    mean = torch.ones(1, 1)
    for old, new in zip(old_block_grid, new_block_grid, strict=True):
        mean = torch.kron(mean, _overlap(old, new))
    mean = torch.block_diag(torch.eye(num_prefix_blocks, dtype=torch.float64), mean).to(weight.device)
    return (mean @ weight.double() @ mean.T).to(weight.dtype)


def _overlap(old: int, new: int) -> Tensor:
    """Compute the share of each of ``new`` equal cells of [0, 1] that lies in each of ``old``: float64 [new, old]."""
    new_edges = torch.arange(new + 1, dtype=torch.float64)[:, None] / new
    old_edges = torch.arange(old + 1, dtype=torch.float64)[None, :] / old
    upper = torch.minimum(new_edges[1:], old_edges[:, 1:])
    lower = torch.maximum(new_edges[:-1], old_edges[:, :-1])
    return (upper - lower).clamp(min=0) * new


def infer_block_grid(num_blocks: int, like: tuple[int, ...]) -> tuple[int, ...]:
    """Return the block grid of ``num_blocks`` blocks in the proportions of ``like``.

    Raises:
        InputError: if there is none; the weights must then be resampled with :func:`resample_mixing` before loading.
    """
    scale = (num_blocks / math.prod(like)) ** (1 / len(like))
    grid = tuple(round(axis * scale) for axis in like)
    if math.prod(grid) != num_blocks:
        raise InputError(
            f"mixing of {num_blocks} grid blocks fits no block grid in the proportions of {like}; "
            "carry it over with headmix_vision.layers.resample_mixing first."
        )
    return grid
