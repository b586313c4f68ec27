"""The job of training, from a request to a run directory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from headmix_vision.training.base_cli import run_words
from headmix_vision.training.training_request import TrainingRequest

_CLIS = {
    "classifier": ("classification_cli", "ClassificationCLI"),
    "generator": ("generation_cli", "GenerationCLI"),
    "distilled": ("generation_cli", "DistillationCLI"),
}


@dataclass(frozen=True)
class Trained:
    """Result of `train`.

    Args:
        run_dir: Directory of the run.
        metrics: What was logged last, by name.
    """

    run_dir: Path
    metrics: dict[str, float]


def train(request: TrainingRequest, ending: Callable[[], AbstractContextManager[object]] = nullcontext) -> Trained:
    """Train, validate, test or predict.

    Args:
        request: What is done.
        ending: Makes the context that handles errors; it is entered before the run directory is claimed.

    Raises:
        InputError: Wrong input, before any work; a batch too large for the device.
        NonFiniteError: NaN or infinite losses or gradients.
        RunLostError: The run directory has disappeared.
    """
    module, name = _CLIS[request.kind]
    cli = getattr(import_module(f"headmix_vision.training.{module}"), name)
    done = run_words(cli, request.words, request.default_config, ending)
    metrics = {name: float(value) for name, value in done.trainer.callback_metrics.items()}
    return Trained(Path(done.options.run_dir), metrics)
