"""Command lines of argparse whose errors are one line."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

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


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, with the nearest option where one is misspelt."""

    def parse_known_args(self, args: Any = None, namespace: Any = None, *more: Any) -> Any:
        """Refuses empty texts, which name no file, split or anything else, and parses the others."""
        words = [*(sys.argv[1:] if args is None else args)]
        for before, word in zip(["", *words], words, strict=False):
            if word == "" or (word.startswith("--") and word.endswith("=")):
                option = word.removesuffix("=") or before
                self.error(f"{option if option.startswith('-') else 'an argument'} is '', it must not be empty")
        return super().parse_known_args(args, namespace, *more)

    def error(self, message: str) -> NoReturn:
        """Prints the line, of several processes the first one alone, and ends the process with status 2."""
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
