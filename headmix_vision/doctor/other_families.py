"""Draw and pose random calls of `grid_conv` and `mix_heads`.

B batch, N tokens, C channels or inputs, H heads, G output heads, D head dim.
"""

from __future__ import annotations

import math
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
    grid_of,
)
from headmix_vision.doctor.problem import Numbers, Problem
from headmix_vision.ops import grid_conv, mix_heads


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
