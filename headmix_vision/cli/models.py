"""`headmix models`: list the models of the package."""

from collections.abc import Sequence

from headmix_vision.cli.starting import importing


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    with importing("models"):
        from headmix_vision.models.listing import main as run
    run(args)
