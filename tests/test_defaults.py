"""Options, parameters and constants keep their values: another one would change results without an error.

After a change that is meant, `python tests/test_defaults.py` writes the tables anew.
"""

import argparse
import ast
import importlib
import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hostile import parser_of

from headmix_vision.cli import COMMANDS

ALIKE = ("predict", "test", "validate")  # take the options of `fit`
ALL = (*COMMANDS, "distill classifier")
FIXTURES = Path(__file__).parent / "fixtures"
TABLE, VALUES = FIXTURES / "defaults.json", FIXTURES / "values.json"
PACKAGE = Path(__file__).parents[1] / "headmix_vision"
LEFT_OUT = {"__main__.py", "triton_tuning.py"}  # a program; tiles, which change no result
FILES = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py")) if path.name not in LEFT_OUT]
MADE = {"_field_defaults", "_is_protocol"}  # by Python
NOT_KEPT = {"EMULATED", "FAMILIES", "INTERPRETED", "NO_KERNELS", "_PARENT"}  # of the machine, or made of others


def defaults(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, Any]]:
    """Yield command and option, and the default, of a parser and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                if name not in ALIKE:
                    yield from defaults(inner, f"{words} {name}")
        elif action.option_strings and not action.dest.startswith("trainer.") and action.default != argparse.SUPPRESS:
            yield f"{words} {action.option_strings[-1]}", json.loads(json.dumps(action.default, default=str))


def found(command: str) -> dict[str, Any]:
    """Return the defaults of a command."""
    return dict(sorted(defaults(parser_of(command), command)))


@pytest.mark.parametrize("command", ALL)
def test_defaults_are_kept(command: str) -> None:
    known = json.loads(TABLE.read_text())
    others = tuple(f"{other} " for other in ALL if other.startswith(f"{command} "))
    own = (name for name in known if name.startswith(f"{command} ") and not name.startswith(others))
    assert found(command) == {name: known[name] for name in own}


def plain(value: Any) -> Any:
    """Return the numbers of a value in the types of JSON, None where it has none."""
    if isinstance(value, bool | int | float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        inner = {str(key): plain(one) for key, one in value.items()}
        return {key: one for key, one in inner.items() if one is not None} or None
    if isinstance(value, list | tuple):
        listed = [plain(one) for one in value]
        return listed if any(one is not None for one in listed) else None
    return None


def parameters(value: Any) -> Any:
    """Return the defaults of a function."""
    value = inspect.unwrap(getattr(value, "__func__", value))
    known = inspect.signature(value).parameters.values() if inspect.isfunction(value) else ()
    return plain({parameter.name: parameter.default for parameter in known})


def members(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of a class's fields and methods, and its attributes."""
    stated = {field.name: field for field in fields(value)} if is_dataclass(value) else {}
    for name, field in stated.items():
        yield name, plain(field.default if field.default_factory is MISSING else field.default_factory())
    yield from ((name, plain(default)) for name, default in getattr(value, "_field_defaults", {}).items())
    for name, inner in vars(value).items():
        if name not in {*stated, *MADE} and (not name.startswith("__") or (name == "__init__" and not stated)):
            yield name, parameters(inner) or plain(inner)


def values(file: str) -> dict[str, Any]:
    """Return the numbers that a file of the package states outside of its functions' bodies."""
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    module = importlib.import_module("headmix_vision" if name == "__init__" else f"headmix_vision.{name}")
    body = ast.parse((PACKAGE / file).read_text()).body
    nodes = [x for set_here in body if isinstance(set_here, ast.Assign | ast.AnnAssign) for x in ast.walk(set_here)]
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    names = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)} - NOT_KEPT
    stated: dict[str, Any] = {}
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", None) == module.__name__
        if inspect.isclass(value) and is_own:
            stated |= {f"{name}.{member}": known for member, known in members(value)}
        elif name in names:
            stated[name] = plain(value)
        elif is_own and name in functions:
            stated[name] = parameters(value)
    return {name: value for name, value in sorted(stated.items()) if value is not None}


@pytest.mark.parametrize("file", FILES)
def test_values_are_kept(file: str) -> None:
    assert values(file) == json.loads(VALUES.read_text()).get(file, {})


if __name__ == "__main__":
    tables = [found(command) for command in ALL]
    TABLE.write_text(json.dumps({name: value for table in tables for name, value in table.items()}, indent=0) + "\n")
    stated = {
        file: [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values(file).items()] for file in FILES
    }
    parts = [f"{json.dumps(file)}: {{\n{(',' + chr(10)).join(lines)}\n}}" for file, lines in stated.items() if lines]
    VALUES.write_text("{\n" + ",\n".join(parts) + "\n}\n")
