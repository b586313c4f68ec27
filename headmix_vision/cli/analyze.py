"""`headmix analyze`: look into the attention layers of trained networks."""

from collections.abc import Sequence

from headmix_vision.cli.starting import importing
from headmix_vision.extras import require_extra


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    with importing("analyze"):
        require_extra("analysis", "headmix-analyze")
        from headmix_vision.analysis.command import main as run
    run(args)
