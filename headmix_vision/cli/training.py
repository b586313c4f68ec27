"""Help and exit of the training commands."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from headmix_vision.console import end, importing, one_line_errors
from headmix_vision.recipes import DEFAULT, PROMPTED

if TYPE_CHECKING:
    from headmix_vision.training.base_cli import RunCLI


Kind = Literal["classifier", "generator", "distilled", "distilled_classifier"]


def run(
    command: str,
    kind: Kind,
    args: Sequence[str] | None,
    default_config: str | None,
) -> None:
    """Run a training command.

    Args:
        command: Its name.
        kind: What is trained.
        args: Subcommand and options; the arguments of the process when None.
        default_config: Recipe of `fit` where the arguments name none.
    """
    words = sys.argv[1:] if args is None else args
    with one_line_errors():
        from headmix_vision.training.command_help import asked_help, check_subcommand

        check_subcommand(kind, words)
    if (text := asked_help(kind, words)) is not None:
        print(text, end="")
        return
    if default_config == DEFAULT and any(word.partition("=")[0] == "--model.transformer" for word in words):
        default_config = PROMPTED
    with importing(command):
        from headmix_vision.training.training_job import train_by_words
    _say(train_by_words(kind, words, default_config, one_line_endings).summary)


def run_command_line(cli: "type[RunCLI]", args: Sequence[str], default_config: str | None = None) -> None:
    """Run the command line of a subclass of `RunCLI`; see `one_line_endings`."""
    from headmix_vision.training.base_cli import run_words

    _say(run_words(cli, args, default_config, one_line_endings).summary)


def _say(summary: str) -> None:
    if summary:
        print(summary)


@contextmanager
def one_line_endings() -> Iterator[None]:
    """End the process with one line on what a user can mend.

    Wrong input, and a batch too large for the device, end it with status 2. Non-finite numbers, and a run directory
    that is lost, end it with status 1. Every other exception is a defect and keeps its traceback.
    """
    from headmix_vision.training.callbacks.non_finite import NonFiniteError
    from headmix_vision.training.run_directory import RunLostError

    with one_line_errors():
        try:
            yield
        except (NonFiniteError, RunLostError) as error:
            end(str(error), status=1)
