"""`headmix evaluate`: score generated images and clips, and classifiers."""

from collections.abc import Sequence

from headmix_vision.cli.starting import importing


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    with importing("evaluate"):
        from headmix_vision.evaluation.command import main as run
    run(args)
