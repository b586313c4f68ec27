"""Draw and pose random calls of every op.

B batch, N tokens, H heads, G output heads, D and Dv (Dk and Dv) head dims, C channels or inputs, M blocks, n tokens in
the largest block, r sub-heads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.doctor.drawing import (
    GRADIENT_LAYOUTS,
    LAYOUTS,
    WEIGHT_TYPES,
    Numbers,
    Options,
    Problem,
    draw_copies,
    draw_grid,
    draw_head_dim,
    draw_value_dim,
    grid_of,
)
from headmix_vision.ops import TokenBlocks, TokenScan, grid_conv, head_in_head, mhla, mix_heads
from headmix_vision.ops.mhla.torch_impl import apply_feature_map


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


def draw_head_in_head(rng: random.Random, kernel: random.Random, index: int, small: bool) -> Options:
    """Draw a call of `head_in_head`; the loop of the reference keeps some matrices [B, H, Dk, Dk] for each token."""
    grid = draw_grid(rng, 150 if small else 700)
    r = kernel.choice((1, 2, 4, 8))
    dim = -(-draw_head_dim(kernel, index) // r) * r
    value_dim = draw_value_dim(kernel, dim)
    return {
        **grid,
        **draw_copies(rng, 1e7 / grid_of(grid).num_tokens / max(dim, value_dim) ** 2),
        "dim": dim,
        "value_dim": value_dim,
        "r": r,
        "per_token": kernel.random() < 0.4,
        "decay": rng.choice(("none", "mild", "mild", "strong", "-1e7", "-inf")),
        "gates": kernel.choice(WEIGHT_TYPES),
        "mask": kernel.choice(WEIGHT_TYPES),
        "scan": kernel.choice((None, "row_major", "column_major", "random")),
        "reverse": rng.random() < 0.5,
        "initial_state": kernel.choice((None, *WEIGHT_TYPES)),
        "final_state": kernel.random() < 0.5,
        "layout": kernel.choice(LAYOUTS),
        "gradient": rng.choice(GRADIENT_LAYOUTS),
    }


def pose_head_in_head(options: Options, numbers: Numbers) -> Problem:
    """Make the tensors of a call of `head_in_head`: keys of norm 1, masks that are correlations, betas in [0, 2]."""
    grid, r = grid_of(options), options["r"]
    B, N, H, D, Dv = options["batch"], grid.num_tokens, options["heads"], options["dim"], options["value_dim"]
    q, k = F.normalize(numbers.normal(2, B, N, H, D), dim=-1)
    q, k, v = numbers.inputs(options["layout"], q, k, numbers.normal(B, N, H, Dv))
    beta = (2.4 * numbers.uniform(B, N, H) - 0.2).clamp(0, 2)
    decay = -numbers.normal(B, N, H).abs() * {"none": 0.0, "strong": 5.0}.get(options["decay"], 0.2)
    if options["decay"].startswith("-"):
        decay[numbers.uniform(B, N, H) < 0.05] = float(options["decay"])
    rows = F.normalize(numbers.normal(*((B, N) if options["per_token"] else ()), H, r, r).abs(), dim=-1)
    inputs = {"q": q, "k": k, "v": v}
    inputs |= {"beta": numbers.weight(beta, options["gates"]), "log_decay": numbers.weight(decay, options["gates"])}
    inputs["mask"] = numbers.weight(rows @ rows.mT, options["mask"])
    if options["initial_state"]:
        inputs["initial_state"] = numbers.weight(numbers.normal(B, H, D, Dv), options["initial_state"])
    scan: TokenScan | Tensor | None = None
    if options["scan"] == "random":
        scan = torch.randperm(N, generator=numbers.generator).to(numbers.device)
    elif options["scan"]:
        scan = TokenScan(grid, options["scan"], options["reverse"])
    gradients = [numbers.gradient(options["gradient"], B, N, H, Dv)]
    if options["final_state"]:
        gradients.append(numbers.weight(numbers.normal(B, H, D, Dv), "float32"))

    def call(inputs: Sequence[Tensor], impl: str) -> Sequence[Tensor]:
        state = {"initial_state": inputs[6]} if len(inputs) > 6 else {}
        out = head_in_head(*inputs[:6], **state, output_final_state=options["final_state"], scan=scan, impl=impl)
        return [x for x in out if x is not None]

    def expect(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        # Kernels compute the gradient of log decays as a difference of q dq and k dk. These factors are 1 and have
        # gradients that cancel: under rounding they make the errors of such a difference.
        q, k, v, beta, log_decay, *others = inputs
        sums = log_decay.clamp(min=-50).cumsum(1)[..., None]
        change = sums - sums.detach()
        q, k = (x * (1 + change) * (1 - change) for x in (q, k))
        return call([q, k, v, beta, log_decay, *others], "reference")

    return Problem(inputs, ("out", "state")[: len(gradients)], gradients, call, expect)


def draw_grid_conv(rng: random.Random, kernel: random.Random, index: int, small: bool) -> Options:
    """Draw a call of `grid_conv`; the reference keeps the input once for each tap."""
    grid = draw_grid(rng, 300 if small else 1500)
    sizes = kernel.randint(1, 20), kernel.randint(21, 200), kernel.randint(201, 400), 8 * kernel.randint(1, 50)
    channels, drawn = kernel.choice(sizes), [kernel.choice((1, 3, 5)) for _ in range(3)]
    extents = tuple(drawn[: len(grid["shape"])])
    numbers = grid_of(grid).num_tokens * channels
    return {
        **grid,
        "extents": extents,
        "batch": draw_copies(rng, min(1e6, 4e7 / math.prod(extents)) / numbers, heads=1)["batch"],
        "channels": channels,
        "bias": kernel.random() < 0.7,
        "weight": kernel.choice(WEIGHT_TYPES),
        "residual": kernel.random() < 0.5,
        "silu": kernel.random() < 0.5,
        "layout": kernel.choice(LAYOUTS),
        "gradient": rng.choice(GRADIENT_LAYOUTS),
    }


def pose_grid_conv(options: Options, numbers: Numbers) -> Problem:
    """Make the tensors of a call of `grid_conv`."""
    grid, C = grid_of(options), options["channels"]
    shape = options["batch"], grid.num_tokens, C
    inputs = {
        "x": numbers.inputs(options["layout"], numbers.normal(*shape))[0],
        "weight": numbers.weight(0.3 * numbers.normal(C, 1, *options["extents"]), options["weight"]),
    }
    if options["bias"]:
        inputs["bias"] = numbers.weight(numbers.normal(C), options["weight"])
    settings = {"grid": grid, "residual": options["residual"], "silu": options["silu"]}

    def call(inputs: Sequence[Tensor], impl: str) -> tuple[Tensor]:
        return (grid_conv(*inputs, **settings, impl=impl),)

    d_out = numbers.gradient(options["gradient"], *shape)
    return Problem(inputs, ("out",), [d_out], call, partial(call, impl="reference"))


def draw_mix_heads(rng: random.Random, kernel: random.Random, index: int, small: bool) -> Options:
    """Draw a call of `mix_heads`."""
    count, dim = kernel.randint(1, 4), draw_head_dim(kernel, index)
    heads, out_heads = (64 if not small and kernel.random() < 0.05 else kernel.randint(1, 26) for _ in "HG")
    room = 1e6 / count / dim / max(heads, out_heads)
    tokens = rng.randint(1, max(1, min(200 if small else 400, int(room))))
    return {
        "count": count,
        "batch": draw_copies(rng, room / tokens, heads=1)["batch"],
        "tokens": tokens,
        "heads": heads,
        "out_heads": out_heads,
        "dim": dim,
        "weights": kernel.choice(WEIGHT_TYPES),
        "layout": kernel.choice(LAYOUTS),
        "gradient": rng.choice(GRADIENT_LAYOUTS),
    }


def pose_mix_heads(options: Options, numbers: Numbers) -> Problem:
    """Make the tensors of a call of `mix_heads`."""
    C, H, G = options["count"], options["heads"], options["out_heads"]
    B, N, D = options["batch"], options["tokens"], options["dim"]
    tensors = numbers.inputs(options["layout"], *(numbers.normal(B, N, H, D) for _ in range(C)))
    inputs = {f"x{c}": x for c, x in enumerate(tensors)}
    inputs["weights"] = numbers.weight(numbers.normal(C, G, H), options["weights"])

    def call(inputs: Sequence[Tensor], impl: str) -> tuple[Tensor, ...]:
        return mix_heads(inputs[:-1], inputs[-1], impl=impl)

    def expect(inputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.einsum("gh,bnhd->bngd", w, x) for w, x in zip(inputs[-1], inputs[:-1], strict=True)]

    gradients = [numbers.gradient(options["gradient"], B, N, G, D) for _ in range(C)]
    return Problem(inputs, tuple(f"out{c}" for c in range(C)), gradients, call, expect)
