"""Draw and pose random calls of `head_in_head`.

B batch, N tokens, H heads, Dk and Dv head dims, r sub-heads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
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
from headmix_vision.ops import TokenScan, head_in_head


def draw_head_in_head(rng: random.Random, kernel: random.Random, index: int, small: bool) -> Options:
    """Draw a call of `head_in_head`; the loop of the reference keeps some matrices [B, H, Dk, Dk] for each token."""
    grid = draw_grid(rng, 150 if small else 700)
    r = kernel.choice((1, 2, 4, 8))
    dim = -(-draw_head_dim(kernel, index) // r) * r
    value_dim = draw_value_dim(kernel, dim)
    return {
        **grid,
        **draw_copies(rng, 2e7 / grid_of(grid).num_tokens / max(dim, value_dim) ** 2),
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
