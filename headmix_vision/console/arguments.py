"""Command lines of argparse whose errors are one line."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from headmix_vision.checks import suggest

_UNKNOWN = "unrecognized arguments: "


def command_words() -> list[str]:
    """Return the words that call this command: `headmix train-cls`, `headmix-train-cls` or `python train_cls.py`."""
    program = Path(sys.argv[0])
    if program.parts[-2:] == ("headmix_vision", "__main__.py"):
        return ["python", "-m", "headmix_vision", *sys.argv[1:2]]
    if program.name == "headmix":
        return ["headmix", *sys.argv[1:2]]
    return [program.name] if program.name.startswith("headmix-") else ["python", sys.argv[0]]


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
            message = f"{given} is no option of this command" if given in options else unknown
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {' '.join(message.split())} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)

    def _option_strings(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from command._option_strings()
