"""Time and memory of `mhla` against the copy floor, softmax, the released maths, linear and sliding attention.

    python -m benchmarks.bench_mhla                        # every shape; writes results/mhla_<device>.csv and the plot
    python -m benchmarks.bench_mhla --shapes deit,k4       # a few rows, printed only (--out DIR writes them)
    python -m benchmarks.bench_mhla --causal --shapes model --out benchmarks/results  # mhla_causal_...
    python -m benchmarks.bench_mhla --device cpu --tiny    # tries the script itself where there is no GPU

bf16; `columns.py` describes gate, times and memory. Floor: q, k, v read and o written once, with backward 11/4 of that.
Our columns, flash_packed, cudnn_packed, flash4 and natten read strided views of a packed projection, as a model has
them. Other columns have the layout that suits them best: the released maths block order, flex_* tile order, fla_*
[B, N, H, D], the rest [B, H, N, D]. The released maths cannot divide unevenly: 196 and 197 tokens are padded to
blocks of 16.

Linear attention: `linear_kernel` is MHLA with one block by our kernels, `linear_compiled` PyTorch operations through
torch.compile, `fla_fused_chunk` and `fla_chunk` flash-linear-attention's, always causal, their feature map compiled.
Sliding attention at Wan's shape: each query sees three of MHLA's blocks along each axis, 18 % of the tokens, by tiles
(`flex_tile`) or around itself (`flex_token`, `natten`). Columns of packages that are missing are left out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.columns import (
    Column,
    Row,
    add_column_options,
    beyond_budget,
    cells_of,
    choose,
    importable,
    measure_all,
    print_exponents,
    print_rows,
    results,
    run_checks,
    warm_up,
)
from benchmarks.mhla_cases import (
    COLUMNS,
    DEFAULT_COLUMNS,
    LINEAR,
    NOT_CAUSAL,
    SHAPES,
    Shape,
    one_block,
    raster_inputs,
    run_low_precision,
    run_mhla,
)
from benchmarks.plots import draw_mhla
from headmix_lab.measuring import begin, results_path, write_csv

GATE_BATCH, GATE_HEADS = 2, 2
REFERENCE_MAX_TOKENS = (
    1024  # up to here the oracle is the N x N reference, beyond it the float64 PyTorch implementation
)
GRADIENT_NAMES = ("dq", "dk", "dv", "dmixing")


def check_shape(shape: Shape, column_names: Sequence[str], device_name: str) -> list[str]:
    """One line for each result of our columns that misses its budget at this shape, at a small batch."""
    device = torch.device(device_name)
    small = replace(shape, batch=min(shape.batch, GATE_BATCH), heads=min(shape.heads, GATE_HEADS))
    generator = torch.Generator(device).manual_seed(0)
    inputs = raster_inputs(small, generator)
    grad = torch.randn(inputs[0].shape, generator=generator, device=device, dtype=inputs[0].dtype)
    oracle = "reference" if shape.tokens <= REFERENCE_MAX_TOKENS else "torch"

    exact = results(partial(run_mhla, oracle, small), [x.double() for x in inputs], grad.double())
    eager = results(partial(run_low_precision, small), inputs, grad)
    names = ("out", *GRADIENT_NAMES)[: 5 if shape.blocks.num_blocks > 1 else 4]  # the mixing of one block cancels
    failures = []
    for name in column_names:
        found = results(partial(COLUMNS[name].run, small), inputs, grad)
        failures += beyond_budget(f"{shape.name}, {name}", found, eager, exact, names, ("mean", "max"))
    if device.type == "cuda":
        for name in column_names:
            warm_up(shape, COLUMNS[name], generator)
    return failures


def gate(shapes: Sequence[Shape], columns: Sequence[Column], device: torch.device, jobs: int) -> None:
    """Exit with the failures, if any: speed is reported for right results only. Processes share the compiling."""
    ours, work = [c for c in columns if c.ours], []
    for shape in shapes:
        names = [c.name for c in ours if c.applies(shape)]
        work += [(shape, some)] if (some := [name for name in names if name != LINEAR]) else []
        work += [(one_block(shape), [LINEAR])] if LINEAR in names else []
    run_checks(partial(_check, device_name=str(device)), work, jobs)
    found = ", ".join(c.name for c in ours) or "nothing of ours"
    print(f"correct: {found} at {len(shapes)} shapes, all gradients\n")


def _check(item: tuple[Shape, list[str]], device_name: str) -> list[str]:
    return check_shape(*item, device_name)


def _describe(shape: Shape) -> Row:
    sizes = cells_of(shape, "batch", "heads", "tokens", "head_dim", "grid", "block_grid")
    return sizes | {"prefix_tokens": shape.prefix}


def floor_bytes(shape: Shape) -> tuple[float, float]:
    return shape.floor_bytes, shape.floor_bytes * 11 / 4


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--causal", action="store_true", help="tokens see those before them in the order of blocks")
    add_column_options(parser, COLUMNS, limit_ms=150)
    arguments = parser.parse_args(argv)
    shapes, names, device = choose(arguments, SHAPES, COLUMNS, DEFAULT_COLUMNS)
    if arguments.causal:
        shapes = [replace(shape, causal=True) for shape in shapes]
        if arguments.columns and (found := [name for name in names if name in NOT_CAUSAL]):
            raise SystemExit(f"error: --columns {found[0]} cannot be causal: leave it out, or --causal.")
        names = [name for name in names if name not in NOT_CAUSAL]
    columns = importable(COLUMNS[name] for name in names)
    partly = arguments.columns or arguments.tiny or arguments.causal
    whole = arguments.shapes == "all" and not partly and device.type == "cuda"
    jobs = arguments.jobs or (min(8, max(1, (os.cpu_count() or 1) // 2)) if device.type == "cuda" else 1)

    begin(device)
    gate(shapes, columns, device, jobs)
    rows, notes = measure_all(shapes, columns, device, arguments.limit_ms, _describe, floor_bytes)
    print_rows(rows, names[0])
    print_exponents(rows, "scaling", "batch and blocks")
    print(*notes, sep="\n")
    path = results_path(arguments, "mhla_causal" if arguments.causal else "mhla", whole)
    write_csv(path, rows)
    if path is not None and any(row["group"] == "sweep" for row in rows):
        draw_mhla(rows, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
