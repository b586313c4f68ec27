"""Checks what a file says: the entries of a JSON object or of a checkpoint, and their types."""

from collections.abc import Mapping
from typing import Any, get_args

from headmix_vision.errors import InputError


def check_fields(where: str, found: object, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Checks that a mapping which was read from a file has the entries that its readers take.

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


def _takes_bool(kind: Any) -> bool:
    """Return whether a type is meant to take true and false, which Python counts as whole numbers."""
    return bool in (get_args(kind) or (kind,))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
