"""Many small training runs in groups that are trained side by side, each group as one CUDA graph in a process.

A call ends in time: no group begins that would not end before the deadline, going by those that have ended. Its exit
status is 0 when nothing is missing, 1 when runs failed, and 75 when the time was over: the same command goes on.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import NamedTuple

import torch

from experiments.harness.classifier_runs import Result, Run, train_group
from experiments.harness.run_table import RunTable, describe
from headmix_vision.console.scripts import EXIT_FAILED, EXIT_TIME_OVER


class Groups:
    """Runs that wait, in the order in which they came, and how long a group of their kind takes.

    Args:
        size: Runs side by side, at most.
        deadline_s: When the last group has to end, on the clock of `time.monotonic`.
    """

    def __init__(self, size: int, deadline_s: float) -> None:
        self.size, self.deadline_s = size, deadline_s
        self.waiting: dict[Run, None] = {}
        self._seconds: dict[Run, float] = {}

    def take(self) -> list[Run]:
        """The next runs that can be trained side by side and would end in time; none if there are none."""
        left_s = self.deadline_s - time.monotonic()
        for first in self.waiting:
            if self._expected_s(first.kind) < left_s:
                group = [run for run in self.waiting if run.kind == first.kind][: self.size]
                for run in group:
                    del self.waiting[run]
                return group
        return []

    def note(self, run: Run, seconds: float) -> None:
        """Remember how long the group of a run took."""
        self._seconds[run.kind] = seconds

    def _expected_s(self, kind: Run) -> float:
        """What the last group of this kind took, or else the longest of others; 0 before the first."""
        return self._seconds.get(kind, max(self._seconds.values(), default=0.0))


class Completion(NamedTuple):
    """What a call did not get done: a text for each failure, and the runs that there was no time for."""

    failures: list[str]
    missing: list[Run]

    def exit(self) -> None:
        """Say what is missing, and end the process with a status that says so too."""
        for failure in self.failures:
            print(f"error: {failure}", file=sys.stderr)
        if self.missing:
            counts = Counter(f"{run.dataset} {run.network.core} {run.network.mix}" for run in self.missing)
            listed = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
            print(
                f"the time was over before {len(self.missing)} runs, and those that follow from them: repeat the "
                f"command ({listed})",
                file=sys.stderr,
            )
        if self.failures or self.missing:
            raise SystemExit(EXIT_FAILED if self.failures else EXIT_TIME_OVER)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `complete`."""
    add = parser.add_argument
    add("--group", type=int, default=24, help="runs side by side in a process (%(default)s)")
    add("--jobs", type=int, default=1, help="processes, spread over the GPUs (%(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu (%(default)s)")
    add("--minutes", type=float, default=1440.0, help="time after which the rest is left to the next call")
    add("--options", nargs=argparse.REMAINDER, default=[], help="further options of headmix-train-cls, as the last")


def check_options(arguments: argparse.Namespace) -> None:
    """End the process with one line if an option of `add_options` cannot be."""
    for name in ("group", "jobs"):
        if getattr(arguments, name) < 1:
            raise SystemExit(f"error: --{name} must be positive, got {getattr(arguments, name)}")


def complete(
    table: RunTable,
    arguments: argparse.Namespace,
    runs: Iterable[Run],
    follow: Callable[[Run], Iterable[Run]] = lambda run: (),
) -> Completion:
    """Train all runs that the table lacks, and those that follow from them.

    Args:
        table: Gets a row for each.
        arguments: Those of `add_options`.
        runs: The first runs.
        follow: Names the runs that may start when a run has its row.
    """
    start = time.monotonic()
    groups, known, failures = Groups(arguments.group, start + 60 * arguments.minutes), set[Run](), list[str]()

    def submit(candidates: Iterable[Run]) -> None:
        for run in candidates:
            if run not in known:
                known.add(run)
                if run in table:
                    submit(follow(run))
                else:
                    groups.waiting[run] = None

    submit(runs)
    devices = [arguments.device]
    if arguments.device == "cuda":
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    running: dict[Future[list[Result]], tuple[list[Run], str, float]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context, initializer=_prepare) as pool:
        while True:
            while len(running) < arguments.jobs and (group := groups.take()):
                busy = Counter(device for _, device, _ in running.values())
                device = min(devices, key=lambda name: busy[name])
                running[pool.submit(train_group, group, device)] = group, device, time.monotonic()
            if not running:
                return Completion(failures, list(groups.waiting))
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                group, _, began_s = running.pop(future)
                if (error := future.exception()) is not None:
                    failures += [f"{describe(run)}: {type(error).__name__}: {error}" for run in group]
                    continue
                groups.note(group[0], time.monotonic() - began_s)
                for run, result in zip(group, future.result(), strict=True):
                    table.add(run, result)
                    passed = f"top-1 {result.top1:.2f} %, loss {result.loss:.3f} after {result.epochs} epochs"
                    print(f"{describe(run)}: {passed}")
                for run in group:
                    submit(follow(run))
                to_go = len(groups.waiting) + sum(len(group) for group, *_ in running.values())
                print(f"[{time.monotonic() - start:.0f} s, {to_go} to go]", flush=True)


def _prepare() -> None:
    """What a process does first: it ends when its parent does, and leaves Lightning's notes on devices out."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
