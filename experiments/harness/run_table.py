"""A table of training runs that outlives an interruption: one row for each, found again by the hash of its recipe."""

from __future__ import annotations

import csv
import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from experiments.harness.classifier_runs import Result, Run, size_of
from headmix_vision.files.locks import hold_lock
from headmix_vision.files.result_table import write_table

COLUMNS = (
    *("task", "core", "mix", "options", "mlp_ratio", "dataset", "rate", "seed", "parameters", "flops", "epochs"),
    *("top1_percent", "test_top1_percent", "train_loss", "recipe"),
)

Row = dict[str, str]


class RunTable:
    """Results of runs, in a CSV file that is rewritten whole with every new one.

    Args:
        path: The file; its rows are kept, and count for the runs that they are of.

    Raises:
        ValueError: The file is of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        if path.exists():
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            if any(set(row) != set(COLUMNS) for row in rows):
                raise ValueError(f"{path} is no table of runs; choose another --out")
            self.rows = {row["recipe"]: row for row in rows}

    def __contains__(self, run: Run) -> bool:
        return recipe(run) in self.rows

    def add(self, run: Run, result: Result) -> None:
        """Add or replace the row of a run."""
        network, size = run.network, size_of(run.network)
        described = (network.task, network.core, network.mix, json.dumps(dict(network.options)), network.mlp_ratio)
        scores = (f"{result.top1:.2f}", f"{result.test_top1:.2f}", f"{result.loss:.4f}", recipe(run))
        values = (*described, run.dataset, f"{run.rate:.3g}", run.seed, *size, result.epochs, *scores)
        self.rows[recipe(run)] = dict(zip(COLUMNS, map(str, values), strict=True))
        ordered = sorted(self.rows.values(), key=lambda row: [row[name] for name in COLUMNS[:8]])
        write_table(self.path, COLUMNS, ordered, completed=True)

    def values(self, runs: Iterable[Run], column: str) -> list[float]:
        """One column of the runs that have a row."""
        return [float(self.rows[recipe(run)][column]) for run in runs if run in self]


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
