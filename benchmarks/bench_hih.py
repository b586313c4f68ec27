"""Time and memory of `head_in_head` against flash-linear-attention, its own loop and torch form, MHLA, and SDPA.

    python -m benchmarks.bench_hih                         # everything; writes results/hih_<device>.csv and the plot
    python -m benchmarks.bench_hih --quick                 # r = 1, r = 4 and fla, without the shapes of fixed batch
    python -m benchmarks.bench_hih --shapes n1024 --columns r1,fla
    python -m benchmarks.bench_hih --device cpu --tiny     # tries the script itself where there is no GPU

bf16, forward without saved state and forward with backward (all gradients). "r1" to "r8" are the kernels with that many
sub-heads, "torch_r1" to "torch_r8" the chunk form in plain PyTorch, "loop_r1" the loop over tokens, and "fla" the gated
delta rule of flash-linear-attention (package fla-core), the same function as r = 1; without the package its rows are
left out. All of these read q, k, v [B, N, H, D] with q and k normalised, beta and log decay in float32. MHLA reads
views of a packed projection with 16 or 64 blocks, FlashAttention and cuDNN [B, H, N, D]: other functions, for scale.

Floor: q, k, v read and o written once, with beta and log decay read, at the bandwidth of a large copy measured in the
same run; with backward do read and dq, dk, dv written as well, q, k, v and gates read again, the gradients of the gates
written. Times are medians over rotating copies of the inputs, as `measuring.py` says; tables show CUDA graph replays,
the CSV also plain launches. "refused": the library refuses to run it here; "–": does not apply, or slower than
--limit_ms. A note below the tables says which and why. Peak memory is that of forward with backward beyond the inputs.

Before anything is timed, output, final state and all gradients of ours, with a mask for each head and for each token,
are compared with the float64 torch form at a small shape, and r = 1 with flash-linear-attention. Relative errors (norm
of the difference over norm) must be at most 0.01, else nothing is timed and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.columns import Column, Row, measure, run_checks, scaling_exponents, warm_up
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
from benchmarks.hih_report import bars, draw, tables
from benchmarks.measuring import (
    add_options,
    copy_bandwidth,
    environment,
    open_device,
    release_memory,
    results_path,
    write_csv,
)
from benchmarks.mhla_cases import Shape, select_shapes
from headmix_vision.files.origins import installed_version
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


def measure_all(
    shapes: Sequence[Shape], columns: Sequence[Column], device: torch.device, limit_ms: float
) -> tuple[list[Row], list[str]]:
    """A CSV row for each shape and column, and the notes."""
    bandwidth = copy_bandwidth(device)
    print(f"copy: {bandwidth / 1e12:.3g} TB/s; ms forward, forward with backward:")
    facts = {"copy_tb_per_s": bandwidth / 1e12, "dtype": "bfloat16", "fla": installed_version("fla-core")}
    facts |= environment(device)
    rows, notes = [], []
    for shape in shapes:
        floors = [size / bandwidth * 1e3 for size in floor_bytes(shape)]
        print(f"{shape.name} ...", end=" ", flush=True)
        for column in columns:
            if not column.applies(shape):
                continue
            row, reason = measure(shape, column, device, limit_ms)
            release_memory()
            if reason and column.name == "fla" and "beyond" not in reason:
                reason = f"refused by fla: {reason}"
            notes += [f"{shape.name}, {column.name}: {reason}"] if reason else []
            rows.append(_describe(shape, column) | _times(row, floors) | {"note": reason} | facts)
            print(
                column.name, *("-" if row[key] is None else f"{row[key]:.3f}" for key in ("forward", "both")), end=" "
            )
        print(flush=True)
    return rows, notes


def _describe(shape: Shape, column: Column) -> Row:
    return {
        "shape": shape.name,
        "group": shape.group,
        "batch": shape.batch,
        "tokens": shape.tokens,
        "heads": shape.heads,
        "head_dim": shape.head_dim,
        "column": column.name,
    }


def _times(row: Row, floors: Sequence[float]) -> Row:
    return {
        "forward_floor_ms": floors[0],
        "forward_ms": row["forward"],
        "forward_launched_ms": row["forward_launched"],
        "forward_backward_floor_ms": floors[1],
        "forward_backward_ms": row["both"],
        "forward_backward_launched_ms": row["both_launched"],
        "peak_mib": row["peak_mib"],
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="all", help=f"of {', '.join(s.name for s in SHAPES)}, or groups, by commas")
    parser.add_argument("--columns", help=f"of {', '.join(COLUMNS)}, separated by commas")
    parser.add_argument("--quick", action="store_true", help=f"--shapes model,sweep --columns {QUICK_COLUMNS}")
    add_options(parser, tiny="small versions of the shapes")
    parser.add_argument("--limit_ms", type=float, default=300, help="skip what takes longer for one call")
    parser.add_argument("--jobs", type=int, help="processes of the correctness gate (they compile kernels)")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.shapes, arguments.columns = "model,sweep", arguments.columns or QUICK_COLUMNS
    return arguments


def select_columns(names: Sequence[str]) -> list[Column]:
    """The columns; that of flash-linear-attention is left out, and this said, where the package is not installed."""
    if reason := why_no_fla() if "fla" in names else None:
        print(f"fla: {reason}, its rows are left out")
        names = [name for name in names if name != "fla"]
    return [COLUMNS[name] for name in names]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        shapes = select_shapes(arguments.shapes, SHAPES)
    except ValueError as error:
        raise SystemExit(f"error: --{error}") from None
    if unknown := [name for name in (arguments.columns or "").split(",") if name and name not in COLUMNS]:
        raise SystemExit(f"error: --columns must be of {', '.join(COLUMNS)}, got {unknown[0]!r}.")
    if arguments.limit_ms <= 0 or (arguments.jobs is not None and arguments.jobs < 1):
        raise SystemExit(f"error: --limit_ms {arguments.limit_ms:g} and --jobs {arguments.jobs} must be positive.")
    device = open_device(arguments.device)
    columns = select_columns(arguments.columns.split(",") if arguments.columns else DEFAULT_COLUMNS[device.type])
    if arguments.tiny:
        shapes = [shape.tiny() for shape in shapes]
    whole = arguments.shapes == "all" and not (arguments.columns or arguments.tiny) and device.type == "cuda"
    jobs = arguments.jobs or ((os.cpu_count() or 1) if device.type == "cuda" else 1)

    gc.freeze()
    facts = environment(device)
    print(f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}, bf16")
    gate(shapes, columns, device, jobs)
    rows, notes = measure_all(shapes, columns, device, arguments.limit_ms)
    print(f"\n{tables(rows)}\n")
    print(*bars(rows), sep="\n")
    for group, what in (("sweep", "tokens in all fixed, per image"), ("scaling", "batch fixed")):
        for name, (forward, both) in scaling_exponents(rows, group).items():
            print(f"{name}: time grows as N^{forward:.3f} forward, N^{both:.3f} with backward ({what})")
    print(*notes, sep="\n")
    path = results_path(arguments, "hih", whole)
    write_csv(path, rows)
    if path is not None and any(row["group"] == "scaling" for row in rows):
        draw(rows, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
