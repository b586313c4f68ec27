"""Parts that command lines share: what a terminal sees of them, and the devices that they take.

A terminal sees arguments, the start and the end of a command, notes, and the progress of long jobs. Torch is imported
when it is used: a command answers before.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import inspect
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    TextIO,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from headmix_vision.errors import InputError, message_of, suggest
from headmix_vision.files.reading import memory_left
from headmix_vision.processes import launched_rank

if TYPE_CHECKING:
    import torch

_PATIENCE_S = 10
_PARENT = os.getppid()  # of processes that share a job: torchrun, or the first of them if Lightning started the others
_WORKER_IS_GONE = re.compile(r"DataLoader worker \(pid[^)]*\)[^.\n]*")
_LOOP = "Symlink loop from"  # of `Path.resolve`, up to Python 3.12
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "remote process exited")  # gloo, gloo, NCCL
_UNKNOWN = "unrecognized arguments: "
_SHORT_NAMES = {"frame_rate": ("--fps",)}
_said: set[str] = set()
Advance = Callable[[float], None]
"""Takes how many more items are done, fractions included."""
_TENTH_S, _PAUSE_S = 2.0, 60.0  # least time between lines where a tenth is done, and most time without a line


DISTILLED = ("classifier", "generator")
"""Kinds of models behind `headmix distill`."""


def command_words() -> list[str]:
    """Return the words that call this command: `headmix train-cls`, `headmix-train-cls` or `python train_cls.py`."""
    program, words = Path(sys.argv[0]), sys.argv[1:3]
    if program.parts[-2:] == ("headmix_vision", "__main__.py"):
        called = ["python", "-m", "headmix_vision", *words[:1]]
    elif program.name == "headmix":
        called = ["headmix", *words[:1]]
    else:
        called, words = [program.name] if program.name.startswith("headmix-") else ["python", sys.argv[0]], ["", *words]
    return [*called, *(word for word in words[1:2] if word in DISTILLED)]


def _spelled(word: str, known: Mapping[str, str]) -> str:
    """Spell an option as the parser knows it, whether it comes with hyphens or underscores."""
    option, sign, value = word.partition("=")
    return f"{known.get(option.replace('-', '_'), option)}{sign}{value}"


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports wrong arguments in one line, with the nearest option where one is misspelt."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Take options with underscores too; refuse empty texts, which as a path would mean the working directory."""
        known = {name.replace("-", "_"): name for name in self._option_strings()}
        given = [_spelled(word, known) for word in (sys.argv[1:] if args is None else args)]
        for before, value in pairwise(["", *given]):
            option, sign, behind = value.partition("=")
            if not value or (option.startswith("--") and sign and not behind):
                name = option or (before if before.startswith("--") else "an argument")
                self.error(f"{name} is an empty text: give a value" + (", or leave it out" * name.startswith("--")))
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the line, of several processes the first one alone, and end the process with status 2."""
        if message.startswith(_UNKNOWN):
            given = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            options = set(self._option_strings())
            unknown = f"unknown option {given}{suggest(given, sorted(options))}"
            message = f"{given} is not an option of this command" if given in options else unknown
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {' '.join(message.split())} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)

    def _option_strings(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from command._option_strings()


def sentence(about: str) -> str:
    """Return a description of a few words as a sentence."""
    return f"{about[0].upper()}{about[1:]}."


def add_options(
    parser: argparse.ArgumentParser,
    request: type,
    *,
    leave_out: Collection[str] = (),
    required: Collection[str] = (),
    **changes: Mapping[str, Any],
) -> None:
    """Add an option for each field of a request: its type, its default and, as help, its lines in the docstring.

    Args:
        parser: The parser of a command.
        request: A dataclass. Texts that are paths stay texts, see `check_request`.
        leave_out: Fields without an option.
        required: Fields whose options are required, besides those without a default.
        **changes: By field, the keywords of `add_argument` that are others.
    """
    hints, about = get_type_hints(request), _described_fields(request)
    for field in fields(request):
        if field.name in leave_out:
            continue
        hint, needed = hints[field.name], field.default is MISSING
        if isinstance(hint, UnionType) or get_origin(hint) is Union:
            hint = next(kind for kind in get_args(hint) if kind is not NoneType)
        options: dict[str, Any] = {"required": True} if needed or field.name in required else {"default": field.default}
        if hint is bool:
            options["action"] = "store_true"
        elif get_origin(hint) is Literal:
            options["choices"] = get_args(hint)
        elif get_origin(hint) is tuple:
            options |= {"nargs": "+", "type": get_args(hint)[0]}
        elif hint in (int, float):
            options["type"] = hint
        default = None if needed or field.default is False or field.default == () else field.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        options["help"] = about[field.name] + ("" if shown is None else f" ({shown})")
        names = [f"--{field.name.replace('_', '-')}", *_SHORT_NAMES.get(field.name, ())]
        parser.add_argument(*names, **options | dict(changes.get(field.name, {})))


def _described_fields(request: type) -> dict[str, str]:
    """Read what the docstrings of a dataclass and its bases say of each field, in the words of a command line."""
    found: dict[str, str] = {}
    for kind in reversed(request.__mro__):
        arguments = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2]
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE):
            words = re.sub(r" \(`[A-Z_]+`\)|`|%", lambda sign: "%%" * (sign[0] == "%"), " ".join(text.split()))
            found[name] = words.rstrip(".").replace("when None", "when left out")
    return found


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
        end(message_of(error).rpartition(f"{InputError.__module__}.InputError: ")[2])
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


@contextmanager
def importing(command: str) -> Iterator[None]:
    """Show on a terminal that a command starts, and end the process with one line if a part cannot be imported.

    Imports make 600,000 objects that stay until the end. The garbage collector would go through all of them again and
    again, and once more when the process ends, which takes more than a second. So they are hidden from it.

    Args:
        command: Name of the command.
    """
    known, collects = len(sys.modules), gc.isenabled()
    if "torch" not in sys.modules and is_terminal(sys.stderr) and launched_rank() == "0":
        print(f"headmix {command}: loading", file=sys.stderr, flush=True)
    gc.disable()
    try:
        with one_line_errors():
            yield
    finally:
        if collects:
            gc.enable()
    if len(sys.modules) > known:  # not in a later call, which would keep the garbage of the calls before
        gc.freeze()
        if _names_leaks():
            atexit.register(gc.unfreeze)


def _names_leaks() -> bool:
    """Tell whether a Triton is loaded that prints all that is not freed when the process ends, as 3.9 does."""
    triton = sys.modules.get("triton")
    return triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def say(note: str) -> None:
    """Print a note, by the first process of a job alone."""
    if launched_rank() == "0":
        print(note, file=sys.stderr)


def say_once(note: str) -> None:
    """Print a note once in a process, and by the first process of a job alone."""
    if note not in _said:
        _said.add(note)
        say(note)


def say_left_out(place: str | os.PathLike[str], count: int, what: str, left_out: Counter[str]) -> None:
    """Say how many files of a place are read, where others are left out."""
    if left_out:
        from headmix_vision.files.pictures import describe_left_out  # loads Pillow, which the start of a command spares

        say_once(f"{place}: {count} {what}, {describe_left_out(left_out)}")


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(what: str, total: int, unit: str, *, done: int = 0, enabled: bool = True) -> Iterator[Advance]:
    """Show on standard error how many items are done, how many a second, and the time that is left.

    A log, which is not a terminal, gets a line for each tenth, at least 2 s apart, a line a minute where a tenth takes
    longer, and one at the end.

    Args:
        what: The job in one word, such as `sampling`.
        total: Number of items in all.
        unit: What the items are, such as `images`.
        done: Items that an earlier call has done; they count, but not for the speed.
        enabled: Whether to show anything; processes other than the first do not.

    Yields:
        A function to call with the number of items done since the last call.
    """
    if not enabled or done >= total:
        yield lambda items: None
    elif is_terminal(sys.stderr):
        with _bar(what, total, unit, done) as advance:
            yield advance
    else:
        with _lines(what, total, unit, done) as advance:
            yield advance


@contextmanager
def _bar(what: str, total: int, unit: str, done: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=done, speed="")
        count, start = float(done), time.monotonic()

        def advance(items: float) -> None:
            nonlocal count
            count = _added(count, items, total)
            bar.update(task, completed=count, speed=f"{_speed(count - done, start)} {unit}/s")

        yield advance


@contextmanager
def _lines(what: str, total: int, unit: str, done: int) -> Iterator[Advance]:
    count, start = float(done), time.monotonic()
    last_s, tenth = start, 10 * done // total

    def advance(items: float) -> None:
        nonlocal count, last_s, tenth
        count, now = _added(count, items, total), time.monotonic()
        tenths = int(10 * count / total)
        if count < total and now - last_s >= (_TENTH_S if tenths > tenth else _PAUSE_S):
            last_s, tenth = now, tenths
            fresh = count - done
            left = duration((now - start) * (total - count) / fresh) if fresh else "unknown time"
            tell(f"{int(count)}/{total} {unit} ({100 * count / total:.0f} %)", f"{left} left")

    def tell(state: str, ending: str) -> None:
        print(f"{what}: {state}, {_speed(count - done, start)}/s, {ending}", file=sys.stderr, flush=True)

    yield advance
    tell(f"{int(count)}/{total} {unit}", f"took {duration(time.monotonic() - start)}")


def duration(seconds: float) -> str:
    """Format a time in the two largest units that matter: `45 s`, `12 min 30 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = round(seconds)
    for size, name, small_size, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            large, small = whole // size, whole % size // small_size
            return f"{large} {name} {small} {small_name}" if small else f"{large} {name}"
    return f"{whole} s"


def _added(count: float, items: float, total: int) -> float:
    """Add items without passing the total; fractions that make a whole make it despite rounding errors."""
    count += items
    return total if count > total - 1e-6 else count


def _speed(items: float, start_s: float) -> str:
    return f"{items / max(time.monotonic() - start_s, 1e-9):.3g}"


def default_device() -> str:
    """Name the device that is taken when none is asked for: a GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def open_device(name: str, local_rank: int = 0) -> torch.device:
    """Check that a device is there and computes.

    Args:
        name: As torch writes it: `cpu`, `cuda:1`; `cuda` is the GPU of the process.
        local_rank: The number of the process on its machine; processes beyond the GPUs share them.

    Raises:
        InputError: If torch does not know the device, or cannot use it on this machine.
    """
    import torch

    if name == "cuda" and torch.cuda.is_available():
        name = f"cuda:{local_rank % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    # each backend has its own way to say that it is missing; `meta` computes nothing
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"device {name!r} cannot be used here: {reason}") from None
    return device


def available_memory(device: torch.device) -> int:
    """Return the memory of a device, in bytes, that can still be taken; see `memory_left` for all but GPUs."""
    import torch

    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # kept by torch for later
        return torch.cuda.mem_get_info(device)[0] + unused
    return memory_left()
