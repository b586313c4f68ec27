"""The processes that share a job: their numbers, what they tell each other, and their end.

torchrun or Lightning starts them. Torch is imported when it is used: a command line asks for its rank before.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headmix_vision.errors import InputError, message_of

_LONG = timedelta(days=7)  # a process may have much less to do than another
_CHILD_PATIENCE_S = 10.0
T = TypeVar("T")


class _Agreed(InputError):
    """An error that all processes know of."""


class Processes(NamedTuple):
    """The processes that share a job, as one of them sees them.

    Args:
        rank: Its number among all.
        world_size: Number of all processes.
        local_rank: Its number among the processes of its machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def connect(self) -> None:
        """Wait until all of them are there.

        Raises:
            InputError: If torchrun did not start them.
        """
        import torch.distributed as dist

        if self.world_size > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise InputError(f"WORLD_SIZE in the environment is {self.world_size}: start the processes by torchrun")
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_LONG)
            atexit.register(leave_group)

    def wait(self) -> None:
        """Wait for the others."""
        import torch.distributed as dist

        if self.world_size > 1:
            dist.barrier()

    def same(self, value: Any) -> Any:
        """Return the value of the first process, on all."""
        import torch.distributed as dist

        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes by rank, on all."""
        import torch.distributed as dist

        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """End the block on all processes with the first error by rank that a user can mend, if any has one.

        The first process raises it, as `InputError`; the others end with status 2 and say nothing. All processes enter
        the block; such blocks may stand in each other.
        """
        if self.world_size == 1:
            yield
            return
        found: Exception | None = None
        try:
            yield
        except _Agreed:
            raise
        except (InputError, OSError, MemoryError) as error:
            found = error
        messages = [message for message in self.gather(found and message_of(found)) if message is not None]
        if messages and self.rank:
            sys.exit(2)
        if messages:
            raise _Agreed(messages[0]) from found

    def in_turn(self, share: Iterable[T | None], rounds: int) -> Iterator[T]:
        """Yield, on all processes, what each makes: the first item of each process by rank, then the second of each.

        Args:
            share: The items of this process, made one by one as they are asked for; None for nothing.
            rounds: Number of items of the process that has most of them.
        """
        if self.world_size == 1:
            yield from (item for item in share if item is not None)
            return
        items = iter(share)
        for _ in range(rounds):
            with self.agreed():
                item = next(items, None)
            yield from (other for other in self.gather(item) if other is not None)


ALONE = Processes()


def process_numbers() -> Processes:
    """Read the numbers from the environment; without torchrun there is one process.

    Raises:
        InputError: If they are not numbers, or the rank is not below the number of processes.
    """
    found = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise InputError(f"{name} in the environment must be a number, got {text!r}")
        found.append(int(text))
    processes = Processes(*found)
    if processes.rank >= processes.world_size:
        raise InputError(f"RANK in the environment is {processes.rank}, but WORLD_SIZE is {processes.world_size}")
    return processes


def launched_rank() -> str:
    """Name the rank that a launcher has given this process, "0" without one; Lightning's sets the local one alone."""
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")


def stopped_processes() -> dict[int, bool]:
    """Find the other processes of this job on this machine that were stopped, as by SIGSTOP.

    Returns:
        Their numbers, and whether this process has started them. None are found but on Linux.
    """
    port = os.environ.get("MASTER_PORT")
    children, parent = _children(os.getpid()), os.getppid()
    launched = "LOCAL_RANK" in os.environ and os.environ["LOCAL_RANK"] != "0"
    others = [*children, *_children(parent)] if launched or "TORCHELASTIC_RUN_ID" in os.environ else children
    found = {}
    for pid in {*others} - {os.getpid()}:
        with suppress(OSError):
            of_this_job = f"MASTER_PORT={port}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if _state(pid) in "Tt" and of_this_job and port is not None:
                found[pid] = pid in children
    if launched and "TORCHELASTIC_RUN_ID" not in os.environ and _state(parent) in "Tt":
        found[parent] = False
    return found


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def _state(pid: int) -> str:
    """Return the letter of a process's state: T is stopped; a blank where it is not known."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return " "


def leave_group() -> None:
    """Leave torch's process group at the end of a process, if it has joined one.

    The threads of Gloo must not outlive what they use: a process would end with SIGABRT at times.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def end_without_others(error: BaseException, children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    """Tell the children to end after an error, and end this process if it talks to them through NCCL.

    The children would say the same, or wait for this process. With NCCL other processes, which may not know of the
    error, may wait for this one for ever, in a collective, and it for them, in the clean-up at its end. So it ends
    without that, which torchrun sees, and then ends the others. Gloo needs nothing of the kind: it tells who has gone.

    Args:
        error: What has been raised; a `SystemExit` that tells of success is none.
        children: Processes that this one has started: with NCCL they are killed unless they end within 10 s.
    """
    import torch.distributed as dist

    failed = not isinstance(error, SystemExit) or error.code
    if not failed:
        return
    for child in children:
        child.terminate()
    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        return
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    deadline = time.monotonic() + _CHILD_PATIENCE_S
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
