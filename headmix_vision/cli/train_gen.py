"""`headmix train-gen`: train and validate generators."""

import sys
from collections.abc import Sequence

from headmix_vision.cli.training import run
from headmix_vision.recipes import DEFAULT, PROMPTED


def main(args: Sequence[str] | None = None, default_config: str | None = DEFAULT) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    words = sys.argv[1:] if args is None else args
    if default_config == DEFAULT and any(word.partition("=")[0] == "--model.transformer" for word in words):
        default_config = PROMPTED
    run("train-gen", "generator", args, default_config)
