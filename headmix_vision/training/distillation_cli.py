"""Define the command lines of `headmix distill`: generators and classifiers after a teacher."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from headmix_vision.errors import InputError
from headmix_vision.runs.directory import CURVES
from headmix_vision.training.base_cli import RunCLI
from headmix_vision.training.callbacks.checkpointing import EarlyStop, StageStop
from headmix_vision.training.callbacks.classifier_results import ClassReport
from headmix_vision.training.callbacks.curves import DISTILLED_PANELS, LearningCurves
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.classification_cli import ClassificationCLI
from headmix_vision.training.distillation import DistilledClassifier, DistilledGenerator
from headmix_vision.training.generation_cli import GenerationCLI
from headmix_vision.training.options import DistilledBestConfig, EarlyStoppingConfig
from headmix_vision.training.sharding import ShardedStrategy


class _OfTeacher(RunCLI):
    """Base class of the command lines of distillation."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """As `RunCLI` says; under DDP some weights have no gradient, while attention layers learn alone.

        Raises:
            InputError: Also if the student would be sharded: its attention layers run outside of the blocks that
                gather weights.
        """
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(trainer.strategy, ShardedStrategy):
            raise InputError("distillation cannot shard the student: set trainer.strategy=ddp")
        if (ddp := getattr(trainer.strategy, "_ddp_kwargs", None)) is not None:
            ddp.setdefault("find_unused_parameters", True)
        return trainer


class DistillationCLI(_OfTeacher, GenerationCLI):
    """Train generators after a teacher, from the command line: `headmix distill`."""

    module_class = DistilledGenerator
    kind = "distilled"
    runs_folder = "runs/distilled"


class ClassifierDistillationCLI(_OfTeacher, ClassificationCLI):
    """Give trained classifiers and backbones another attention, from the command line: `headmix distill classifier`."""

    module_class = DistilledClassifier
    kind = "distilled_classifier"
    runs_folder = "runs/distilled"
    best_class = DistilledBestConfig

    def default_run_name(self) -> str:
        """Join the names of the config files, of a teacher on the command line, and of the core."""
        stems = self.config_names()
        if not stems or "model.teacher" in self.given:
            stems.append(Path(self.options.model.teacher.rpartition(":")[2]).stem)
        return "-".join([*stems, *([self.options.model.core] if "model.core" in self.given else [])])

    def complete_options(self) -> None:
        """Let the stages decide how long the run is."""
        model = self.options.model
        self.options.trainer.max_epochs = -1
        self.options.trainer.max_steps = sum(stage.steps for stage in (model.attention, model.features, model.labels))

    def check_model(self, checkpoint: dict[str, Any]) -> None:
        """Leave the comparison to the module, which knows the student."""

    def early_stop(self, config: EarlyStoppingConfig) -> EarlyStop:
        """Return the rule that ends a stage."""
        return StageStop(config, self.monitor)

    def fit_callbacks(self, run_dir: Path, average: EmaWithWarmup | None) -> list[Callback]:
        """Return learning curves and the best checkpoint."""
        _, best = super().fit_callbacks(run_dir, average)
        curves = LearningCurves(
            run_dir / CURVES, lambda: self.metrics.rows, panels=DISTILLED_PANELS, needs="val/feature_cosine"
        )
        return [curves, best]

    def after_fit(self) -> None:
        """Sum up the last validation, if there was one, and where the files are."""
        super().after_fit()
        if self.summary:
            self.summary = f"{self._figures()}{self.summary}"

    def after_validate(self) -> None:
        """Sum up the errors against the teacher, and where there are labels the accuracy of the classes."""
        super().after_validate()
        if self.trainer.is_global_zero:
            self.summary = f"{self._figures()}{self.summary}".rstrip("\n")

    def _figures(self) -> str:
        logged = self.trainer.callback_metrics
        names = {"val/attention_error": "attention error", "val/feature_cosine": "feature cosine"}
        shown = [f"{words} {float(logged[name]):.4f}" for name, words in names.items() if name in logged]
        return f"{', '.join(shown)}\n" if shown else ""

    def evaluation_callbacks(self, run_dir: Path) -> list[Callback]:
        """Return the callbacks of classifiers; without labels, leave out the counts of classes."""
        callbacks = super().evaluation_callbacks(run_dir)
        return [one for one in callbacks if self.model.labelled or not isinstance(one, ClassReport)]
