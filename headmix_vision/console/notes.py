"""Notes to the user on standard error."""

import os
import sys
from collections import Counter

from headmix_vision.errors import launched_rank
from headmix_vision.files.pictures import describe_left_out

_said: set[str] = set()


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
        say_once(f"{place}: {count} {what}, {describe_left_out(left_out)}")
