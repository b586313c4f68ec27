"""`headmix cache-latents`: encode images or videos into latents."""

from collections.abc import Sequence

from headmix_vision.cli.starting import importing
from headmix_vision.extras import require_extra


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; its arguments are those of the process when None."""
    with importing("cache-latents"):
        require_extra("diffusion", "headmix-cache-latents")
        from headmix_vision.data.cache_latents import main as run
    run(args)
