"""Draw the sizes and settings of random cases, and lay out their tensors in memory.

B batch, N tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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


class Problem(NamedTuple):
    """The tensors of a case and the functions that compare on them.

    Attributes:
        inputs: inputs by name.
        outputs: names of the outputs.
        gradients: output gradients.
        run: calls the op on the inputs with an implementation.
        expect: computes the same outputs from float64 inputs, independent of the kernels.
    """

    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    gradients: Sequence[Tensor]
    run: Callable[[Sequence[Tensor], str], Sequence[Tensor]]
    expect: Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Numbers:
    """The tensors of one case, the same on every device.

    Args:
        seed: seed of all numbers.
        dtype: type of the inputs.
        device: where tensors are placed.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def weight(self, x: Tensor, kind: str) -> Tensor:
        """Place a tensor on the device, in float32 or, with kind "input", in the type of the inputs."""
        return x.to(self.device, self.dtype if kind == "input" else torch.float32)

    def inputs(self, layout: str, *tensors: Tensor) -> list[Tensor]:
        """Place tensors [B, N, ...] on the device, in the type of the inputs and a memory layout of `LAYOUTS`.

        Memory between and around the numbers of strided and surrounded tensors is NaN.
        """
        placed = [x.to(self.device, self.dtype) for x in tensors]
        if layout == "packed":
            return _pack(placed)
        return [_lay_out(x, layout) for x in placed]

    def gradient(self, layout: str, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw an output gradient; an expanded one is the gradient of a sum."""
        if layout == "expanded":
            return torch.full((), scale, device=self.device, dtype=self.dtype).expand(shape)
        return self.inputs(layout, scale * self.normal(*shape))[0]


def _pack(tensors: list[Tensor]) -> list[Tensor]:
    """Make tensors views of one: of [B, N, 3, ...] where their shapes agree, else of joined last dims."""
    if len({x.shape for x in tensors}) > 1:
        return list(torch.cat(tensors, -1).split([x.shape[-1] for x in tensors], -1))
    others = max(0, 3 - len(tensors))
    return list(torch.stack([*tensors, *[tensors[0]] * others], 2).unbind(2))[: len(tensors)]


def _lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "head_major":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "surrounded":
        around = F.pad(x, (3, 5, *(1, 2) * (x.ndim - 1)), value=torch.nan)
        return around[(*[slice(1, -2)] * (x.ndim - 1), slice(3, -5))]
    return x
