"""Many small training runs side by side, in worker processes of one thread.

A call ends in time: no run begins that would not end before the deadline, going by those that have ended, and what
still runs then is killed. Its exit status is 0 when nothing is missing, 1 when runs failed, and 75 when the time was
over: the same command goes on.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from head_mix_runs import Result, Run, train
from run_table import RunTable, describe, recipe
from training_runs import RunFailed, gpu_names

EXIT_FAILED = 1
EXIT_TIME_OVER = 75  # EX_TEMPFAIL of sysexits.h: try again
DIVERGED = Result(top1=float("nan"), loss=float("nan"), epochs=0, test_top1=float("nan"))


class Worker:
    """A process of one thread that trains one run after the other.

    It leaves the signals of a terminal or of `timeout` to its parent, which kills it, and ends when the parent does.

    Args:
        gpu: The only GPU that it sees; none for an empty name.
    """

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self.run: Run | None = None
        self.began_s = 0.0
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        # CUDA and OpenMP read what a process inherits.
        inherited = {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
        before = {name: os.environ.get(name) for name in inherited}
        os.environ |= inherited
        try:
            self.process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        theirs.close()

    def begin(self, run: Run, directory: Path) -> None:
        """Start a run."""
        self.run, self.began_s = run, time.monotonic()
        self.connection.send((run, directory, "gpu" if self.gpu else "cpu"))

    def outcome(self) -> Result | Exception:
        """What the run came to, once the connection can be read."""
        self.run = None
        try:
            result: Result | Exception = self.connection.recv()
            return result
        except (EOFError, ConnectionResetError):
            self.process.join()
            return RunFailed(f"its process ended with {self.process.exitcode}")

    def kill(self) -> None:
        """End the process at once, and quietly."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class Workers:
    """Worker processes: some on the CPU, some on each GPU, started when there is something to do for them.

    Args:
        cpu_jobs, gpu_jobs: How many at most; without GPU workers the CPU's do their work.
        deadline_s: When everything that runs is killed, on the clock of `time.monotonic`.
    """

    def __init__(self, cpu_jobs: int, gpu_jobs: int, deadline_s: float) -> None:
        self.gpus = gpu_names() if gpu_jobs else []
        self.jobs = {False: cpu_jobs, True: gpu_jobs if self.gpus else 0}
        self.deadline_s = deadline_s
        self.workers: list[Worker] = []
        self._queues: dict[bool, list[Run]] = {False: [], True: []}
        self._seconds: dict[tuple[object, ...], float] = {}
        self._runs = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    def __enter__(self) -> Workers:
        self._before = signal.signal(signal.SIGTERM, _end)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        self._runs.cleanup()
        signal.signal(signal.SIGTERM, self._before)

    @property
    def to_go(self) -> int:
        """Runs that have not ended."""
        return sum(map(len, self._queues.values())) + sum(worker.run is not None for worker in self.workers)

    def submit(self, run: Run, on_gpu: bool) -> None:
        """Put a run into the queue of the CPU or of the GPUs."""
        self._queues[on_gpu and bool(self.gpus)].append(run)

    def results(self) -> Iterator[tuple[Run, Result | Exception]]:
        """Results and errors as they come, until nothing runs that could end before the deadline."""
        while True:
            self._begin()
            busy = {worker.connection: worker for worker in self.workers if worker.run is not None}
            ended = wait(list(busy), max(0.0, self.deadline_s - time.monotonic())) if busy else []
            if not ended:
                return
            for worker in (busy[connection] for connection in ended if isinstance(connection, Connection)):
                run = worker.run
                assert run is not None
                outcome = worker.outcome()
                if isinstance(outcome, Result):
                    self._note(run, bool(worker.gpu), time.monotonic() - worker.began_s)
                yield run, outcome

    def _begin(self) -> None:
        """Start what there are workers and time for, first come, first served."""
        left_s = self.deadline_s - time.monotonic()
        for on_gpu, queue in self._queues.items():
            for run in [run for run in queue if self._expected_s(run, on_gpu) < left_s]:
                worker = self._free_worker(on_gpu)
                if worker is None:
                    break
                queue.remove(run)
                worker.begin(run, Path(self._runs.name) / recipe(run))

    def _free_worker(self, on_gpu: bool) -> Worker | None:
        """One that waits, or else a new one on the GPU that has fewest; None when all are busy."""
        self.workers = [worker for worker in self.workers if worker.run is not None or worker.process.is_alive()]
        ours = [worker for worker in self.workers if bool(worker.gpu) == on_gpu]
        for worker in ours:
            if worker.run is None:
                return worker
        if len(ours) >= self.jobs[on_gpu]:
            return None
        count = Counter(worker.gpu for worker in ours)
        self.workers.append(Worker(min(self.gpus, key=lambda gpu: count[gpu]) if on_gpu else ""))
        return self.workers[-1]

    def _expected_s(self, run: Run, on_gpu: bool) -> float:
        """The longest that a run of this kind took so far, or else any run of the same place; 0 before the first."""
        known = self._seconds.get((on_gpu, *_kind(run)))
        others = (seconds for kind, seconds in self._seconds.items() if kind[0] == on_gpu)
        return max(others, default=0.0) if known is None else known

    def _note(self, run: Run, on_gpu: bool, seconds: float) -> None:
        kind = (on_gpu, *_kind(run))
        self._seconds[kind] = max(seconds, self._seconds.get(kind, 0.0))


def _kind(run: Run) -> tuple[object, ...]:
    """What the time of a run depends on."""
    return run.network.task, run.network.core, run.network.mix, run.epochs


def _end(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def _serve(connection: Connection) -> None:
    """What a worker does."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they write past what `fit` redirects
    while True:
        try:
            run, directory, device = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(run, directory, device))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _outcome(run: Run, directory: Path, device: str) -> Result | RunFailed:
    try:
        return train(run, directory, device)
    except Exception as error:
        if isinstance(error, RunFailed) and ("non-finite" in str(error) or "not finite" in str(error)):
            return DIVERGED
        return RunFailed(f"{type(error).__name__}: {error}")


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


def complete(
    table: RunTable,
    workers: Workers,
    runs: Iterable[Run],
    on_gpu: Callable[[Run], bool],
    follow: Callable[[Run], Iterable[Run]] = lambda run: (),
    wanted: Callable[[Run], bool] = lambda run: True,
) -> Completion:
    """Train all runs that the table lacks, and those that follow from them.

    Args:
        table: Gets a row for each.
        workers: Train them.
        runs: The first runs.
        on_gpu: Whether a run is one for the GPUs.
        follow: Names the runs that may start when a run has its row.
        wanted: Whether a run is one for this call.
    """
    start, failures, known = time.monotonic(), [], set()
    missing: dict[Run, None] = {}

    def submit(candidates: Iterable[Run]) -> None:
        for run in candidates:
            if run in known:
                continue
            known.add(run)
            if run in table:
                submit(follow(run))
            elif wanted(run):
                missing[run] = None
                workers.submit(run, on_gpu(run))

    submit(runs)
    for run, outcome in workers.results():
        del missing[run]
        if isinstance(outcome, Result):
            table.add(run, outcome)
            passed = f"top-1 {outcome.top1:.2f} %, loss {outcome.loss:.3f} after {outcome.epochs} epochs"
            submit(follow(run))
        else:
            failures.append(f"{describe(run)}: {outcome}")
            passed = "failed"
        print(f"[{time.monotonic() - start:5.0f} s, {workers.to_go} to go] {describe(run)}: {passed}", flush=True)
    return Completion(failures, list(missing))
