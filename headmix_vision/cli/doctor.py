"""`headmix doctor`: check the kernels on this machine."""

from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    from headmix_vision.doctor.command import main as run

    run(args)
