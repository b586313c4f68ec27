"""All options but Lightning's own keep their defaults: another one would change results without an error.

After a change that is meant, `python tests/test_defaults.py` writes the table anew.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import parser_of

from headmix_vision.cli import COMMANDS

ALIKE = ("predict", "test", "validate")  # take the options of `fit`
ALL = (*COMMANDS, "distill classifier")
TABLE = Path(__file__).parent / "fixtures" / "defaults.json"


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


if __name__ == "__main__":
    tables = [found(command) for command in ALL]
    TABLE.write_text(json.dumps({name: value for table in tables for name, value in table.items()}, indent=0) + "\n")
