"""The installed commands, `headmix-train-cls` and so on; each imports its part of the package when it is called.

A part whose packages are not installed ends the command with one line that says what to install. The arguments are
those of the process when None.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headmix_vision.errors import one_line_errors
from headmix_vision.extras import require_extra
from headmix_vision.recipes import DEFAULT


@contextmanager
def _importing() -> Iterator[None]:
    """Ends the process with one line if a part cannot be imported, and hides what is imported from garbage collection.

    Imports make 600,000 objects that stay until the end. The collector would go through all of them again and again,
    and once more when the process ends, which takes more than a second.
    """
    known, collects = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        with one_line_errors():
            yield
    finally:
        if collects:
            gc.enable()
    if len(sys.modules) > known:  # not in a later call, which would keep the garbage of the calls before
        gc.freeze()


def train_cls(args: Sequence[str] | None = None) -> None:
    """Trains, validates, tests and uses classifiers."""
    with _importing():
        from headmix_vision.training.classification_cli import main
    main(args, default_config=DEFAULT)


def train_gen(args: Sequence[str] | None = None) -> None:
    """Trains and validates generators."""
    with _importing():
        from headmix_vision.training.generation_cli import main
    main(args, default_config=DEFAULT)


def distill(args: Sequence[str] | None = None) -> None:
    """Trains generators after a teacher with another attention."""
    with _importing():
        from headmix_vision.training.distillation_cli import main
    main(args, default_config=DEFAULT)


def sample(args: Sequence[str] | None = None) -> None:
    """Draws samples from a generator."""
    with _importing():
        from headmix_vision.sampling.command import main
    main(args)


def evaluate(args: Sequence[str] | None = None) -> None:
    """Scores generated images."""
    with _importing():
        from headmix_vision.evaluation.command import main
    main(args)


def export(args: Sequence[str] | None = None) -> None:
    """Exports the network of a run."""
    with _importing():
        from headmix_vision.runs.export import main
    main(args)


def analyze(args: Sequence[str] | None = None) -> None:
    """Looks into the attention layers of trained networks."""
    with _importing():
        require_extra("analysis", "headmix-analyze")
        from headmix_vision.analysis.command import main
    main(args)


def cache_latents(args: Sequence[str] | None = None) -> None:
    """Encodes images into latents."""
    with _importing():
        require_extra("diffusion", "headmix-cache-latents")
        from headmix_vision.data.cache_latents import main
    main(args)


def index_shards(args: Sequence[str] | None = None) -> None:
    """Makes the index of a folder of tar shards."""
    with _importing():
        require_extra("diffusion", "headmix-index-shards")
        from headmix_vision.data.index_shards import main
    main(args)


def models(args: Sequence[str] | None = None) -> None:
    """Lists the models."""
    with _importing():
        from headmix_vision.models.listing import main
    main(args)
