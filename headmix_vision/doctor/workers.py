"""Processes that run tasks on a device, so that a kernel that crashes or hangs costs one task.

An illegal memory access ends the use of a GPU in its process, and compiling occupies a core: hence several processes.
"""

from __future__ import annotations

import getpass
import multiprocessing
import os
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from headmix_vision.errors import explain

_LAST_START_S = 6.0  # before the deadline: a task begun later would not end in time
_LONGEST_REASON = 500
_NAME = r"[^\s\\/:'\"<>|,()]+"
_URL_OR_PATH = re.compile(rf"(?P<url>https?://\S+)|(?<![\w.])(?:[A-Za-z]:)?(?:[\\/]+{_NAME})+[\\/](?P<file>{_NAME})")


class Task(NamedTuple):
    """A function of a module, and its arguments; both can be pickled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Failure(NamedTuple):
    """The end of a task without a result.

    Attributes:
        reason: the exception on one line, without paths and names of people or hosts.
        lacks_memory: whether memory did not suffice, which says nothing about a kernel.
    """

    reason: str
    lacks_memory: bool = False


class _Worker:
    def __init__(self, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.started = False

    def see_start(self) -> bool:
        """Return whether the process has started, from its first message or its end."""
        with suppress(EOFError, OSError):
            self.started = self.connection.recv()
        return self.started

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join(1)


class Workers:
    """Processes, started when they are needed.

    Where they cannot start, as on a GPU that admits one process, the tasks run in this process.

    Args:
        most: number of processes; 0 runs the tasks in this one.
        device: the device of all tasks.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._most, self._device = most, device
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._workers)

    def run(self, tasks: Iterable[Task], deadline_s: float, most: int | None = None) -> Iterator[tuple[Task, Any]]:
        """Run tasks side by side until a time, and yield each with its result or `Failure` when it ends.

        Tasks that have not ended in time are not yielded.

        Args:
            tasks: the tasks, started in this order.
            deadline_s: the time on the clock of `time.monotonic`.
            most: number of tasks at once; at most one for each process.
        """
        waiting = deque(tasks)
        while True:
            busy: dict[Any, _Worker] = {
                worker.connection: worker for worker in self._workers if worker.task is not None
            }
            if self._most == 0 and not busy:
                yield from _run_here(waiting, deadline_s)
                return
            room = min(self._most, most or self._most)
            while waiting and len(busy) < room and time.monotonic() < deadline_s - _LAST_START_S:
                worker = self._start(waiting.popleft())
                busy[worker.connection] = worker
            ready = wait(list(busy), max(0.0, deadline_s - time.monotonic())) if busy else []
            if not ready:
                self._end([*busy.values()])
                return
            for worker in [busy[connection] for connection in ready]:
                if worker.started:
                    yield self._finish(worker)
                elif not worker.see_start():
                    waiting.extendleft([worker.task] if worker.task else [])
                    self._end([worker])
                    self._most = 0

    def _start(self, task: Task) -> _Worker:
        idle = next((worker for worker in self._workers if worker.task is None), None)
        worker = idle or _Worker(self._device)
        if idle is None:
            self._workers.append(worker)
        worker.task = task
        with suppress(OSError):  # of a process that has ended, which is seen when its answer is read
            worker.connection.send(task)
        return worker

    def _finish(self, worker: _Worker) -> tuple[Task, Any]:
        task, worker.task = worker.task, None
        assert task is not None
        try:
            outcome, usable = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(1)
            outcome, usable = Failure(f"its process ended {_ending(worker.process.exitcode)}"), False
        if not usable:
            self._end([worker])
        return task, outcome

    def _end(self, workers: list[_Worker]) -> None:
        for worker in [*workers]:
            worker.end()
            self._workers.remove(worker)


def _run_here(waiting: deque[Task], deadline_s: float) -> Iterator[tuple[Task, Any]]:
    """Run tasks in this process until a time."""
    while waiting and time.monotonic() < deadline_s:
        task = waiting.popleft()
        with _one_thread():
            outcome = _attempt(task)
        yield task, outcome


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: small tensors on a busy machine take a multiple of the time on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"by {signal.Signals(-status).name}"
    return f"with status {status}"


def _serve(connection: Connection, device: torch.device) -> None:
    """Run the tasks that arrive, and end when the other end is closed or the device of this process is lost."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
    connection.send(True)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        outcome = _attempt(task)
        usable = not isinstance(outcome, Failure) or _device_works()
        connection.send((outcome, usable))
        if not usable:
            return


def _attempt(task: Task) -> Any:
    try:
        return task.function(*task.arguments)
    except (torch.OutOfMemoryError, MemoryError):
        return Failure("the memory does not suffice", lacks_memory=True)
    except Exception as error:  # whatever it is, it is a finding
        return Failure(_shortened(without_names(explain(error))))


def _device_works() -> bool:
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def without_names(text: str) -> str:
    """Remove folders, and the names of the user and the host, from a text."""
    text = _URL_OR_PATH.sub(lambda found: found["url"] or found["file"], text)
    for name in (_user(), socket.gethostname()):
        text = re.sub(rf"\b{re.escape(name)}\b", "...", text) if len(name) > 1 else text
    return text


def _shortened(text: str) -> str:
    half, line = _LONGEST_REASON // 2, " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:half]} ... {line[-half:]}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no such user, as in a container
        return ""
