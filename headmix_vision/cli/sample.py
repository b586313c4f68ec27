"""`headmix sample`: draw samples from a generator."""

from collections.abc import Sequence

from headmix_vision.cli.starting import importing


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    with importing("sample"):
        from headmix_vision.sampling.command import main as run
    run(args)
