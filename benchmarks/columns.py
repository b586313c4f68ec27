"""What the benchmarks of ops share: columns, correct before they are timed, measured at the shapes.

A shape is anything with a name, group, batch, tokens and floor_bytes, as that of `mhla_cases`.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import once_ms, peak_mib, time_calls

COLD_BYTES = 2**28  # all copies of the inputs together: several times the L2 of any GPU of today
BACKWARD_OVER_FORWARD = 3  # a guess at forward with backward from forward alone, to skip what would take too long
Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """An op: ``make`` draws its inputs for a shape, ``run`` takes the shape and them."""

    name: str
    make: Callable[[Any, torch.Generator], tuple[Tensor, ...]]
    run: Callable[..., Tensor]
    ours: bool = False
    scaling: bool = False  # whether it is measured at the "scaling" shapes as well
    max_tokens: int | None = None

    def applies(self, shape: Any) -> bool:
        return (self.scaling or shape.group != "scaling") and shape.tokens <= (self.max_tokens or shape.tokens)


def results(run: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Output and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def warm_up(shape: Any, column: Column, generator: torch.Generator) -> None:
    """Compile what the column needs at the shape, into Triton's cache on disk."""
    inputs = column.make(shape, generator)
    with torch.no_grad():
        column.run(shape, *inputs)
    out = column.run(shape, *inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


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
        return row, str(error).strip().partition("\n")[0] or type(error).__name__
    skipped = [name for name, key in (("forward", "forward"), ("forward+backward", "both")) if row[key] is None]
    return row, f"{', '.join(skipped)} beyond {limit_ms:g} ms" if skipped else ""


def _measure(row: Row, shape: Any, column: Column, device: torch.device, limit_ms: float) -> None:
    def make(copy: int) -> tuple[tuple[Tensor, ...], Tensor]:
        inputs = column.make(shape, torch.Generator(device).manual_seed(copy))
        with torch.no_grad():
            return inputs, torch.randn_like(column.run(shape, *inputs))

    @torch.no_grad()
    def forward(inputs: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        return column.run(shape, *inputs)

    def both(inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(column.run(shape, *inputs), inputs, grad)

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
