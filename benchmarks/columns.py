"""Columns of the benchmarks of ops: checked before they are timed, and measured at shapes.

Gate: output and all gradients of our columns are compared with float64 at a small batch. The budget is the error of the
same maths with every step in the type of the inputs: twice for outputs, three times for gradients. A larger error ends
the script with exit code 1. Times are medians over rotating copies of the inputs (`measuring.py`): tables show CUDA
graph replays, CSV files plain launches as well. Peak memory is what forward with backward needs beyond the inputs.
"refused": the library does not run it here. "–": does not apply, or slower than --limit_ms.

A shape is anything with a name, group, batch, tokens and floor_bytes, as in `mhla_cases`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from headmix_lab.measuring import (
    add_options,
    copy_bandwidth,
    environment,
    once_ms,
    open_device,
    peak_mib,
    release_memory,
    time_calls,
)
from headmix_lab.tables import markdown_table

COLD_BYTES = 2**28  # all copies of the inputs together: several times the L2 of any GPU of today
BACKWARD_OVER_FORWARD = 3  # a guess at forward with backward from forward alone, to skip what would take too long
Row = dict[str, Any]


Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Column:
    """An op: ``make`` draws its inputs for a shape, ``run`` takes both and returns one or more tensors.

    Attributes:
        ours: Whether its results are checked before it is timed.
        scaling: Whether it is measured at the "scaling" shapes as well.
        only: Name of the one shape that it is measured at.
        device: Kind of the only device that it runs on.
        module, package: Module that it imports, and the package on PyPI that has it.
    """

    name: str
    make: Callable[[Any, torch.Generator], Tensors]
    run: Callable[..., Tensor | Tensors]
    ours: bool = False
    scaling: bool = False
    max_tokens: int | None = None
    only: str | None = None
    device: str | None = None
    module: str | None = None
    package: str | None = None

    def applies(self, shape: Any) -> bool:
        named = self.only in (None, shape.name)
        return (
            named and (self.scaling or shape.group != "scaling") and shape.tokens <= (self.max_tokens or shape.tokens)
        )


def importable(columns: Iterable[Column]) -> list[Column]:
    """Leave out the columns whose module cannot be imported, with a line for each."""
    found = []
    for column in columns:
        try:
            import_module(column.module or __name__)
        except Exception as error:  # of any kind: a package beside the wrong torch fails in its own way
            print(f"{column.name}: left out, {column.package} is missing or broken ({str(error).splitlines()[0]})")
        else:
            found.append(column)
    return found


@lru_cache
def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = 64  # one function compiles every shape
    return torch.compile(run, dynamic=False)


def run_compiled(run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call a function as ``torch.compile`` makes it; uncompiled where no tensor is on a GPU."""
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in inputs)
    return (_compiled(run) if on_gpu else run)(*inputs, **options)


def outputs_of(found: Tensor | Tensors) -> Tensors:
    return (found,) if isinstance(found, Tensor) else found


def results(run: Callable[..., Tensor | Tensors], inputs: Sequence[Tensor], grads: Tensor | Tensors) -> list[Tensor]:
    """Return outputs and the gradients of all inputs that are read."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = outputs_of(run(*leaves))
    weights = [grad.to(x) for grad, x in zip(outputs_of(grads), outs, strict=True)]
    gradients = torch.autograd.grad(outs, leaves, weights, allow_unused=True)
    return [*(x.detach() for x in outs), *(x for x in gradients if x is not None)]


def beyond_budget(
    where: str,
    found: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
    names: Sequence[str],
    kinds: Sequence[str] = ("mean",),
) -> list[str]:
    """Return a line for each result whose error exceeds its budget.

    Args:
        where: The op and shape in words.
        found: Results that are judged: outputs, then gradients.
        eager: The same with every step in the type of the inputs: an output may have twice
            their error, a gradient three times.
        exact: The same in float64.
        names: Names of the results; names of gradients begin with d.
        kinds: Errors that are compared: "mean", "max".
    """
    lines = []
    for name, x, y, reference in zip(names, found, eager, exact, strict=False):
        factor = 3 if name.startswith("d") else 2
        for kind in kinds:
            error, budget = (getattr((z.double() - reference).abs(), kind)().item() for z in (x, y))
            if not error <= factor * budget:
                lines.append(f"{where}: {kind} error of {name} is {error:.2e}, allowed {factor} x {budget:.2e}")
    return lines


def warm_up(shape: Any, column: Column, generator: torch.Generator) -> None:
    """Compile what the column needs at the shape, into Triton's cache on disk."""
    inputs = column.make(shape, generator)
    with torch.no_grad():
        column.run(shape, *inputs)
    outs = outputs_of(column.run(shape, *inputs))
    torch.autograd.grad(outs, inputs, [torch.ones_like(x) for x in outs])


def run_checks(check: Callable[..., list[str]], work: Sequence[Any], jobs: int) -> None:
    """Exit with the failures of ``check`` on the items of work, if any: speed is reported for right results only.

    With several jobs they run in processes, which share the compiling.
    """
    try:
        if jobs > 1:
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
                failures = [line for lines in pool.map(check, work) for line in lines]
        else:
            failures = [line for item in work for line in check(item)]
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if failures:
        raise SystemExit("\n".join([*failures, "error: results are wrong, nothing timed."]))


def measure(shape: Any, column: Column, device: torch.device, limit_ms: float) -> tuple[Row, str]:
    """Times and memory of a column at a shape, None where there is none, and the reason why.

    Returns:
        "forward" and "both" (with backward), also "_launched", in ms, "peak_mib" of both; the reason or "".
    """
    row: Row = dict.fromkeys(("forward", "forward_launched", "both", "both_launched", "peak_mib"))
    try:
        _measure(row, shape, column, device, limit_ms)
    except torch.OutOfMemoryError:
        return row, "out of memory"
    except Exception as error:  # of any kind: others refuse what they cannot run in their own ways
        if column.ours:
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return row, f"refused by {column.name}: {reason}"
    skipped = [name for name, key in (("forward", "forward"), ("forward+backward", "both")) if row[key] is None]
    return row, f"{', '.join(skipped)} beyond {limit_ms:g} ms" if skipped else ""


def cells_of(shape: Any, *names: str) -> Row:
    """Return name, group and these attributes of a shape; grids as 14x14."""
    values = {name: getattr(shape, name) for name in ("group", *names)}
    return {"shape": shape.name} | {
        name: "x".join(map(str, x)) if isinstance(x, tuple) else x for name, x in values.items()
    }


def measure_all(
    shapes: Sequence[Any],
    columns: Sequence[Column],
    device: torch.device,
    limit_ms: float,
    describe: Callable[[Any], Row],
    floor_bytes: Callable[[Any], tuple[float, float]] | None,
) -> tuple[list[Row], list[str]]:
    """Measure all columns at all shapes.

    Args:
        shapes: The shapes.
        columns: The columns; each is measured where it applies.
        device: Where they run.
        limit_ms: Longest call that is timed.
        describe: Return the cells that tell a shape.
        floor_bytes: Return the bytes that a shape must move forward, and with backward; None without a floor.

    Returns:
        A row for each shape and column, and a note for each missing time.
    """
    bandwidth = copy_bandwidth(device)
    print(f"copy: {bandwidth / 1e12:.3g} TB/s; ms forward, forward with backward:")
    facts = {"copy_tb_per_s": bandwidth / 1e12, "dtype": "bfloat16", **environment(device)}
    rows, notes = [], []
    for shape in shapes:
        floors = [size / bandwidth * 1e3 for size in floor_bytes(shape)] if floor_bytes else [None, None]
        print(f"{shape.name} ...", end=" ", flush=True)
        for column in (column for column in columns if column.applies(shape)):
            found, reason = measure(shape, column, device, limit_ms)
            release_memory()
            notes += [f"{shape.name}, {column.name}: {reason}"] if reason else []
            times: Row = {"column": column.name}
            for name, key, floor in zip(("forward", "forward_backward"), ("forward", "both"), floors, strict=True):
                times |= {f"{name}_floor_ms": floor, f"{name}_ms": found[key]}
                times[f"{name}_launched_ms"] = found[f"{key}_launched"]
            rows.append(describe(shape) | times | {"peak_mib": found["peak_mib"], "note": reason} | facts)
            shown = ("-" if found[key] is None else f"{found[key]:.3f}" for key in ("forward", "both"))
            print(column.name, *shown, end=" ", flush=True)
        print(flush=True)
    return rows, notes


def add_column_options(parser: argparse.ArgumentParser, columns: Iterable[str], limit_ms: float) -> None:
    """Add the options that choose shapes and columns."""
    parser.add_argument("--shapes", default="all", help="names, groups (model, sweep, scaling) or all, by commas")
    parser.add_argument("--columns", help=f"of {', '.join(columns)}, separated by commas")
    add_options(parser, tiny="small versions of the shapes")
    parser.add_argument("--limit_ms", type=float, default=limit_ms, help="skip what takes longer for one call")
    parser.add_argument("--jobs", type=int, help="processes of the correctness gate (they compile kernels)")


def select_shapes(names: str, among: Sequence[Any]) -> list[Any]:
    """Return shapes by comma-separated names or groups; "all" is every shape. End with one line for others."""
    chosen: list[Any] = []
    for name in names.split(","):
        found = [shape for shape in among if name in ("all", shape.name, shape.group)]
        if not found:
            known = [shape.name for shape in among if shape.group == "model"]
            raise SystemExit(
                f"error: --shapes must be of all, {', '.join(known)}, model, sweep, scaling, got {name!r}."
            )
        chosen += [shape for shape in found if shape not in chosen]
    return chosen


def choose(
    arguments: argparse.Namespace, shapes: Sequence[Any], columns: Iterable[str], defaults: Mapping[str, Sequence[str]]
) -> tuple[list[Any], list[str], torch.device]:
    """Return the shapes, names of columns and device that the options name; end with one line for others.

    `shapes` and `columns` are all that exist, `defaults` the columns of each device.
    """
    chosen = select_shapes(arguments.shapes, shapes)
    names = arguments.columns.split(",") if arguments.columns else []
    if unknown := set(names).difference(columns):
        raise SystemExit(f"error: --columns must be of {', '.join(columns)}, got {unknown.pop()!r}.")
    if arguments.limit_ms <= 0 or (arguments.jobs is not None and arguments.jobs < 1):
        raise SystemExit(f"error: --limit_ms {arguments.limit_ms:g} and --jobs {arguments.jobs} must be positive.")
    device = open_device(arguments.device)
    shapes = [shape.tiny() if arguments.tiny else shape for shape in chosen]
    return shapes, names or list(defaults[device.type]), device


def print_rows(rows: Sequence[Row], base: str) -> None:
    """Print times in ms, in brackets over the floor and over a column, and peak memory."""
    ours = {row["shape"]: row for row in rows if row["column"] == base}

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else f"{value:{form}}"

    def cell(row: Row, time: str) -> str:
        ms = row[f"{time}_ms"]
        if ms is None:
            return "refused" if row["note"].startswith("refused") else "–"
        bases = (row[f"{time}_floor_ms"], ours.get(row["shape"], {}).get(f"{time}_ms"))
        return f"{ms:.3f} ({', '.join(number(base and ms / base, '.2f') for base in bases)})"

    lines = [
        [row["shape"], row["column"], cell(row, "forward"), cell(row, "forward_backward")]
        + [number(row[f"{time}_launched_ms"], ".3f") for time in ("forward", "forward_backward")]
        + [number(row["peak_mib"], ",.0f")]
        for row in rows
    ]
    header = ["shape", "column", "forward, ms", "forward + backward", "launched", "with backward", "peak MiB"]
    print(f"\nin brackets: over the floor, over {base}\n\n{markdown_table(header, lines)}\n")


def print_exponents(rows: Sequence[Row], group: str, fixed: str) -> None:
    """Print how times grow with the tokens, at the shapes of a group."""
    for name, (forward, both) in scaling_exponents(rows, group).items():
        print(f"{name}: time grows as N^{forward:.3f} forward, N^{both:.3f} with backward ({fixed} fixed)")


def _measure(row: Row, shape: Any, column: Column, device: torch.device, limit_ms: float) -> None:
    def make(copy: int) -> tuple[Tensors, Tensors]:
        inputs = column.make(shape, torch.Generator(device).manual_seed(copy))
        with torch.no_grad():
            return inputs, tuple(torch.randn_like(x) for x in outputs_of(column.run(shape, *inputs)))

    @torch.no_grad()
    def forward(inputs: Tensors, grads: Tensors) -> Tensors:
        return outputs_of(column.run(shape, *inputs))

    def both(inputs: Tensors, grads: Tensors) -> Tensors:
        return torch.autograd.grad(outputs_of(column.run(shape, *inputs)), inputs, grads, allow_unused=True)

    first = make(0)
    forward_ms = once_ms(lambda: forward(*first), device)
    if forward_ms > limit_ms:
        return
    copies = [first]
    if device.type == "cuda":
        copies += [make(i) for i in range(1, max(2, math.ceil(COLD_BYTES * 4 / 3 / shape.floor_bytes)))]
    for name, call in (("forward", forward), ("both", both)):
        if name == "both":
            if BACKWARD_OVER_FORWARD * forward_ms > limit_ms:
                return
            row["peak_mib"] = peak_mib(lambda: both(*first), device)
        timing = time_calls([partial(call, *copy) for copy in copies], device)
        row[name], row[f"{name}_launched"] = timing.ms, timing.launched_ms


def scaling_exponents(rows: Sequence[Row], group: str = "scaling") -> dict[str, tuple[float, float]]:
    """Per column, p of time per batch item ~ N^p by least squares: forward, forward with backward.

    Args:
        rows: with "column", "group", "batch", "tokens", "forward_ms" and "forward_backward_ms".
        group: of the shapes to take; columns which lack a time at one of them are left out.
    """
    exponents = {}
    for name in dict.fromkeys(row["column"] for row in rows):
        points = [row for row in rows if row["group"] == group and row["column"] == name]
        times = [[row[key] for row in points] for key in ("forward_ms", "forward_backward_ms")]
        if len(points) > 1 and all(t is not None for series in times for t in series):
            tokens = [math.log(row["tokens"]) for row in points]
            items = [[math.log(t / row["batch"]) for t, row in zip(x, points, strict=True)] for x in times]
            slopes = [statistics.linear_regression(tokens, series).slope for series in items]
            exponents[name] = (slopes[0], slopes[1])
    return exponents
