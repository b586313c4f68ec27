"""`headmix train-gen`: train and validate generators."""

from collections.abc import Sequence

from headmix_vision.cli.starting import importing
from headmix_vision.recipes import DEFAULT


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    with importing("train-gen"):
        from headmix_vision.training.generation_cli import main as run
    run(args, default_config=DEFAULT)
