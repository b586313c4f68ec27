"""Time of the depthwise convolution on the token grid against the copy floor and PyTorch's, eager and compiled.

    python -m benchmarks.bench_conv                            # every shape; writes results/conv_<device>.csv
    python -m benchmarks.bench_conv --shapes video wan         # a few rows, printed only (--out DIR writes them)
    python -m benchmarks.bench_conv --device cpu --tiny        # tries the script itself where there is no GPU

bf16 tokens, float32 weights; `columns.py` describes gate and times. "cpe" shapes add the convolution to the input;
"hih" shapes apply SiLU after it and read one part of a packed projection. PyTorch's convolution moves channels in
front of the grid and back. Floor: x read and out written once, with backward 5/2 of that.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.columns import (
    Column,
    Row,
    beyond_budget,
    cells_of,
    measure_all,
    print_rows,
    results,
    run_checks,
    run_compiled,
)
from headmix_lab.measuring import add_options, begin, open_device, results_path, write_csv
from headmix_vision.ops import grid_conv

DTYPE = torch.bfloat16
GATE_BATCH = 2
CONVOLUTIONS = {2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Shape:
    """B images or clips of a grid of tokens with C channels; ``group`` is "cpe" or "hih"."""

    name: str
    batch: int
    grid: tuple[int, ...]
    channels: int
    group: str = "cpe"

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def options(self) -> dict[str, bool]:
        return {"residual": self.group == "cpe", "silu": self.group == "hih"}

    @property
    def floor_bytes(self) -> int:
        """Bytes read and written in the forward pass."""
        return 2 * self.batch * self.tokens * self.channels * DTYPE.itemsize

    def tiny(self) -> Shape:
        return replace(self, batch=2, grid=tuple(min(5, size) for size in self.grid), channels=24)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("deit_s_224", 128, (14, 14), 384),
        Shape("deit_s_512", 32, (32, 32), 384),
        Shape("dit_xl_256", 64, (16, 16), 1152),
        Shape("hih_deit_s", 128, (14, 14), 384, "hih"),
        Shape("video", 64, (8, 8, 8), 192),
        Shape("hih_video", 64, (8, 8, 8), 192, "hih"),
        Shape("wan", 1, (21, 30, 52), 1536),
    )
}


def make(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The tokens, for "hih" a part of a packed projection, the weight, and for "cpe" a bias."""
    normal = partial(torch.randn, generator=generator, device=generator.device)
    parts, C = 3 if shape.group == "hih" else 1, shape.channels
    packed = normal(shape.batch, shape.tokens, parts * C, dtype=DTYPE)
    weight = normal(C, 1, *[3] * len(shape.grid)) / 3 ** (len(shape.grid) / 2)
    inputs = (packed[..., -C:], weight, *([normal(C)] if shape.group == "cpe" else []))
    return tuple(x.detach().requires_grad_() for x in inputs)


def run_ours(shape: Shape, *inputs: Tensor) -> Tensor:
    return grid_conv(*inputs, grid=shape.grid, **shape.options)


def run_pytorch(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """With every step in the type of the tokens."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    images = x.transpose(1, 2).unflatten(2, shape.grid)
    out = CONVOLUTIONS[len(shape.grid)](images, weight, bias, padding=1, groups=x.shape[2])
    out = out.flatten(2).transpose(1, 2)
    out = x + out if shape.options["residual"] else out
    return F.silu(out) if shape.options["silu"] else out


COLUMNS = {
    "cuda": (
        Column("ours", make, run_ours, ours=True),
        Column("pytorch", make, run_pytorch),
        Column("compiled", make, partial(run_compiled, run_pytorch)),
    ),
    "cpu": (Column("ours", make, run_ours, ours=True), Column("pytorch", make, run_pytorch)),
}


def check_shape(shape: Shape, device: torch.device, run: Any = run_ours) -> list[str]:
    """One line for each result that misses its budget, at a small batch."""
    small = replace(shape, batch=min(shape.batch, GATE_BATCH))
    generator = torch.Generator(device).manual_seed(0)
    inputs = make(small, generator)
    grad = torch.randn(inputs[0].shape, generator=generator, device=device, dtype=DTYPE)
    exact = results(partial(run_pytorch, small), [x.double() for x in inputs], grad.double())
    eager, found = (results(partial(f, small), inputs, grad) for f in (run_pytorch, run))
    return beyond_budget(shape.name, found, eager, exact, ("out", "dx", "dweight", "dbias"))


def describe(shape: Shape) -> Row:
    return cells_of(shape, "batch", "grid", "channels")


def floor_bytes(shape: Shape) -> tuple[float, float]:
    return shape.floor_bytes, shape.floor_bytes * 5 / 2


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    add_options(parser, tiny="small versions of the shapes")
    parser.add_argument("--limit_ms", type=float, default=150, help="skip what takes longer for one call")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    device = open_device(arguments.device)
    shapes = [SHAPES[name].tiny() if arguments.tiny else SHAPES[name] for name in arguments.shapes]
    begin(device)
    run_checks(partial(check_shape, device=device), shapes, jobs=1)
    print(f"correct: ours at {len(shapes)} shapes, all gradients")
    rows, notes = measure_all(shapes, COLUMNS[device.type], device, arguments.limit_ms, describe, floor_bytes)
    print_rows(rows, "ours")
    print(*notes, sep="\n")
    whole = len(shapes) == len(SHAPES) and not arguments.tiny and device.type == "cuda"
    write_csv(results_path(arguments, "conv", whole), rows)


if __name__ == "__main__":
    main()
