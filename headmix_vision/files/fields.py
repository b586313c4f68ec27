"""Check what a file says: the entries of a JSON object or of a checkpoint, and their types."""

from collections.abc import Mapping
from typing import Any, get_args

from headmix_vision.errors import InputError

MAX_LEVELS, MAX_VALUES = 64, 1_000_000


def check_fields(where: str, found: object, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Check that a mapping which was read from a file has the entries that its readers take.

    Args:
        where: What to call the mapping in a message, with its file.
        found: What was read.
        wanted: The type of each entry, as `isinstance` takes it. One that may be None may also be absent.

    Returns:
        The mapping, with None for what is absent.

    Raises:
        InputError: No mapping, or an entry that is missing or of another type.
    """
    if not isinstance(found, dict):
        raise InputError(f"{where} is {_short(found)}, it must be a table of entries")
    for name, kind in wanted.items():
        value = found.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and not _takes_bool(kind)):
            state = f"is {_short(found[name])}" if name in found else "is missing"
            raise InputError(f"{where}: entry {name!r} {state}, it must be of type {getattr(kind, '__name__', kind)}")
    return {**dict.fromkeys(wanted), **found}


def check_nesting(where: str, found: object) -> None:
    """Check that lists and tables that were read from a file can be walked: not too deep, and without end.

    Args:
        where: What to call them in a message.
        found: What was read.

    Raises:
        InputError: More than `MAX_LEVELS` levels, a table that holds itself, or parts that are held so often that the
            whole has more than `MAX_VALUES` values, and twice as many as the file.
    """
    sizes: dict[int, tuple[int, int]] = {}  # values and levels of each list or table
    distinct = 0

    def measure(value: object, level: int) -> tuple[int, int]:
        nonlocal distinct
        if not isinstance(value, dict | list | tuple):
            return 1, 0
        if id(value) not in sizes:
            inner = value.values() if isinstance(value, dict) else value
            distinct += len(value)
            measured = [measure(one, level + 1) for one in inner] if level < MAX_LEVELS else [(0, MAX_LEVELS)]
            sizes[id(value)] = (
                1 + sum(size for size, _ in measured),
                1 + max((levels for _, levels in measured), default=0),
            )
        if sizes[id(value)][1] > MAX_LEVELS:
            raise InputError(f"{where} is damaged: it is nested too deeply, or holds itself")
        return sizes[id(value)]

    size, _ = measure(found, 0)
    if size > max(MAX_VALUES, 2 * distinct):
        raise InputError(f"{where} is damaged: its parts are held so often that the whole has {size} values")


def _takes_bool(kind: Any) -> bool:
    """Return whether a type is meant to take true and false, which Python counts as whole numbers."""
    return bool in (get_args(kind) or (kind,))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
