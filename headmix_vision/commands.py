"""The installed commands, `headmix-train-cls` and so on; each imports its part of the package when it is called.

A part whose packages are not installed ends the command with one line that says what to install.
"""

from headmix_vision.errors import one_line_errors
from headmix_vision.extras import require_extra
from headmix_vision.recipes import DEFAULT


def train_cls() -> None:
    """Trains, validates, tests and uses classifiers."""
    with one_line_errors():
        from headmix_vision.training.classification_cli import main
    main(default_config=DEFAULT)


def train_gen() -> None:
    """Trains and validates generators."""
    with one_line_errors():
        from headmix_vision.training.generation_cli import main
    main(default_config=DEFAULT)


def sample() -> None:
    """Draws samples from a generator."""
    with one_line_errors():
        from headmix_vision.sampling.command import main
    main()


def evaluate() -> None:
    """Scores generated images."""
    with one_line_errors():
        from headmix_vision.evaluation.command import main
    main()


def export() -> None:
    """Exports the network of a run."""
    with one_line_errors():
        from headmix_vision.runs.export import main
    main()


def cache_latents() -> None:
    """Encodes images into latents."""
    with one_line_errors():
        require_extra("diffusion", "headmix-cache-latents")
        from headmix_vision.data.cache_latents import main
    main()


def models() -> None:
    """Lists the models."""
    with one_line_errors():
        from headmix_vision.models.listing import main
    main()
