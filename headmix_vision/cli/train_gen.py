"""`headmix train-gen`: train and validate generators."""

from collections.abc import Sequence

from headmix_vision.cli.training import run
from headmix_vision.recipes import DEFAULT


def main(args: Sequence[str] | None = None, default_config: str | None = DEFAULT) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    run("train-gen", "generator", args, default_config)
