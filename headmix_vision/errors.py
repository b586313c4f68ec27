"""Wrong input: checks before any work, the errors that a user can mend, and missing extras."""

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
# By extra, the packages whose lack keeps its part from being imported.
PACKAGES = {
    "models": ("timm", "safetensors"),
    "diffusion": ("timm", "safetensors", "diffusers", "rich"),
    "video": ("timm", "safetensors", "diffusers", "rich", "av"),
    "analysis": ("timm", "safetensors", "matplotlib", "scipy", "sklearn"),
    "train": ("timm", "diffusers", "jsonargparse", "lightning", "matplotlib", "sklearn", "tensorboard", "torchmetrics"),
    "lora": ("peft",),
    "eval": ("timm", "safetensors", "rich", "sklearn", "torch_fidelity"),
}


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


def message_of(error: Exception) -> str:
    """Say on one line, without its type, what a user can mend or the system refuses."""
    if isinstance(error, OSError) and error.strerror is not None:
        path = "" if error.filename is None else f": {error.filename}"
        return f"{error.strerror}{path}"
    return f"the memory does not suffice {error}" if isinstance(error, MemoryError) else str(error)


def is_whole(value: object) -> TypeGuard[int]:
    """Tell whether a value is a whole number, of whatever type but a truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_counts(least: int, most: float = math.inf, /, **counts: object) -> None:
    """Raise InputError for anything but a whole number from ``least`` to ``most``."""
    for name, value in counts.items():
        if not (is_whole(value) and least <= value <= most):
            limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise InputError(f"{name} must be a whole number {limits}, got {value!r}.")


def check_numbers(least: float, most: float = math.inf, /, **numbers: object) -> None:
    """Raise InputError for anything but a finite number from ``least`` to ``most``."""
    for name, value in numbers.items():
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        if not least <= number <= most or number == math.inf:  # a tracer can compare, but not `isinf`
            limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise InputError(f"{name} must be a finite number {limits}, got {value!r}.")


def check_positive(**numbers: object) -> None:
    """Raise InputError for anything but a finite number above 0."""
    for name, value in numbers.items():
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        if not 0 < number < math.inf:
            raise InputError(f"{name} must be a finite number above 0, got {value!r}.")


def check_flags(**flags: object) -> None:
    """Raise InputError for what is neither True nor False: the text "false" counts as true elsewhere."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} must be true or false, got {value!r}.")


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise InputError for a value that is none of the allowed ones."""
    if value not in allowed:
        raise InputError(f"{name} must be one of {allowed}, got {value!r}.")


def per_axis(name: str, value: Any, axes: int, least: int = 1) -> tuple[int, ...]:
    """Return one whole number for each of two or three axes: the given ones, or a single one for all axes.

    Raises:
        InputError: if there are more or fewer, or a number is below ``least``.
    """
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,) * axes
    if len(numbers) != axes:
        raise InputError(f"{name} must be one whole number or {('two', 'three')[axes - 2]}, got {value!r}.")
    for number in numbers:
        check_counts(least, **{name: number})
    return tuple(map(int, numbers))  # whole numbers of NumPy are no JSON


def pair(name: str, value: Any, least: int = 1) -> tuple[int, int]:
    """Return two whole numbers, of height and width, see :func:`per_axis`."""
    height, width = per_axis(name, value, 2, least)
    return height, width


def keywords(owner: type, leave_out: tuple[str, ...] = ()) -> list[str]:
    """List the arguments that a class takes by name, with its base's where it passes unknown arguments on."""
    names: list[str] = []
    for cls in owner.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in dict.fromkeys(names) if name not in leave_out]


def suggest(given: str, known: Iterable[str], otherwise: str = "", *, most: int = 1) -> str:
    """End a message about an unknown name with the names that are nearest to it.

    Args:
        given: The unknown name.
        known: What it could be; of a mapping its keys, and their values are shown.
        otherwise: What to say when none is near.
        most: The number of names to show.

    Returns:
        `; did you mean a or b?`, or `otherwise` behind a semicolon, or nothing.
    """
    known = known if isinstance(known, Mapping) else {name: name for name in known}
    close = dict.fromkeys(known[name] for name in difflib.get_close_matches(given, known, n=most))
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return otherwise and f"; {otherwise}"


def unknown_keyword(what: str, name: str, known: list[str]) -> str:
    """Say that there is no such argument, which one is near, and which there are."""
    hint = suggest(name, known)
    return f"{what} has no {name!r}{f'{hint} It' if hint else '; it'} takes {', '.join(known) or 'nothing'}."


def check_keywords(what: str, given: object, known: list[str]) -> None:
    """Raise InputError if arguments are not a mapping, and UnknownKeywordError, a kind of it, for unknown names."""
    if not isinstance(given, Mapping):
        raise InputError(f"{what} must be a mapping of names to values, got {given!r}.")
    for name in given:
        if name not in known:
            raise UnknownKeywordError(unknown_keyword(what, str(name), known))


def literals(request: Any, name: str) -> tuple[str, ...]:
    """List the texts that a field of a request may hold, as its `Literal` type names them."""
    hint = _hints(request)[name]
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(text for one in hints if get_origin(one) is Literal for text in get_args(one))


def check_request(request: Any) -> None:
    """Check the fields of a request, a frozen dataclass, and turn texts into the paths that its types name.

    Raises:
        InputError: A text that is none of those that the type of its field names.
    """
    hints = _hints(type(request))
    for field in fields(request):
        value, allowed = getattr(request, field.name), literals(type(request), field.name)
        if allowed and isinstance(value, str) and value not in allowed:
            raise InputError(f"{field.name} must be one of {', '.join(allowed)}, got {value!r}")
        if isinstance(value, str) and (hints[field.name] is Path or Path in get_args(hints[field.name])):
            object.__setattr__(request, field.name, Path(value))


class MissingExtraError(ImportError, InputError):
    """A package of an extra is not installed; the message is the command that installs it."""


def imported_when_used(
    package: str, module: str, names: Collection[str], extra: str | None = None
) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package whose names come from a module that is slow to import.

    Args:
        package: The package.
        module: A module in it.
        names: What the package offers.
        extra: The extra that they need; None where the package itself requires it.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if extra is not None:
            require_extra(extra, name)
        return getattr(import_module(f"{package}.{module}"), name)

    return get


def require_extra(extra: str, what: str) -> None:
    """Tell what to install, unless the packages of an extra are there; none of them is loaded.

    Args:
        extra: One of `PACKAGES`.
        what: What needs them, to begin the message.

    Raises:
        MissingExtraError: The first package that is missing.
    """
    for package in PACKAGES[extra]:
        if find_spec(package) is None:
            raise MissingExtraError(
                f"{what} needs the package {package}: pip install 'headmix_vision[{extra}]'", name=package
            )
