"""`headmix distill`: train the attention layers of a generator after those of a teacher."""

from collections.abc import Sequence

from headmix_vision.cli.starting import importing
from headmix_vision.recipes import DEFAULT


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    with importing("distill"):
        from headmix_vision.training.distillation_cli import main as run
    run(args, default_config=DEFAULT)
