"""Runs of the repository's scripts: training that is interrupted and resumed, scores, and a table of them."""

import argparse
import hashlib
import shlex
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from headmix_lab import training_runs
from headmix_lab.scripts import EXIT_FAILED, EXIT_TIME_OVER, RunFailed, TimeOver, run_python
from headmix_lab.tables import ResultTable, Row
from headmix_vision.files.writing import atomic_path, hold_lock
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY, read_checkpoint
from headmix_vision.runs.directory import FINISHED, LAST, read_curve

REPOSITORY = Path(__file__).parents[1]
run_script = partial(run_python, cwd=REPOSITORY)
"""`run_python` from the repository's root."""

Case = tuple[object, ...]
"""A row of a table: the columns that tell it apart."""


def train(script: str, config: str, run: Path, options: Sequence[object], **how: Any) -> None:
    """Train by a script of the repository (`train_cls.py`, `-m MODULE`) and a recipe."""
    training_runs.train(script.split(), run, ["-c", config, *options], cwd=REPOSITORY, **how)


class GeneratorRuns:
    """Trainings and scores of a comparison.

    Args:
        arguments: The parsed command line, with `jobs`.
        deadline_s: When the last command has to end, on the clock of `time.monotonic`.
    """

    def __init__(self, arguments: argparse.Namespace, deadline_s: float) -> None:
        self.arguments = arguments
        self.how = {"side_by_side": arguments.jobs > 1, "deadline_s": deadline_s}
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._failed: dict[Path, RunFailed] = {}

    def train_once(self, run: Path, script: str, config: str, options: Callable[[], Sequence[object]]) -> Path:
        """Train, and keep the averaged weights alone; a finished run is left as it is.

        Args:
            run: Run directory.
            script: As for `train`.
            config: The recipe.
            options: Gives the other options, where the run is not finished.

        Returns:
            The run directory.

        Raises:
            RunFailed: Training failed, now or before in this call.
            TimeOver: It was interrupted.
        """
        with self._locks[run]:
            if run in self._failed:
                raise self._failed[run]
            if not (run / FINISHED).exists():
                given = options()
                try:
                    train(script, config, run, given, **self.how)
                except RunFailed as error:
                    self._failed[run] = error
                    raise
                keep_weights(run)
        return run

    def evaluate(self, metric: str, fake: str | Path, out: Path, *options: object) -> None:
        """Score samples by `headmix evaluate`, unless they have been."""
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            run_script(["-m", "headmix_vision.evaluate", metric, "--fake", fake, "--out", out, *options], **self.how)


def keep_weights(run: Path) -> None:
    """Cut the checkpoint of a finished run down to what drawing and distilling need, the averaged weights.

    They are all its weights then: `metadata.json` of samples calls them raw.
    """
    path = run / LAST
    checkpoint = read_checkpoint(path)
    entries = (DESCRIPTION_KEY, "state_dict", "global_step", "epoch", "pytorch-lightning_version")
    with atomic_path(path) as temporary:
        torch.save({name: checkpoint[name] for name in entries}, temporary)


def trained_steps(run: Path) -> int:
    """Optimizer steps of a run."""
    return int(read_checkpoint(run / LAST)["global_step"])


def is_flat(losses: Mapping[int, float]) -> bool:
    """Return whether the last loss is less than 2 % below the loss a tenth of the run earlier.

    Args:
        losses: Validation losses by their steps; the last one at or before nine tenths of the run is compared.
    """
    last = max(losses)
    earlier = [step for step in losses if step <= 0.9 * last]
    return bool(earlier) and losses[last] > 0.98 * losses[max(earlier)]


def flat(run: Path) -> str:
    """Tell whether a run's validation loss is flat, yes or no, or rising: more than 2 % above the lowest."""
    losses = {step + 1: loss for step, loss in read_curve(run, "val/loss").items()}  # steps from 0
    if losses and losses[max(losses)] > 1.02 * min(losses.values()):
        return "rising"
    return yes(is_flat(losses))


def mark(rows: Sequence[Row]) -> str:
    """Return a mark for runs whose validation loss was not flat in the end, or had been lower."""
    ends = {row["flat"] for row in rows}
    return " (not flat)" if "no" in ends else " (rising)" if "rising" in ends else ""


def hash_of(*parts: object) -> str:
    """Hash of what a run or a row depends on."""
    return hashlib.sha256(shlex.join(map(str, parts)).encode()).hexdigest()[:8]


def yes(value: bool) -> str:
    return "yes" if value else "no"


class Outcome(NamedTuple):
    """Failures of a call, a text each, and the cases without time."""

    failures: list[str]
    missing: list[Case]

    def exit(self) -> None:
        """Say what is missing, and end the process with a status that says so too."""
        for failure in self.failures:
            print(f"error: {failure}", file=sys.stderr)
        if self.missing:
            print(f"the time was over before {len(self.missing)} rows: repeat the command", file=sys.stderr)
        if self.failures or self.missing:
            raise SystemExit(EXIT_FAILED if self.failures else EXIT_TIME_OVER)


def say(start_s: float, case: Case, text: str) -> None:
    """Print a line of progress."""
    print(f"[{time.monotonic() - start_s:5.0f} s] {', '.join(map(str, case))}: {text}", flush=True)


def complete(
    table: ResultTable,
    cases: Sequence[Case],
    score: Callable[..., dict[str, object]],
    shown: Mapping[str, str],
    jobs: int,
    start_s: float,
) -> Outcome:
    """Score cases side by side, and add a row for each.

    Args:
        table: Gets the rows.
        cases: What it lacks.
        score: Gives the columns of a case.
        shown: Columns of the lines of progress by what they are called.
        jobs: So many at a time.
        start_s: When the call began, on the clock of `time.monotonic`.
    """
    outcome = Outcome([], [])
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(score, case): case for case in cases}
        for future in as_completed(futures):
            case = futures[future]
            try:
                row: Row = table.add(case, **future.result())
            except TimeOver:
                outcome.missing.append(case)
            except RunFailed as error:
                outcome.failures.append(str(error))
                say(start_s, case, "failed")
            else:
                numbers = (f"{name} {row[column]}" for name, column in shown.items() if row[column])
                say(start_s, case, " · ".join(numbers))
    return outcome


class ComparisonReport(Protocol):
    """Tables and pictures of a comparison."""

    def text(self) -> str: ...

    def draw(self, folder: Path) -> None: ...


def compare(arguments: argparse.Namespace, run: Callable[[float], tuple[Outcome, ComparisonReport]]) -> None:
    """Run a comparison under the lock of its table, then print and draw it.

    Args:
        arguments: The parsed command line, with `out`, `minutes` and `pictures`.
        run: Completes the table until a time on the clock of `time.monotonic`.
    """
    deadline_s = time.monotonic() + 60 * arguments.minutes
    try:
        with hold_lock(arguments.out.with_name(f".{arguments.out.name}.lock"), f"table {arguments.out}"):
            outcome, report = run(deadline_s)
            print(f"\n{report.text()}")
            if arguments.pictures:
                report.draw(arguments.pictures)
    except (ValueError, RunFailed) as error:
        raise SystemExit(f"error: {error}") from None
    outcome.exit()


def add_options(parser: argparse.ArgumentParser, runs: str) -> None:
    """Add the options of every comparison."""
    add = parser.add_argument
    add("--out", type=Path, required=True, help="CSV to write, or to complete")
    add("--pictures", type=Path, help="folder for the pictures (none)")
    add("--runs", type=Path, default=Path(runs), help="place of the run directories (%(default)s)")
    add("--jobs", type=int, default=1, help="runs at a time, spread over the GPUs (%(default)s)")
    add("--minutes", type=float, default=1440.0, help="time after which the rest is left to the next call")
    add("--options", default="", help="further options of headmix train-gen, in quotes, the same for all")


def check_options(arguments: argparse.Namespace, models: Sequence[str], unique: Sequence[str], **least: int) -> None:
    """End the process with one line for wrong options: unknown rows, anything twice, numbers that are too small.

    Args:
        arguments: The parsed command line.
        models: The rows that there are.
        unique: Names of the options that may name nothing twice.
        least: The smallest values of whole numbers by name, 1 for all others.
    """
    if arguments.rows == ["all"]:
        arguments.rows = list(models)
    for row in arguments.rows:
        if row not in models:
            raise SystemExit(f"error: --rows knows {', '.join(models)} and all, got {row!r}")
    for name in unique:
        if len(set(getattr(arguments, name))) < len(getattr(arguments, name)):
            raise SystemExit(f"error: --{name} names one twice")
    for name, value in vars(arguments).items():
        if type(value) is int and value < least.get(name, 1):
            raise SystemExit(f"error: --{name.replace('_', '-')} must be at least {least.get(name, 1)}, got {value}")


def find_features(option: str, features: str) -> str:
    """Return what `headmix evaluate --features` takes with a path from the root on: scripts run in the repository."""
    kind, colon, path = features.rpartition(":")
    if features in ("inception", "digits"):
        return features
    if not Path(path).exists():
        raise SystemExit(f"error: --{option} {features}: there is no {path}")
    return f"{kind}{colon}{Path(path).absolute()}"
