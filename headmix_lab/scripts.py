"""Python commands that a longer job starts, side by side on the GPUs of a machine, and until a time."""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

EXIT_FAILED = 1
EXIT_TIME_OVER = 75  # EX_TEMPFAIL of sysexits.h: try again
_LONGEST_S = 1e6  # the system waits no longer than 24 days
_GRACE_S = 60.0  # for the step in progress and its checkpoint


class RunFailed(RuntimeError):
    """A command ended with an error; the message ends with what it printed last."""

    @property
    def reason(self) -> str:
        """Of wrong input the line which says what is wrong, else the whole message."""
        last = str(self).rstrip().rpartition("\n")[2]
        return last.removeprefix("error: ") if last.startswith("error: ") else str(self)


class TimeOver(RuntimeError):
    """A command was stopped, or not started, because the time was over; the same call goes on with it."""


def gpu_names() -> list[str]:
    """List the GPUs of the machine that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


class Gpus:
    """The GPUs of the machine, of which each command gets the one that fewest others run on."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def least_busy(self) -> Iterator[dict[str, str]]:
        """Give the environment variable which shows a command its GPU; none where there is no choice."""
        with self._lock:  # the first commands start at the same time, and all must see one count
            self._running = self._running or dict.fromkeys(gpu_names(), 0)
            name = min(self._running, key=lambda name: self._running[name], default="")
            if name:
                self._running[name] += 1
        try:
            yield {"CUDA_VISIBLE_DEVICES": name} if len(self._running) > 1 else {}
        finally:
            with self._lock:
                if name:
                    self._running[name] -= 1


_GPUS = Gpus()


def run_python(
    arguments: Sequence[object],
    *,
    cwd: Path | None = None,
    side_by_side: bool = False,
    deadline_s: float = math.inf,
) -> str:
    """Run a script or a module with this Python.

    Args:
        arguments: Name of the script, or `-m` and that of the module, and its arguments.
        cwd: Working directory; that of this process when None.
        side_by_side: Others run meanwhile: compute on one CPU thread, and on the GPU that is least busy.
        deadline_s: When it is told to end (SIGTERM), on the clock of `time.monotonic`.

    Returns:
        What it printed on standard output.

    Raises:
        RunFailed: It failed.
        TimeOver: It was told to end.
    """
    command = [sys.executable, *map(str, arguments)]
    threads = {"OMP_NUM_THREADS": "1"} if side_by_side else {}
    gpu_of_it: AbstractContextManager[dict[str, str]] = _GPUS.least_busy() if side_by_side else nullcontext({})
    with gpu_of_it as gpu:
        if time.monotonic() >= deadline_s:
            raise TimeOver
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=cwd, env=os.environ | threads | gpu, stdout=pipe, stderr=pipe, text=True
        )
        try:
            left_s = deadline_s - time.monotonic()
            output, errors = process.communicate(timeout=max(left_s, 0) if left_s < _LONGEST_S else None)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                output, errors = process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
            if process.returncode:
                raise TimeOver from None
    if process.returncode:
        raise RunFailed(f"{' '.join(command)} ended with {process.returncode}:\n{errors[-3000:]}")
    return output
