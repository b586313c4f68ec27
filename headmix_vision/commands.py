"""The commands of `headmix COMMAND`, also installed as `headmix-train-cls` and so on.

Each command imports its part of the package when it is called. A part whose packages are not installed ends the command
with one line that names what to install. The arguments are those of the process when None.
"""

import atexit
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headmix_vision.checks import suggest
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.extras import require_extra
from headmix_vision.recipes import DEFAULT


@contextmanager
def _importing() -> Iterator[None]:
    """End the process with one line if a part cannot be imported, and hide what is imported from garbage collection.

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
        if _names_leaks():
            atexit.register(gc.unfreeze)


def _names_leaks() -> bool:
    """Tell whether a Triton is loaded that prints all that is not freed when the process ends, as 3.9 does."""
    triton = sys.modules.get("triton")
    return triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def train_cls(args: Sequence[str] | None = None) -> None:
    """Train, validate, test and use classifiers."""
    with _importing():
        from headmix_vision.training.classification_cli import main
    main(args, default_config=DEFAULT)


def train_gen(args: Sequence[str] | None = None) -> None:
    """Train and validate generators."""
    with _importing():
        from headmix_vision.training.generation_cli import main
    main(args, default_config=DEFAULT)


def distill(args: Sequence[str] | None = None) -> None:
    """Train the attention layers of a generator after those of a teacher."""
    with _importing():
        from headmix_vision.training.distillation_cli import main
    main(args, default_config=DEFAULT)


def sample(args: Sequence[str] | None = None) -> None:
    """Draw samples from a generator."""
    with _importing():
        from headmix_vision.sampling.command import main
    main(args)


def evaluate(args: Sequence[str] | None = None) -> None:
    """Score generated images and clips, and classifiers."""
    with _importing():
        from headmix_vision.evaluation.command import main
    main(args)


def export(args: Sequence[str] | None = None) -> None:
    """Export the network of a run."""
    with _importing():
        from headmix_vision.runs.export import main
    main(args)


def analyze(args: Sequence[str] | None = None) -> None:
    """Look into the attention layers of trained networks."""
    with _importing():
        require_extra("analysis", "headmix-analyze")
        from headmix_vision.analysis.command import main
    main(args)


def cache_latents(args: Sequence[str] | None = None) -> None:
    """Encode images or videos into latents."""
    with _importing():
        require_extra("diffusion", "headmix-cache-latents")
        from headmix_vision.data.cache_latents import main
    main(args)


def index_shards(args: Sequence[str] | None = None) -> None:
    """Make the index of a folder of tar shards."""
    with _importing():
        require_extra("diffusion", "headmix-index-shards")
        from headmix_vision.data.index_shards import main
    main(args)


def models(args: Sequence[str] | None = None) -> None:
    """List the models of the package."""
    with _importing():
        from headmix_vision.models.listing import main
    main(args)


def doctor(args: Sequence[str] | None = None) -> None:
    """Check the kernels on this machine, and time them against PyTorch's softmax."""
    from headmix_vision.doctor.command import main

    main(args)


COMMANDS: dict[str, Callable[[Sequence[str] | None], None]] = {
    "doctor": doctor,
    "models": models,
    "train-cls": train_cls,
    "train-gen": train_gen,
    "distill": distill,
    "sample": sample,
    "evaluate": evaluate,
    "export": export,
    "analyze": analyze,
    "cache-latents": cache_latents,
    "index-shards": index_shards,
}


def main(args: Sequence[str] | None = None) -> None:
    """Run `headmix COMMAND [ARGUMENTS ...]`: the list of commands needs no import of torch."""
    name, *arguments = [*(sys.argv[1:] if args is None else args)] or [""]
    if name in ("-h", "--help"):
        print(_help())
        return
    with one_line_errors():
        if name not in COMMANDS:
            what = f"no command is called {name!r}{suggest(name, list(COMMANDS)) or '.'}" if name else "name a command."
            raise InputError(f"{what} The commands are {', '.join(COMMANDS)}")
    COMMANDS[name](arguments)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {(run.__doc__ or '').splitlines()[0]}" for name, run in COMMANDS.items()]
    notes = (
        "headmix COMMAND --help shows the arguments of a command.",
        "python -m headmix_vision SCRIPT.py runs a script with the models registered with timm.",
    )
    return "\n".join(["usage: headmix COMMAND [ARGUMENTS ...]", "", *lines, "", *notes])
