"""Time and memory of `head_in_head` against flash-linear-attention, its own loop and torch form, MHLA, and SDPA.

    python -m benchmarks.bench_hih                         # everything; writes results/hih_<device>.csv and the plot
    python -m benchmarks.bench_hih --quick                 # r = 1, r = 4 and fla, without the shapes of fixed batch
    python -m benchmarks.bench_hih --shapes n1024 --columns r1,fla
    python -m benchmarks.bench_hih --device cpu --tiny     # tries the script itself where there is no GPU

bf16; `columns.py` describes times and memory. "r1" to "r8" are the kernels with that many sub-heads, "torch_r1" to
"torch_r8" the chunk form in plain PyTorch, "loop_r1" the loop over tokens. "fla" is the gated delta rule of
flash-linear-attention (package fla-core), the same function as r = 1. MHLA, FlashAttention and cuDNN are other
functions, for scale. Floor: `hih_cases.floor_bytes`.

Before anything is timed, output, final state and all gradients of our columns are compared with the float64 torch form
at a small shape, with a mask for each head and for each token, and r = 1 with flash-linear-attention. A relative error
above 0.01 ends the script with exit code 1.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.columns import (
    Column,
    Row,
    add_column_options,
    cells_of,
    choose,
    measure_all,
    print_exponents,
    print_rows,
    run_checks,
    warm_up,
)
from benchmarks.hih_cases import (
    COLUMNS,
    DEFAULT_COLUMNS,
    SHAPES,
    DeltaColumn,
    delta_inputs,
    floor_bytes,
    run_fla,
    sub_head_mask,
    why_no_fla,
)
from benchmarks.mhla_cases import Shape
from benchmarks.plots import draw_hih
from headmix_lab.measuring import begin, release_memory, results_path, write_csv
from headmix_lab.tables import installed_version
from headmix_vision.ops import head_in_head

MAX_RELATIVE_ERROR = 0.01  # bf16 has 8 bits: rounding the result alone costs 0.002
GATE_SHAPE = Shape("gate", 2, 2, (197,), 64, (1,))
RESULTS = ("out", "final_state", "dq", "dk", "dv", "dbeta", "dlog_decay", "dmask", "dinitial_state")
QUICK_COLUMNS = "r1,r4,fla"


def check_column(column: DeltaColumn, mask: str, device: torch.device, shape: Shape = GATE_SHAPE) -> list[str]:
    """One line for each result of a column of ours which is further from the float64 torch form than allowed.

    Args:
        column: the column.
        mask: one for each "head", or for each "token".
        device: where it runs.
        shape: of the inputs.
    """
    lead = (shape.batch, shape.tokens) if mask == "token" else ()
    generator = torch.Generator(device).manual_seed(0)
    inputs = list(delta_inputs(shape, generator))
    inputs.append(sub_head_mask((*lead, shape.heads, column.r, column.r), generator))
    size = (shape.batch, shape.heads, shape.head_dim, shape.head_dim)
    inputs.append(torch.randn(size, generator=generator, device=device))
    weights = [torch.randn(x.shape, generator=generator, device=device).to(x.dtype) for x in (inputs[2], inputs[-1])]
    ours = _delta_results(column.impl, inputs, weights)
    exact = _delta_results("torch", [x.double() for x in inputs], weights)
    failures = []
    for name, x, reference in zip(RESULTS, ours, exact, strict=True):
        failures += _failure(f"{name} of {column.name} with a mask for each {mask}", x, reference)
    return failures


def check_fla(device: torch.device, impl: str, shape: Shape = GATE_SHAPE) -> list[str]:
    """One line if r = 1 is not the function of flash-linear-attention."""
    inputs = [x.detach() for x in delta_inputs(shape, torch.Generator(device).manual_seed(0))]
    out, _ = head_in_head(*inputs, torch.ones(shape.heads, 1, 1, device=device), impl=impl)
    return _failure(f"out of {impl} with r = 1 against flash-linear-attention", out, run_fla(shape, *inputs))


def _delta_results(impl: str, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    *tensors, state = leaves
    values = head_in_head(*tensors, initial_state=state, output_final_state=True, impl=impl)
    gradients = torch.autograd.grad(values, leaves, [w.to(x) for x, w in zip(values, weights, strict=True)])
    return [*(x.detach() for x in values), *gradients]


def _failure(what: str, x: Tensor, reference: Tensor) -> list[str]:
    error = ((x.double() - reference.double()).norm() / reference.double().norm()).item()
    if error <= MAX_RELATIVE_ERROR:
        return []
    return [f"relative error of {what} is {error:.2e}, allowed {MAX_RELATIVE_ERROR:g}"]


def gate(shapes: Sequence[Shape], columns: Sequence[Column], device: torch.device, jobs: int) -> None:
    """Exit with the failures, if any; processes share the checks and the compiling of kernels at the shapes."""
    ours = [c.name for c in columns if c.ours]
    work = [(name, mask) for name in ours for mask in ("head", "token")]
    work += [(c.name, "") for c in columns if c.name == "fla"]
    if device.type == "cuda":
        compiled = ("fla", "mhla", *(c.name for c in columns if isinstance(c, DeltaColumn) and c.impl == "triton"))
        work += [(c.name, "warm") for c in columns if c.name in compiled]
    run_checks(partial(_check, shapes=shapes, device_name=str(device)), work, jobs)
    print(f"correct: {', '.join(ours) or 'nothing of ours'}, all gradients within {MAX_RELATIVE_ERROR:g}\n")


def _check(work: tuple[str, str], shapes: Sequence[Shape], device_name: str) -> list[str]:
    """A check of a column, or its kernels compiled at the shapes; short pieces, as many processes share them."""
    (name, what), device = work, torch.device(device_name)
    column = COLUMNS[name]
    if what == "warm":
        for shape in shapes:
            if column.applies(shape):
                try:
                    warm_up(shape, column, torch.Generator(device).manual_seed(0))
                except Exception:
                    if column.ours:
                        raise
                release_memory()
        return []
    if isinstance(column, DeltaColumn):
        return check_column(column, what, device)
    return check_fla(device, "triton" if device.type == "cuda" else "torch")


def describe(shape: Shape) -> Row:
    return cells_of(shape, "batch", "tokens", "heads", "head_dim")


def select_columns(names: Sequence[str]) -> list[Column]:
    """The columns, without flash-linear-attention's where the package is not installed; a line says so."""
    if reason := why_no_fla() if "fla" in names else None:
        print(f"fla: {reason}, its rows are left out")
        names = [name for name in names if name != "fla"]
    return [COLUMNS[name] for name in names]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"--shapes model,sweep --columns {QUICK_COLUMNS}")
    add_column_options(parser, COLUMNS, limit_ms=300)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.shapes, arguments.columns = "model,sweep", arguments.columns or QUICK_COLUMNS
    shapes, names, device = choose(arguments, SHAPES, COLUMNS, DEFAULT_COLUMNS)
    columns = select_columns(names)
    whole = arguments.shapes == "all" and not (arguments.columns or arguments.tiny) and device.type == "cuda"
    jobs = arguments.jobs or ((os.cpu_count() or 1) if device.type == "cuda" else 1)

    begin(device)
    gate(shapes, columns, device, jobs)
    rows, notes = measure_all(shapes, columns, device, arguments.limit_ms, describe, floor_bytes)
    rows = [row | {"fla": installed_version("fla-core")} for row in rows]
    print_rows(rows, columns[0].name)
    print_exponents(rows, "sweep", "tokens in all")
    print_exponents(rows, "scaling", "batch")
    print(*notes, sep="\n")
    path = results_path(arguments, "hih", whole)
    write_csv(path, rows)
    if path is not None and any(row["group"] == "scaling" for row in rows):
        draw_hih(rows, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
