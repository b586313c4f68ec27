"""Take tokens in another order or block by block; the gradient takes them back instead of summing into places.

B batch, N tokens, H heads, D head dim, M blocks, n tokens in the largest block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.dispatch import apply_of, out_of_dead_transformation
from headmix_vision.ops.token_blocks import BlockTables


def gather(
    tensors: Iterable[Tensor],
    dim: int,
    places: Tensor,
    absent: Tensor | None,
    back: Tensor,
    absent_back: Tensor | None = None,
) -> list[Tensor]:
    """Take the same places of a dim of several tensors.

    Args:
        tensors: [..., N, ...] each.
        dim: of the N places.
        places: int64 [P], numbers of places, each at most once.
        absent: where outputs are zero, a mask that broadcasts to them; None for nowhere.
        back: int64 [N], where each place has gone.
        absent_back: places that are not taken, a mask that broadcasts to the gradient; None for none.

    Returns:
        [..., P, ...] each.
    """
    if torch.compiler.is_compiling():
        apply = _Gather.apply
    elif torch._C._are_functorch_transforms_active():
        apply = _GatherWithTangents.apply
    else:
        apply, tensors = _gather_eagerly, map(out_of_dead_transformation, tensors)
    return [apply(x, dim, places, absent, back, absent_back) for x in tensors]


def to_blocks(tables: BlockTables, *tensors: Tensor) -> list[Tensor]:
    """Gather tensors [B, N, H, D] into blocks [B, H, M, n, D], zero where a block has no token."""
    heads = [x.transpose(1, 2) for x in tensors]
    gathered = gather(heads, 2, tables.places, tables.absent, tables.slot_of_token)
    return [torch.unflatten(x, 2, tables.tokens.shape) for x in gathered]


def to_tokens(tables: BlockTables, x: Tensor) -> Tensor:
    """Gather blocks [B, H, M, n, D] back into raster order [B, N, H, D]."""
    (x,) = gather((x.flatten(2, 3),), 2, tables.slot_of_token, None, tables.places, tables.absent)
    return x.transpose(1, 2)


def _take(x: Tensor, dim: int, places: Tensor, absent: Tensor | None) -> Tensor:
    out = x.index_select(dim, places)
    # Out of place: traced by torch.compile, an in-place fill here gives wrong gradients (torch 2.11).
    return out if absent is None else out.masked_fill(absent, 0)


class _Gather(torch.autograd.Function):
    """Gather one tensor; its adjoint takes the tokens back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, dim: int, places: Tensor, absent: Tensor | None, back: Tensor, absent_back: Tensor | None
    ) -> Tensor:
        return _take(x, dim, places, absent)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.dim, *tables = inputs
        ctx.save_for_backward(*tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places, absent, back, absent_back = ctx.saved_tensors
        return *gather(grads, ctx.dim, back, absent_back, places, absent), None, None, None, None, None


class _GatherWithTangents(_Gather):
    """Add the derivative in forward mode, which torch.compile cannot trace: the map itself."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.dim, *tables = inputs
        ctx.save_for_backward(*tables)
        ctx.save_for_forward(*tables)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return gather(tangents[:1], ctx.dim, *ctx.saved_tensors)[0]


class _EagerGather(_GatherWithTangents):
    """Leave out ``setup_context``, for which PyTorch binds arguments by name: this takes longer than a gather."""

    setup_context = staticmethod(torch.autograd.Function.setup_context)

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, *tables: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.dim = dim
        ctx.save_for_backward(*tables)
        ctx.save_for_forward(*tables)
        return _take(x, dim, *tables[:2])  # type: ignore[arg-type]


_gather_eagerly = apply_of(_EagerGather)
