"""Show how far a long job is: by a bar on a terminal, elsewhere by a plain line now and then."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[float], None]
"""Tells that so many items more are done, fractions included."""

_TENTH_S, _PAUSE_S = 2.0, 60.0  # least time between lines where a tenth is done, and most time without a line


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(what: str, total: int, unit: str, *, done: int = 0, enabled: bool = True) -> Iterator[Advance]:
    """Show on standard error how many items are done, how many a second, and the time that is left.

    A log that is no terminal gets a line for each tenth, at least 2 s apart, a line a minute where a tenth takes
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
