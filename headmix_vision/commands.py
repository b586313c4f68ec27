"""The installed commands, `headmix-train-cls` and so on; each imports its part of the package when it is called.

A part whose packages are not installed ends the command with one line that says what to install. The arguments are
those of the process when None.
"""

from collections.abc import Sequence

from headmix_vision.errors import one_line_errors
from headmix_vision.extras import require_extra
from headmix_vision.recipes import DEFAULT


def train_cls(args: Sequence[str] | None = None) -> None:
    """Trains, validates, tests and uses classifiers."""
    with one_line_errors():
        from headmix_vision.training.classification_cli import main
    main(args, default_config=DEFAULT)


def train_gen(args: Sequence[str] | None = None) -> None:
    """Trains and validates generators."""
    with one_line_errors():
        from headmix_vision.training.generation_cli import main
    main(args, default_config=DEFAULT)


def distill(args: Sequence[str] | None = None) -> None:
    """Trains generators after a teacher with another attention."""
    with one_line_errors():
        from headmix_vision.training.distillation_cli import main
    main(args, default_config=DEFAULT)


def sample(args: Sequence[str] | None = None) -> None:
    """Draws samples from a generator."""
    with one_line_errors():
        from headmix_vision.sampling.command import main
    main(args)


def evaluate(args: Sequence[str] | None = None) -> None:
    """Scores generated images."""
    with one_line_errors():
        from headmix_vision.evaluation.command import main
    main(args)


def export(args: Sequence[str] | None = None) -> None:
    """Exports the network of a run."""
    with one_line_errors():
        from headmix_vision.runs.export import main
    main(args)


def analyze(args: Sequence[str] | None = None) -> None:
    """Looks into the attention layers of trained networks."""
    with one_line_errors():
        require_extra("analysis", "headmix-analyze")
        from headmix_vision.analysis.command import main
    main(args)


def cache_latents(args: Sequence[str] | None = None) -> None:
    """Encodes images into latents."""
    with one_line_errors():
        require_extra("diffusion", "headmix-cache-latents")
        from headmix_vision.data.cache_latents import main
    main(args)


def index_shards(args: Sequence[str] | None = None) -> None:
    """Makes the index of a folder of tar shards."""
    with one_line_errors():
        require_extra("diffusion", "headmix-index-shards")
        from headmix_vision.data.index_shards import main
    main(args)


def models(args: Sequence[str] | None = None) -> None:
    """Lists the models."""
    with one_line_errors():
        from headmix_vision.models.listing import main
    main(args)
