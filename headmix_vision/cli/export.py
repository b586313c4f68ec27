"""`headmix export`: export the network of a run."""

from collections.abc import Sequence

from headmix_vision.cli.starting import importing


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    with importing("export"):
        from headmix_vision.runs.export import main as run
    run(args)
