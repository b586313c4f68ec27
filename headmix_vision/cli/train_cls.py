"""`headmix train-cls`: train, validate, test and use classifiers."""

import sys
from collections.abc import Sequence

from headmix_vision.cli.starting import importing
from headmix_vision.errors import one_line_errors
from headmix_vision.recipes import DEFAULT


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    given = sys.argv[1:] if args is None else args
    with one_line_errors():
        from headmix_vision.training.command_help import asked_help
    if (text := asked_help("cls", given)) is not None:
        print(text, end="")
        return
    with importing("train-cls"):
        from headmix_vision.training.classification_cli import main as train
    train(given, default_config=DEFAULT)
