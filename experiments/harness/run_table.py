"""A table of training runs that outlives an interruption: one row for each, found again by the hash of its recipe."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from experiments.harness.classifier_runs import Result, Run, size_of
from headmix_vision.files.locks import hold_lock
from headmix_vision.files.result_table import ResultTable

KEYS = 8  # columns that tell rows apart
COLUMNS = (
    *("task", "core", "mix", "options", "mlp_ratio", "dataset", "rate", "seed", "parameters", "flops", "epochs"),
    *("top1_percent", "test_top1_percent", "train_loss", "recipe"),
)


class RunTable:
    """Results of runs, in a CSV file that is rewritten whole with every new one.

    Args:
        path: The file; its rows are kept, and count for the runs whose recipe they have.

    Raises:
        ValueError: The file is of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.rows = ResultTable(path, COLUMNS, KEYS, lambda key: key)

    def __contains__(self, run: Run) -> bool:
        return self.rows.row(_key(run), recipe(run)) is not None

    def __bool__(self) -> bool:
        return bool(self.rows.rows)

    def add(self, run: Run, result: Result) -> None:
        """Add or replace the row of a run."""
        size, scores = size_of(run.network), {"top1_percent": result.top1, "test_top1_percent": result.test_top1}
        counts = {"parameters": size.parameters, "flops": size.flops, "epochs": result.epochs}
        self.rows.add(_key(run), **counts, **scores, train_loss=f"{result.loss:.4f}", recipe=recipe(run))

    def values(self, runs: Iterable[Run], column: str) -> list[float]:
        """One column of the runs that have a row."""
        found = (self.rows.row(_key(run), recipe(run)) for run in runs)
        return [float(row[column]) for row in found if row]


def _key(run: Run) -> tuple[object, ...]:
    network = run.network
    described = (network.task, network.core, network.mix, json.dumps(dict(network.options)), network.mlp_ratio)
    return (*described, run.dataset, f"{run.rate:.3g}", run.seed)


@contextmanager
def open_table(path: Path) -> Iterator[RunTable]:
    """The table of a file that no other call writes to meanwhile; ends the process where that is impossible."""
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(path.with_name(f".{path.name}.lock"), f"table {path}"))
            table = RunTable(path)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
        yield table


def recipe(run: Run) -> str:
    """Hash of everything that the row of a run depends on."""
    return hashlib.sha256(shlex.join([*run.command(), f"patience={run.patience}"]).encode()).hexdigest()[:8]


def describe(run: Run) -> str:
    """What a run is called in a line of progress."""
    network = run.network
    options = "".join(f" {name}={value}" for name, value in network.options)
    width = "" if network.mlp_ratio == 4 else f" mlp_ratio={network.mlp_ratio:.3f}"
    return f"{run.dataset} {network.core} {network.mix}{options}{width} rate {run.rate:.3g} seed {run.seed}"
