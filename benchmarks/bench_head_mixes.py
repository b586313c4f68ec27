"""Time of head mixes: the mix alone, interleaved heads (IHA) over softmax and over MHLA, and the whole layer.

    python -m benchmarks.bench_head_mixes                      # everything; writes results/head_mixes_<device>.csv
    python -m benchmarks.bench_head_mixes --shapes n1024_p4 --parts mix op
    python -m benchmarks.bench_head_mixes --device cpu --tiny        # tries the script itself where there is no GPU

DeiT-S (6 heads of 64 dims) at 224 and 512 px with 2 and 4 pseudo-heads, bf16; `columns.py` describes gate and times.

- mix: queries, keys and values, views of a packed projection, to their pseudo-heads;
- collapse: the outputs of all pseudo-heads to the outputs of heads;
- op: mix, attention between all pseudo-heads of all tokens, collapse. Softmax runs on FlashAttention and on cuDNN, its
  mixes in our kernel and as a compiled einsum ("_einsum"); ratios are to the fastest of these;
- layer: `HeadMixAttention` compiled, under autocast, projections included.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.columns import (
    Column,
    Row,
    Tensors,
    beyond_budget,
    cells_of,
    measure_all,
    print_rows,
    results,
    run_checks,
)
from benchmarks.head_mixes_cases import CONTESTS, SHAPES, Contest, Shape, layer_input, make_layer
from headmix_lab.measuring import add_options, begin, open_device, release_memory, results_path, write_csv

CORES = ("mhla", "softmax")
GATE_BATCH = 2


def check_contest(contest: Contest, shape: Shape, device: torch.device) -> list[str]:
    """One line for each result of ours that misses its budget, at a small batch."""
    small = replace(shape, batch=GATE_BATCH)
    generator = torch.Generator(device).manual_seed(0)
    inputs = contest.make(small, generator)
    with torch.no_grad():
        d_outs = tuple(torch.randn_like(x) for x in contest.eager(small, *inputs))
    exact = results(partial(contest.exact, small), [x.double() for x in inputs], d_outs)
    eager = results(partial(contest.eager, small), inputs, d_outs)
    names = [*(f"output {i}" for i in range(len(d_outs))), *(f"d_input {i}" for i in range(len(inputs)))]
    failures = []
    for column in (c for c in contest.columns if c.ours):
        found = results(partial(column.run, small), inputs, d_outs)
        failures += beyond_budget(f"{shape.name}, {column.name} of {contest.name}", found, eager, exact, names)
    return failures


def describe(part: str, shape: Shape) -> Row:
    cells = cells_of(shape, "batch", "tokens", "heads", "head_dim", "pseudo_heads")
    del cells["group"]
    return {"shape": cells.pop("shape"), "part": part, **cells}


def time_contest(contest: Contest, shape: Shape, device: torch.device) -> list[Row]:
    """Time all columns of a contest that run on the device."""
    columns = [column for column in contest.columns if column.device in (None, device.type)]
    units = contest.units
    floors = (lambda shape: tuple(n * shape.unit_bytes for n in units(shape))) if units else None
    rows, notes = measure_all([shape], columns, device, math.inf, partial(describe, contest.name), floors)
    print(*notes, sep="\n")
    return rows


def time_layers(shape: Shape, device: torch.device) -> list[Row]:
    """Time the layer over each core, once its compiled form agrees with float64."""
    rows = []
    for core in CORES:
        layer = make_layer(core, shape, device)
        compiled = torch.compile(layer, dynamic=False) if device.type == "cuda" else layer
        parameters = tuple(p for p in layer.parameters() if p.requires_grad)

        def run(_: Shape, x: Tensor, *__: Tensor, call: Callable[[Tensor], Tensor] = compiled) -> Tensors:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                return (call(x),)

        def make(shape: Shape, generator: torch.Generator, parameters: Tensors = parameters) -> Tensors:
            return (layer_input(shape, generator), *parameters)

        run_checks(lambda call: _check_layer(*call), [(layer, partial(run, shape), core, shape, device)], jobs=1)
        column = Column(core, make, run, ours=True)
        rows += measure_all([shape], [column], device, math.inf, partial(describe, "layer"), None)[0]
        torch.compiler.reset()
        release_memory()
    return rows


def _check_layer(
    layer: torch.nn.Module, run: Callable[..., Tensors], core: str, shape: Shape, device: torch.device
) -> list[str]:
    """Compare the first images of the whole batch, which do not depend on the others, with float64."""
    x = layer_input(shape, torch.Generator(device).manual_seed(0))
    d_out = torch.randn(x.shape, generator=torch.Generator(device).manual_seed(1), device=device)
    first = slice(GATE_BATCH)

    def eager(x: Tensor) -> Tensors:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return (layer(x),)

    exact = results(lambda x: copy.deepcopy(layer).double()(x), [x[first].double()], d_out[first])
    found = [y[first] for y in results(run, [x], d_out)]
    budget = results(eager, [x[first]], d_out[first])
    return beyond_budget(f"{shape.name}, layer over {core}", found, budget, exact, ("out", "dx"))


def print_ratios(rows: Sequence[Row]) -> None:
    """Print how many times as fast IHA is over MHLA as over the fastest softmax, for the op and for the layer."""
    for shape, part in dict.fromkeys((row["shape"], row["part"]) for row in rows if row["part"] in ("op", "layer")):
        some = [row for row in rows if (row["shape"], row["part"]) == (shape, part)]
        ratios = []
        for key in ("forward_ms", "forward_backward_ms"):
            ours = next(row[key] for row in some if row["column"] == "mhla")
            others = [row[key] for row in some if row["column"] != "mhla" and row[key] is not None]
            ratios.append(f"{min(others) / ours:.2f}x" if others else "-")
        print(f"{shape}, {part}: over MHLA {ratios[0]} as fast as over softmax forward, {ratios[1]} with backward")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parts, shapes = (*CONTESTS, "layer"), [shape.name for shape in SHAPES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    add_options(parser, tiny="small versions of the shapes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    device = open_device(arguments.device)
    shapes = [shape.tiny() if arguments.tiny else shape for shape in SHAPES if shape.name in arguments.shapes]
    contests = [contest for name, contest in CONTESTS.items() if name in arguments.parts]
    begin(device)
    run_checks(lambda item: check_contest(*item, device), [(c, shape) for c in contests for shape in shapes], jobs=1)
    print(f"correct: ours in {', '.join(c.name for c in contests) or 'nothing'} at {len(shapes)} shapes, all gradients")

    rows: list[Row] = []
    for shape in shapes:
        for part in arguments.parts:
            rows += time_layers(shape, device) if part == "layer" else time_contest(CONTESTS[part], shape, device)
    print_rows([row | {"shape": f"{row['shape']}, {row['part']}"} for row in rows], "mhla")
    print_ratios(rows)
    whole = len(shapes) == len(SHAPES) and len(arguments.parts) == len(CONTESTS) + 1 and not arguments.tiny
    rows = [{"form" if name == "column" else name: x for name, x in row.items()} for row in rows]
    write_csv(results_path(arguments, "head_mixes", whole and device.type == "cuda"), rows)


if __name__ == "__main__":
    main()
