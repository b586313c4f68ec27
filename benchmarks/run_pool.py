"""Many small training runs side by side: worker processes of one thread, and a table that outlives an interruption."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import math
import multiprocessing
import os
import queue
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from head_mix_runs import Result, Run, size_of, train
from training_runs import RunFailed, gpu_names

from headmix_vision.files.atomic import atomic_path

COLUMNS = (
    *("task", "core", "mix", "options", "mlp_ratio", "dataset", "rate", "seed", "parameters", "flops", "epochs"),
    *("top1_percent", "test_top1_percent", "train_loss", "recipe"),
)
DIVERGED = Result(top1=float("nan"), loss=float("nan"), epochs=0, test_top1=float("nan"))

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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(sorted(self.rows.values(), key=lambda row: [row[name] for name in COLUMNS[:8]]))

    def values(self, runs: Iterable[Run], column: str) -> list[float]:
        """One column of the runs that have a row."""
        return [float(self.rows[recipe(run)][column]) for run in runs if run in self]


def recipe(run: Run) -> str:
    """Hash of everything that the row of a run depends on."""
    return hashlib.sha256(shlex.join(map(str, run.command("any"))).encode()).hexdigest()[:8]


class Workers:
    """Worker processes of one thread each: some on the CPU, some on each GPU.

    Args:
        cpu_jobs, gpu_jobs: How many; without GPU workers the CPU's do their work.
        deadline_s: When to give up what has not finished, on the clock of `time.monotonic`.
    """

    def __init__(self, cpu_jobs: int, gpu_jobs: int, deadline_s: float) -> None:
        gpus = gpu_names() if gpu_jobs else []
        self.deadline_s = deadline_s
        self.pools = {"": _start_pool("", cpu_jobs)}
        self.pools |= {gpu: _start_pool(gpu, math.ceil(gpu_jobs / len(gpus))) for gpu in gpus}
        self.load = dict.fromkeys(self.pools, 0)
        self._finished: queue.SimpleQueue[tuple[Run, str, Any]] = queue.SimpleQueue()
        self._runs = tempfile.TemporaryDirectory()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self.pools.values():
            pool.terminate()
            pool.join()
        self._runs.cleanup()

    @property
    def running(self) -> int:
        """Runs that have not ended."""
        return sum(self.load.values())

    def submit(self, run: Run, on_gpu: bool) -> None:
        """Start a run as soon as a worker is free, on the GPU that has least to do."""
        gpus = [name for name in self.pools if name] if on_gpu else []
        place = min(gpus, key=lambda name: self.load[name]) if gpus else ""

        def finished(outcome: Any) -> None:
            self._finished.put((run, place, outcome))

        arguments = (run, Path(self._runs.name) / recipe(run), "gpu" if place else "cpu")
        self.pools[place].apply_async(_work, arguments, callback=finished, error_callback=finished)
        self.load[place] += 1

    def results(self) -> Iterator[tuple[Run, Result | Exception]]:
        """Results and errors as they come, until nothing runs or the time is over."""
        while self.running:
            try:
                run, place, outcome = self._finished.get(timeout=max(0.0, self.deadline_s - time.monotonic()))
            except queue.Empty:
                return
            self.load[place] -= 1
            yield run, outcome


def _start_pool(gpu: str, jobs: int) -> Any:
    """Start processes that see one GPU, or none for an empty name; CUDA reads that from what they inherit."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ |= {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
    try:
        return multiprocessing.get_context("spawn").Pool(jobs, _start_worker)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _start_worker() -> None:
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they write past what `fit` redirects


def _work(run: Run, directory: Path, device: str) -> Result:
    try:
        return train(run, directory, device)
    except RunFailed as error:
        if "non-finite" in str(error) or "not finite" in str(error):
            return DIVERGED
        raise


def complete(
    table: RunTable,
    workers: Workers,
    runs: Iterable[Run],
    on_gpu: Callable[[Run], bool],
    follow: Callable[[Run], Iterable[Run]] = lambda run: (),
) -> list[str]:
    """Train all runs that the table lacks, and those that follow from them.

    Args:
        table: Gets a row for each.
        workers: Train them.
        runs: The first runs.
        on_gpu: Whether a run is one for the GPUs.
        follow: Names the runs that may start when a run has its row.

    Returns:
        What went wrong, one text for each failure.
    """
    start, failures, known = time.monotonic(), [], set()

    def submit(candidates: Iterable[Run]) -> None:
        for run in candidates:
            if run in known:
                continue
            known.add(run)
            if run in table:
                submit(follow(run))
            else:
                workers.submit(run, on_gpu(run))

    submit(runs)
    for run, outcome in workers.results():
        if isinstance(outcome, Result):
            table.add(run, outcome)
            passed = f"top-1 {outcome.top1:.2f} %, loss {outcome.loss:.3f} after {outcome.epochs} epochs"
            submit(follow(run))
        else:
            failures.append(f"{describe(run)}: {outcome}")
            passed = "failed"
        print(f"[{time.monotonic() - start:5.0f} s, {workers.running} to go] {describe(run)}: {passed}", flush=True)
    if workers.running:
        failures.append(f"{workers.running} runs were given up when the time was over: repeat the command")
    return failures


def describe(run: Run) -> str:
    """What a run is called in a line of progress."""
    network = run.network
    options = "".join(f" {name}={value}" for name, value in network.options)
    width = "" if network.mlp_ratio == 4 else f" mlp_ratio={network.mlp_ratio:.3f}"
    return f"{run.dataset} {network.core} {network.mix}{options}{width} rate {run.rate:.3g} seed {run.seed}"
