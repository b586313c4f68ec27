"""Errors that a user can mend, and how command lines end on them."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_PATIENCE_S = 10
_PARENT = os.getppid()  # of processes that share a job: torchrun, or the first of them if Lightning started the others
_WORKER_IS_GONE = re.compile(r"DataLoader worker \(pid[^)]*\)[^.\n]*")
_LOOP = "Symlink loop from"  # of `Path.resolve`, up to Python 3.12
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "remote process exited")  # gloo, gloo, NCCL


class InputError(ValueError):
    """Input of a user is wrong: an option, a file, a name, the shape of a tensor.

    The message is one line that says what was given and what is allowed. A command line prints it and ends, as it does
    for what the system refuses (`OSError`, `MemoryError`); every other exception is a defect of the program and keeps
    its traceback.
    """


class UnknownKeywordError(InputError, TypeError):
    """A keyword argument that a model does not take: Python and timm raise TypeError for one."""


def explain(error: Exception) -> str:
    """Say what was raised: the message, with the type in front unless it is a plain ValueError or InputError."""
    enough = str(error) and type(error) in (ValueError, InputError)
    return str(error) if enough else f"{type(error).__name__}: {error}"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with status 2 and one line, with the rank unless it is 0, for input or a system that refuses.

    An interrupt ends it with one line too, and with the status that shells give it; another one then ends it at once.
    What is refused on all processes of a job is said by the first alone. A data loader's worker that was killed ends
    it with status 1.
    """
    try:
        yield
    except KeyboardInterrupt:
        let_signals_end()
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # the reader of our output, such as `head`, has gone: there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (InputError, OSError, MemoryError) as error:
        # A data loader's worker hands its error on with the traceback in front of the message.
        end(message_of(error).rpartition(f"{__name__}.InputError: ")[2])
    except RuntimeError as error:
        if worker := _WORKER_IS_GONE.search(str(error)):
            end(f"{worker[0]}: a process that reads data has ended, as where the memory does not suffice", status=1)
        if str(error).startswith(_LOOP):
            end(str(error))
        if not any(words in str(error) for words in _PEER_IS_GONE):
            raise
        end("another process has ended, see its message")


def let_signals_end() -> None:
    """Let a further Ctrl-C end the process at once, whose end is being cleaned up: Python would print a traceback."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def launched_rank() -> str:
    """Name the rank that a launcher has given this process, "0" without one; Lightning's sets the local one alone."""
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")


def end(message: str, status: int = 2) -> NoReturn:
    """End the process with one line; what all processes of a job say is said by the first alone."""
    rank = launched_rank()
    who = "error" if rank == "0" else f"error (rank {rank})"
    if rank != "0" and ("TORCHELASTIC_RUN_ID" in os.environ or "RANK" not in os.environ):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        deadline = time.monotonic() + _PATIENCE_S  # if the first process says it, this one is told to end
        while os.getppid() == _PARENT and time.monotonic() < deadline:
            time.sleep(0.05)
        if os.getppid() != _PARENT:  # it has said it, and ended
            sys.exit(status)
    # in one piece, as several processes write to one terminal: print, unbuffered, writes the end of the line by itself
    sys.stderr.write(f"{who}: {' '.join(message.split())}\n")
    sys.exit(status)


def message_of(error: Exception) -> str:
    """Say on one line, without its type, what a user can mend or the system refuses."""
    if isinstance(error, OSError) and error.strerror is not None:
        path = "" if error.filename is None else f": {error.filename}"
        return f"{error.strerror}{path}"
    return f"the memory does not suffice {error}" if isinstance(error, MemoryError) else str(error)
