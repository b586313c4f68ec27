"""Define the command line of classifier training: `fit`, `validate`, `test` and `predict`."""

from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningArgumentParser

from headmix_vision.data.classification import ClassificationData
from headmix_vision.runs.directory import BEST, CHECKPOINTS, CURVES, LAST, PREDICTIONS
from headmix_vision.training.base_cli import RunCLI
from headmix_vision.training.callbacks.checkpointing import BestCheckpoint
from headmix_vision.training.callbacks.classifier_results import (
    ClassReport,
    PredictionsCSV,
    class_rows,
    format_rows,
    write_report,
)
from headmix_vision.training.callbacks.curves import LearningCurves
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.classifier import ImageClassifier
from headmix_vision.training.options import MONITORED, BestConfig


class ClassificationCLI(RunCLI):
    """Train and evaluate classifiers from the command line: `headmix train-cls`."""

    module_class: ClassVar[type[LightningModule]] = ImageClassifier
    data_class = ClassificationData
    kind = "classifier"
    best_class: ClassVar[type] = BestConfig

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the choice of the best checkpoint to the options of all trainings."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(self.best_class, "best")

    @property
    def monitor(self) -> str:
        """Metric that selects the best checkpoint."""
        return str(self.config_init["fit"].best.monitor)

    def fit_callbacks(self, run_dir: Path, average: EmaWithWarmup | None) -> list[Callback]:
        """Return learning curves and the best checkpoint."""
        self.best = BestCheckpoint(run_dir / CHECKPOINTS, self.monitor)
        return [LearningCurves(run_dir / CURVES, lambda: self.metrics.rows), self.best]

    def evaluation_callbacks(self, run_dir: Path) -> list[Callback]:
        """Make the table of predictions for `predict`, and count the classes for `validate` and `test`."""
        self.report = ClassReport()
        return [PredictionsCSV(run_dir / PREDICTIONS) if self.config.subcommand == "predict" else self.report]

    def after_fit(self) -> None:
        """Sum up the best validation, if there was one, and where the files are."""
        rows = [row for row in self.metrics.rows if self.monitor in row]
        run_dir = Path(self.options.run_dir)
        if not self.trainer.is_global_zero or self.options.trainer.fast_dev_run:
            return
        if not rows:
            self.summary = f"run {run_dir} · checkpoint {run_dir / LAST}"
            return
        choose = min if self.best.mode == "min" else max
        best = choose(rows, key=lambda row: row[self.monitor])
        value = best[self.monitor]
        found = f"{100 * value:.2f} %" if self.monitor in ("val/top1", "val/balanced") else f"{value:.4f}"
        self.summary = (
            f"best {MONITORED[self.monitor]} {found} (epoch {best['epoch'] + 1:.0f}) · run {run_dir}"
            f" · checkpoint {run_dir / BEST} · curves {run_dir / CURVES}"
        )

    def after_validate(self) -> None:
        """Sum up the accuracy of the classes, and write it with the confusion matrix."""
        self._report("val")

    def after_test(self) -> None:
        """Sum up the accuracy of the classes, and write it with the confusion matrix."""
        self._report("test")

    def _report(self, split: str) -> None:
        matrix = self.report.matrix
        if not self.trainer.is_global_zero or matrix is None or not matrix.any():
            return
        names = self.model.class_names or [str(i) for i in range(len(matrix))]
        paths = write_report(Path(self.options.run_dir), split, matrix, names)
        self.summary = f"{format_rows(class_rows(matrix, names))}\nwrote {', '.join(map(str, paths))}"

    def predict(self, **kwargs: Any) -> None:
        """Predict without keeping the predictions in memory."""
        self.trainer.predict(**{**kwargs, "return_predictions": False})
