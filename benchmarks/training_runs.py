"""Training runs of a comparison: starting the scripts of the repository, and tables over seeds."""

import csv
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[1]
FINISHED = "finished"
EXIT_FAILED = 1
EXIT_TIME_OVER = 75  # EX_TEMPFAIL of sysexits.h: try again
_GRACE_S = 60.0  # for the step in progress and its checkpoint


class RunFailed(RuntimeError):
    """A script of a run ended with an error."""


class TimeOver(RuntimeError):
    """A script of a run was stopped, or not started, because the time was over; the same call goes on with it."""


def gpu_names() -> list[str]:
    """The GPUs of the machine that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


class Gpus:
    """The GPUs of the machine, of which each script gets the one that fewest others run on."""

    def __init__(self) -> None:
        self._running = dict.fromkeys(gpu_names(), 0)
        self._lock = threading.Lock()

    @contextmanager
    def least_busy(self) -> Iterator[dict[str, str]]:
        """The environment variable which shows a script its GPU; none where there is no choice."""
        if len(self._running) < 2:
            yield {}
            return
        with self._lock:
            name = min(self._running, key=lambda name: self._running[name])
            self._running[name] += 1
        try:
            yield {"CUDA_VISIBLE_DEVICES": name}
        finally:
            with self._lock:
                self._running[name] -= 1


@cache
def gpus() -> Gpus:
    """The GPUs, counted when the first script starts."""
    return Gpus()


def run_script(arguments: Sequence[object], *, one_thread: bool = False, deadline_s: float = math.inf) -> None:
    """Run a script of the repository, with this Python, from the repository's root, on the GPU that is least busy.

    Args:
        arguments: Name of the script and its arguments.
        one_thread: Compute on one CPU thread, for runs side by side.
        deadline_s: When it is told to end (SIGTERM), on the clock of `time.monotonic`.

    Raises:
        RunFailed: It failed; the message ends with what it printed last.
        TimeOver: It was told to end.
    """
    command = [sys.executable, *map(str, arguments)]
    threads = {"OMP_NUM_THREADS": "1"} if one_thread else {}
    with gpus().least_busy() as gpu:
        if time.monotonic() >= deadline_s:
            raise TimeOver
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | threads | gpu, stdout=pipe, stderr=pipe, text=True
        )
        try:
            left_s = deadline_s - time.monotonic()
            _, errors = process.communicate(timeout=None if math.isinf(left_s) else max(left_s, 0))
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            if process.returncode:
                raise TimeOver from None
    if process.returncode:
        raise RunFailed(f"{' '.join(command)} ended with {process.returncode}:\n{errors[-3000:]}")


def train(
    script: str,
    config: str,
    run: Path,
    options: Sequence[object],
    *,
    one_thread: bool = False,
    deadline_s: float = math.inf,
) -> None:
    """Train, or go on with an interrupted run; a finished run is left as it is.

    Args:
        script: `train_cls.py`, `train_gen.py` or `-m MODULE`.
        config: The recipe.
        run: Run directory, the same for the same options alone.
        options: Further options.
        one_thread: Compute on one CPU thread.
        deadline_s: When it is interrupted, as for `run_script`.

    Raises:
        RunFailed: Training failed.
        TimeOver: It was interrupted.
    """
    if (run / FINISHED).exists():
        return
    place = ["--run_dir", run.absolute()]
    if (run / "checkpoints" / "last.ckpt").exists():
        arguments = ["-c", run.absolute() / "config.yaml", *place, "--ckpt_path", "last"]
    else:
        arguments = ["-c", config, *place, "--overwrite", "true", *options]
    run_script([*script.split(), "fit", *arguments], one_thread=one_thread, deadline_s=deadline_s)
    (run / FINISHED).touch()


def read_curve(run: Path, name: str) -> dict[int, float]:
    """All values of a metric in a run's `metrics.csv`, by the step at which they were logged, in their order."""
    with (run / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def read_metric(run: Path, name: str) -> list[float]:
    """All values of a metric in a run's `metrics.csv`, in the order of steps."""
    return list(read_curve(run, name).values())


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """`mean ± standard deviation` of a table cell; the value alone where there is one, a dash without any."""
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
