"""Draw and pose random calls of `mhla`.

B batch, N tokens, H heads, D and Dv head dims, M blocks, n tokens in the largest block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from headmix_vision.doctor.drawing import (
    GRADIENT_LAYOUTS,
    LAYOUTS,
    WEIGHT_TYPES,
    Options,
    draw_copies,
    draw_grid,
    draw_head_dim,
    draw_value_dim,
    grid_of,
)
from headmix_vision.doctor.problem import Numbers, Problem
from headmix_vision.ops import TokenBlocks, mhla
from headmix_vision.ops.mhla.settings import apply_feature_map


def draw_mhla(
    rng: random.Random, kernel: random.Random, index: int, small: bool, causal: bool, regimes: tuple[str, ...]
) -> Options:
    """Draw a call of `mhla`; the dense float64 form limits tokens, heads and batch."""
    short = regimes == ("pairwise",) and kernel.random() < 0.2
    if short:  # a GPU may have kernels of their own for these
        grid: Options = {
            "shape": (rng.randint(7, 16), rng.randint(7, 16)),
            "num_prefix_tokens": rng.choice((0, 1)),
            "repeats": 1,
        }
        dim = kernel.choice((64, 72, 80))
        value_dim = dim if kernel.random() < 0.8 else kernel.choice((64, 72, 80))
    else:
        grid = draw_grid(rng, 300 if small else 1500)
        dim = draw_head_dim(kernel, index)
        value_dim = draw_value_dim(kernel, dim)
    tokens = grid_of(grid).num_tokens
    # More heads than a GPU has multiprocessors.
    many = not small and tokens <= 256 and rng.random() < (0.3 if short else 0.1)
    most = min(320, 2e7 / tokens**2) if many else min(24, 8e6 / tokens**2, 1e6 / tokens / max(dim, value_dim))
    each_token = tokens <= 256 and rng.random() < 0.08
    longest = (16, 6, 4)[len(grid["shape"]) - 1]
    blocks = tuple(size if each_token else rng.randint(1, min(size, longest)) for size in grid["shape"])
    normalizer = kernel.choice(("paper", "paper", "paper", "source_block", None, None))
    feature_map = kernel.choice(("relu", "relu", "elu1", "elu1", "identity"))
    # The denominator of "source_block" may be one product of small features.
    eps = rng.choice((0.1, 0.3) if normalizer == "source_block" else (1e-6, 1e-6, 1e-6, 1e-3, 0.1))
    return {
        **grid,
        "block_grid": blocks,
        **draw_copies(rng, most, 8 if many else 6, 320 if many else 4),
        "dim": dim,
        "value_dim": value_dim,
        "per_head": rng.random() < 0.4,
        "mixing": kernel.choice(WEIGHT_TYPES),
        "normalizer": normalizer,
        "feature_map": feature_map,
        "eps": eps,
        "causal": causal,
        "regime": kernel.choice(regimes),
        "layout": kernel.choice(LAYOUTS),
        "gradient": rng.choice(GRADIENT_LAYOUTS),
    }


def pose_mhla(options: Options, numbers: Numbers) -> Problem:
    """Make the tensors of a call of `mhla`; without a denominator the output gradient is divided by N."""
    blocks = TokenBlocks(grid_of(options), options["block_grid"])
    B, N, H, D, Dv = options["batch"], blocks.num_tokens, options["heads"], options["dim"], options["value_dim"]
    normalizer = options["normalizer"]
    q, k, v = numbers.normal(B, N, H, D), numbers.normal(B, N, H, D), numbers.normal(B, N, H, Dv)
    if options["feature_map"] == "identity" and normalizer:  # else the denominator may vanish
        q, k = q.abs() + 0.1, k.abs() + 0.1
    q, k, v = numbers.inputs(options["layout"], q, k, v)
    heads = (H,) if options["per_head"] else ()
    mixing = numbers.weight(numbers.uniform(*heads, blocks.num_blocks, blocks.num_blocks) + 0.01, options["mixing"])
    d_out = numbers.gradient(options["gradient"], B, N, H, Dv, scale=1.0 if normalizer else 1 / N)

    def call(inputs: Sequence[Tensor], impl: str) -> tuple[Tensor]:
        q, k, v, mixing = inputs
        impl = f"triton_{options['regime']}" if impl == "triton" else impl
        chosen = {name: options[name] for name in ("normalizer", "feature_map", "eps", "causal")}
        return (mhla(q, k, v, mixing, blocks, **chosen, impl=impl),)

    inputs = {"q": q, "k": k, "v": v, "mixing": mixing}
    return Problem(inputs, ("out",), [d_out], call, partial(_dense, blocks=blocks, options=options))


def _dense(inputs: Sequence[Tensor], blocks: TokenBlocks, options: Options) -> tuple[Tensor]:
    """Compute `mhla` over all pairs of tokens, in few operations for any number of blocks."""
    q, k, v, mixing = inputs
    q, k = (apply_feature_map(x, options["feature_map"], options["eps"]) for x in (q, k))
    block, _, slot, *_ = blocks.tables(q)
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    seen = scores * (slot <= slot[:, None]) if options["causal"] else scores
    weights = mixing[..., block[:, None], block] * seen
    out = torch.einsum("bhij,bjhe->bhie", weights, v)
    if options["normalizer"] == "paper":
        out = out / weights.sum(-1, keepdim=True)
    elif options["normalizer"] == "source_block":
        within = block == block[:, None]
        sums, own = ((x * within).sum(-1) for x in (scores, seen))
        out = out / (_source_block(sums, own, mixing, blocks, options["causal"]) + options["eps"])[..., None]
    return (out.transpose(1, 2),)


def _source_block(sums: Tensor, own: Tensor, mixing: Tensor, blocks: TokenBlocks, causal: bool) -> Tensor:
    """Compute sum_b m[i, b] (q_b . z_b) of each token, [B, H, N].

    Args:
        sums: [B, H, N], products of each query with the sum of the keys of its block.
        own: [B, H, N], products with the sum of those keys of its block that it sees.
        mixing: [M, M] or [H, M, M].
    """
    block, tokens, slot, *_ = blocks.tables(sums)
    peers = tokens[:, slot % tokens.shape[1]]  # [M, N], the token at the same place of each block, or -1
    weights = mixing.mT[..., block] * (peers >= 0)
    if not causal:
        return (weights * sums[..., peers.clamp(min=0)]).sum(-2)
    before = torch.arange(len(tokens), device=block.device)[:, None] < block
    earlier = (weights * before * sums[..., peers.clamp(min=0)]).sum(-2)
    return earlier + mixing.diagonal(dim1=-2, dim2=-1)[..., block] * own
