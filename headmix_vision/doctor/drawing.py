"""Draw the sizes and settings of random cases."""

from __future__ import annotations

import math
import random
from typing import Any

from headmix_vision.ops import TokenGrid

Options = dict[str, Any]
# Kernels cut a head dim into a power of two and a tail: each range has another tail, or none.
HEAD_DIMS = ((1, 16), (17, 31), (32, 32), (33, 63), (64, 64), (65, 80), (81, 96), (97, 127), (128, 128))
LAYOUTS = ("separate", "packed", "strided", "head_major", "surrounded")
GRADIENT_LAYOUTS = ("separate", "separate", "strided", "head_major", "surrounded", "expanded")
WEIGHT_TYPES = ("float32", "input")


def head_dim_range(dim: int) -> str:
    """Name the range of `HEAD_DIMS` that holds a head dim."""
    low, high = next(limits for limits in HEAD_DIMS if dim <= limits[1])
    return f"{low}-{high}" if low < high else str(low)


def draw_head_dim(rng: random.Random, index: int) -> int:
    """Draw a head dim: from all of 1 to 128 or, more often, from one range, which ``index`` cycles through."""
    low, high = (1, HEAD_DIMS[-1][1]) if rng.random() < 0.3 else HEAD_DIMS[index % len(HEAD_DIMS)]
    dim = rng.choice((low, high)) if rng.random() < 0.2 else rng.randint(low, high)
    multiple = -(-dim // 8) * 8  # rows of these dims load in wide words
    return multiple if rng.random() < 0.3 and multiple <= high else dim


def draw_value_dim(rng: random.Random, dim: int) -> int:
    """Draw a value head dim, which equals the other one in 60 % of all cases."""
    return dim if rng.random() < 0.6 else draw_head_dim(rng, rng.randrange(len(HEAD_DIMS)))


def draw_grid(rng: random.Random, most: int, repeats: tuple[int, ...] = (1, 1, 1, 1, 2, 3)) -> dict[str, Any]:
    """Draw the fields of a `TokenGrid` of one to three axes and at most ``most`` tokens; large grids more often."""
    times, prefix = rng.choice(repeats), rng.choice((0, 0, 1, 5))
    if times * (prefix + 1) > most:
        times, prefix = 1, 0
    room = most // times - prefix
    exponents = [rng.uniform(0.5, 1.5) for _ in range(rng.choice((1, 2, 2, 3)))]
    log_tokens = math.log(room) * math.sqrt(rng.random())
    shape = tuple(math.floor(math.exp(log_tokens * e / sum(exponents)) + 1e-9) for e in exponents)
    return {"shape": shape, "num_prefix_tokens": prefix, "repeats": times}


def grid_of(options: dict[str, Any]) -> TokenGrid:
    """Build the grid that `draw_grid` drew."""
    return TokenGrid(options["shape"], options["num_prefix_tokens"], options["repeats"])


def draw_copies(rng: random.Random, most: float, heads: int = 6, batch: int = 4) -> dict[str, int]:
    """Draw a batch size and a number of heads whose product is at most ``most``, or 1."""
    drawn = rng.randint(1, max(1, min(heads, int(most))))
    return {"batch": rng.randint(1, max(1, min(batch, int(most) // drawn))), "heads": drawn}
