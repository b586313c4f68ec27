"""MHLA in Triton kernels, as ``torch.library`` ops with gradients. Derivation and regimes: README.md.

B batch, N tokens, H heads, M blocks, D and Dv head dims. Saved for the backward pass are the inputs, the inverse
denominators and, by regime, the output (pairwise) or the block summaries (summary). Sums have a fixed order: repeated
calls are bit-equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq

from headmix_vision.ops.feature_maps import apply_feature_map
from headmix_vision.ops.mhla import triton_launch as launch
from headmix_vision.ops.mhla.block_gather import source_block_denominator, to_blocks
from headmix_vision.ops.mhla.regimes import choose_regime
from headmix_vision.ops.precision import autocast_off
from headmix_vision.ops.token_blocks import TokenBlocks
from headmix_vision.ops.triton_inputs import numerics


def mhla_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    blocks: TokenBlocks,
    normalizer: str | None,
    feature_map: str,
    eps: float,
    regime: str | None = None,
) -> Tensor:
    """See :func:`headmix_vision.ops.mhla`. ``regime``: "pairwise", "summary" or None, as the cost model says."""
    regime = regime or choose_regime(blocks, q.shape[-1], v.shape[-1])
    partition = (list(blocks.grid), list(blocks.block_grid), blocks.num_prefix_tokens)
    denominator = None
    if normalizer == "source_block":
        denominator = _source_block_denominator(q, k, mixing, blocks, feature_map, eps)
    out, *_ = _forward_op(q, k, v, mixing, denominator, *partition, normalizer == "paper", feature_map, eps, regime)
    return out


def _source_block_denominator(
    q: Tensor, k: Tensor, mixing: Tensor, blocks: TokenBlocks, feature_map: str, eps: float
) -> Tensor:
    """[B, H, N] float32, in plain PyTorch: the published code's normalizer, kept for its weights."""
    with autocast_off(q):
        tables = blocks.tables(q)
        q, k = (to_blocks(apply_feature_map(x.float(), feature_map, eps), tables) for x in (q, k))
        mixing = mixing.float().expand(q.shape[0], q.shape[1], *mixing.shape[-2:])
        return source_block_denominator(q, k, mixing, tables, eps)[..., 0].transpose(1, 2).contiguous()


def _settings(
    grid: list[int], block_grid: list[int], prefix: int, paper: bool, feature_map: str, eps: float, given: bool
) -> launch.Settings:
    blocks = TokenBlocks(tuple(grid), tuple(block_grid), prefix)
    return launch.Settings(blocks, "paper" if paper else "given" if given else "none", feature_map, eps)


def _saved(q: Tensor, v: Tensor, blocks: TokenBlocks, regime: str, paper: bool, given: bool) -> tuple[Tensor, ...]:
    """Empty inverse denominators [B, H, N], summaries S [B, H, M, D, Dv] and z [B, H, M, D]; 0 for N or M if unused."""
    B, N, H, D = q.shape
    M = blocks.num_blocks if regime == "summary" else 0
    return (
        q.new_empty(B, H, N if paper or given else 0, dtype=torch.float32),
        q.new_empty(B, H, M, D, v.shape[-1], dtype=numerics(q.dtype).storage),
        q.new_empty(B, H, M if paper else 0, D, dtype=torch.float32),
    )


@torch.library.custom_op("headmix_vision::mhla", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    denominator: Tensor | None,
    grid: list[int],
    block_grid: list[int],
    num_prefix_tokens: int,
    paper: bool,
    feature_map: str,
    eps: float,
    regime: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, inverse denominators, and the block summaries S and z."""
    settings = _settings(grid, block_grid, num_prefix_tokens, paper, feature_map, eps, denominator is not None)
    B, N, H, _ = q.shape
    out = q.new_empty(B, N, H, v.shape[-1])
    inverse, matrix, vector = _saved(q, v, settings.blocks, regime, paper, denominator is not None)
    if denominator is not None:
        torch.reciprocal(denominator, out=inverse)
    if out.numel() == 0:
        return out, inverse, matrix, vector
    with torch.cuda.device_of(q):
        if regime == "pairwise":
            launch.pairwise_forward(q, k, v, mixing, inverse, out, settings)
        else:
            matrix, vector = launch.summarize(k, v, settings)
            launch.apply(q, *launch.mix(matrix, vector, mixing, settings), inverse, out, settings)
    return out, inverse, matrix, vector


@_forward_op.register_fake
def _(q, k, v, mixing, denominator, grid, block_grid, num_prefix_tokens, paper, feature_map, eps, regime):  # type: ignore[no-untyped-def]
    B, N, H, _ = q.shape
    blocks = TokenBlocks(tuple(grid), tuple(block_grid), num_prefix_tokens)
    return q.new_empty(B, N, H, v.shape[-1]), *_saved(q, v, blocks, regime, paper, denominator is not None)


@torch.library.custom_op("headmix_vision::mhla_backward", mutates_args=())
def _backward_op(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    out: Tensor | None,
    inverse: Tensor,
    summary_matrix: Tensor,
    summary_vector: Tensor,
    grid: list[int],
    block_grid: list[int],
    num_prefix_tokens: int,
    paper: bool,
    given: bool,
    feature_map: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, mixing and a given denominator: pairwise where there is an ``out``, else from summaries."""
    settings = _settings(grid, block_grid, num_prefix_tokens, paper, feature_map, eps, given)
    return _gradients(d_out, q, k, v, mixing, out, inverse, summary_matrix, summary_vector, None, settings)


@torch.library.custom_op("headmix_vision::mhla_backward_packed", mutates_args=())
def _packed_backward_op(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    out: Tensor | None,
    inverse: Tensor,
    summary_matrix: Tensor,
    summary_vector: Tensor,
    grid: list[int],
    block_grid: list[int],
    num_prefix_tokens: int,
    paper: bool,
    given: bool,
    feature_map: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``mhla_backward``, for v of the shape of q, with the first three gradients in one, [B, N, 3, H, D]."""
    settings = _settings(grid, block_grid, num_prefix_tokens, paper, feature_map, eps, given)
    d_qkv = _packed_gradient(q)
    *_, d_mixing, d_denominator = _gradients(
        d_out, q, k, v, mixing, out, inverse, summary_matrix, summary_vector, d_qkv, settings
    )
    return d_qkv, d_mixing, d_denominator


def _packed_gradient(q: Tensor) -> Tensor:
    B, N, H, D = q.shape
    return q.new_empty(B, N, 3, H, D)


def _gradients(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    out: Tensor | None,
    inverse: Tensor,
    summary_matrix: Tensor,
    summary_vector: Tensor,
    d_qkv: Tensor | None,
    settings: launch.Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of q, k, v, parts of ``d_qkv`` if it is there, of mixing, and of a given denominator."""
    given = settings.normalizer == "given"
    if d_out.numel() == 0:
        d_q, d_k, d_v = (launch.gradient(x, d_qkv, part).zero_() for part, x in enumerate((q, k, v)))
        d_mixing = torch.zeros_like(mixing, memory_format=torch.contiguous_format)
        d_denominator = torch.zeros_like(inverse)
    else:
        with torch.cuda.device_of(q):
            if out is not None:
                d_q, d_k, d_v, d_mixing, d_denominator = launch.pairwise_backward(
                    q, k, v, mixing, out, inverse, d_out, d_qkv, settings
                )
            else:
                mixed = launch.mix(summary_matrix, summary_vector, mixing, settings)
                d_q, d_denominator, R, r = launch.backward_query(q, *mixed, inverse, d_out, d_qkv, settings)
                del mixed
                d_mixing, R, r = launch.mixing_gradient(R, r, summary_matrix, summary_vector, mixing, settings)
                d_k, d_v = launch.backward_key(k, v, R, r, d_qkv, settings)
    return d_q, d_k, d_v, d_mixing.to(mixing.dtype), d_denominator if given else torch.empty_like(inverse[..., :0])


@_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    d_out, q, k, v, mixing, out, inverse, summary_matrix, summary_vector,
    grid, block_grid, num_prefix_tokens, paper, given, feature_map, eps,
):  # fmt: skip
    return *(x.new_empty(x.shape) for x in (q, k, v, mixing)), torch.empty_like(inverse if given else inverse[..., :0])


@_packed_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    d_out, q, k, v, mixing, out, inverse, summary_matrix, summary_vector,
    grid, block_grid, num_prefix_tokens, paper, given, feature_map, eps,
):  # fmt: skip
    d_denominator = torch.empty_like(inverse if given else inverse[..., :0])
    return _packed_gradient(q), mixing.new_empty(mixing.shape), d_denominator


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mixing, denominator, *options, regime = inputs
    out, *saved = output
    ctx.save_for_backward(q, k, v, mixing, out if regime == "pairwise" else None, *saved)
    ctx.given = denominator is not None
    ctx.options = options
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 12
    *partition, paper, feature_map, eps = ctx.options
    q, k, v, *saved = ctx.saved_tensors
    arguments = (d_out, q, k, v, *saved, *partition, paper, ctx.given, feature_map, eps)
    if _are_traced_parts(q, k, v):
        d_qkv, d_mixing, d_denominator = _packed_backward_op(*arguments)
        sizes = [q.shape[2] * q.shape[3]] * 3
        # Inductor leaves out a concatenation of these three, if both name the dim by the same number, not -1.
        d_q, d_k, d_v = (x.view(q.shape) for x in torch.split_with_sizes(d_qkv.flatten(2), sizes, 2))
    else:
        d_q, d_k, d_v, d_mixing, d_denominator = _backward_op(*arguments)
    return d_q, d_k, d_v, d_mixing, d_denominator if ctx.given else None, *(None,) * 7


def _are_traced_parts(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a tracer shows q, k and v as the parts into which a packed projection [B, N, 3 H D] was cut.

    If by ``chunk`` or ``split``, their gradients are concatenated, which Inductor leaves out for all parts of one
    tensor. Plain tensors are never packed: PyTorch copies parts of one tensor more slowly than three tensors.
    """
    if type(q) in (Tensor, torch.nn.Parameter):
        return False
    width, first = q.shape[2] * q.shape[3], q.storage_offset()
    layout = (*q.shape, q.stride(0), 3 * width, q.shape[3], 1)
    return all(
        guard_or_false(sym_eq((*x.shape, *x.stride(), x.storage_offset()), (*layout, first + part * width)))
        for part, x in enumerate((q, k, v))
    )


_forward_op.register_autograd(_backward, setup_context=_setup_context)
