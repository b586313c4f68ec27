"""The job of training: a request, or the words of a command line, become a run directory."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from headmix_vision.errors import check_request
from headmix_vision.training.base_cli import run_words

Kind = Literal["classifier", "generator", "distilled", "distilled_classifier"]
_CLIS = {
    "classifier": ("classification_cli", "ClassificationCLI"),
    "generator": ("generation_cli", "GenerationCLI"),
    "distilled": ("distillation_cli", "DistillationCLI"),
    "distilled_classifier": ("distillation_cli", "ClassifierDistillationCLI"),
}


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """Request for training, or for the validation, test or predictions of a run.

    Args:
        kind: What is trained; `distilled` is a generator, `distilled_classifier` a classifier or backbone, whose
            attention layers learn from a teacher.
        action: `fit` trains, the others use the weights of a run; generators have `fit` and `validate`.
        configs: Recipes by name, or files; later ones win.
        options: Options by the names of the command line, which win over the configs:
            `{"trainer.max_epochs": 3, "model.model_args": {"cpe": True}}`.
        run_dir: Directory of the run; named after configs and model when None.
        checkpoint: Checkpoint to go on from or to use: `last`, `best`, a file, or `auto`: `last` if there is one.
        overwrite: Replace an earlier run in the directory.

    Raises:
        InputError: An unknown kind or action.
    """

    kind: Kind
    action: Literal["fit", "validate", "test", "predict"] = "fit"
    configs: Sequence[str | Path] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    run_dir: Path | None = None
    checkpoint: str | Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_request(self)

    def words(self) -> list[str]:
        """Return the request as the words of a command line."""
        named = {"run_dir": self.run_dir, "ckpt_path": self.checkpoint}
        given = {name: value for name, value in named.items() if value is not None}
        words = [word for config in self.configs for word in ("--config", str(config))]
        words += ["--overwrite"] if self.overwrite else []
        for name, value in {**self.options, **given}.items():
            words.append(f"--{name}={value if isinstance(value, str | Path) else json.dumps(value)}")
        return [self.action, *words]


@dataclass(frozen=True)
class Trained:
    """Result of `train`.

    Args:
        run_dir: Directory of the run.
        metrics: What was logged last, by name.
        summary: Result in words, for the first process.
    """

    run_dir: Path
    metrics: dict[str, float]
    summary: str = ""

    def __str__(self) -> str:
        return self.summary


def train(request: TrainingRequest) -> Trained:
    """Train, validate, test or predict.

    Raises:
        InputError: Wrong input, before any work; a batch too large for the device.
        NonFiniteError: NaN or infinite losses or gradients.
        RunLostError: The run directory has disappeared.
    """
    return train_by_words(request.kind, request.words())


def train_by_words(
    kind: Kind,
    words: Sequence[str],
    default_config: str | None = None,
    ending: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Trained:
    """Do what the words of a command line ask for; see `train`.

    Args:
        kind: What is trained.
        words: Action and options, which may be spelled with hyphens.
        default_config: Recipe of `fit` where the words name none.
        ending: Makes the context that handles errors; it is entered before the run directory is claimed.
    """
    module, name = _CLIS[kind]
    cli = getattr(import_module(f"headmix_vision.training.{module}"), name)
    done = run_words(cli, words, default_config, ending)
    metrics = {name: float(value) for name, value in done.trainer.callback_metrics.items()}
    return Trained(Path(done.options.run_dir), metrics, done.summary)
