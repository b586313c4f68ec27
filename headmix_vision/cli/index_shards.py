"""`headmix index-shards`: make the index of a folder of tar shards."""

from collections.abc import Sequence

from headmix_vision.cli.starting import importing
from headmix_vision.extras import require_extra


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    with importing("index-shards"):
        require_extra("diffusion", "headmix-index-shards")
        from headmix_vision.data.index_shards import main as run
    run(args)
