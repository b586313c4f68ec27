"""Write what the evaluation of a classifier found: accuracy of the classes, confusion matrix, predictions.

C classes.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torchmetrics.classification import MulticlassConfusionMatrix

from headmix_vision.files.writing import atomic_path
from headmix_vision.training.callbacks.non_finite import NonFiniteError

MOST_CLASSES = 2000  # a matrix of 32 MB on the device, and a CSV file of 8 MB
_PRINTED, _NAMED = 12, 40  # classes in the printed table, classes named in the picture
_SHOWN = 8  # predictions that are printed, too


Row = tuple[str, list[str], list[float]]


class ClassRow(NamedTuple):
    """Result for the images of one class."""

    name: str
    images: int
    correct: int
    taken_for: str | None
    taken: int

    @property
    def accuracy(self) -> float:
        """Share of the images that were recognised; NaN where there are none."""
        return self.correct / self.images if self.images else float("nan")


class ClassReport(Callback):
    """Count true and predicted classes of a validation or test, over all processes.

    The module's `validation_step` and `test_step` return predicted classes [B], or None for an empty batch.

    Attributes:
        matrix: int64 [C, C], images by true and predicted class; None before the end, and where there are more than
            2,000 classes.
    """

    def __init__(self) -> None:
        self.matrix: np.ndarray | None = None
        self._metric: MulticlassConfusionMatrix | None = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the count."""
        classes = int(pl_module.num_classes)  # type: ignore[arg-type]
        self._metric = MulticlassConfusionMatrix(classes).to(pl_module.device) if classes <= MOST_CLASSES else None

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch."""
        if self._metric is not None and outputs is not None:
            self._metric.update(outputs, batch[1])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add up the counts of all processes."""
        self.matrix = self._metric.compute().cpu().numpy() if self._metric is not None else None

    on_test_start, on_test_batch_end, on_test_end = on_validation_start, on_validation_batch_end, on_validation_end


def class_rows(matrix: np.ndarray, names: Sequence[str]) -> list[ClassRow]:
    """Sum up a matrix of true and predicted classes, one row for each class.

    Args:
        matrix: int64 [C, C], images by true and predicted class.
        names: Names of the C classes.
    """
    rows = []
    for index, counts in enumerate(matrix):
        wrong = counts.copy()
        wrong[index] = 0
        other = int(wrong.argmax())
        taken_for = names[other] if wrong[other] else None
        rows.append(ClassRow(names[index], int(counts.sum()), int(counts[index]), taken_for, int(wrong[other])))
    return rows


def format_rows(rows: Sequence[ClassRow]) -> str:
    """Format the classes as a table: all of a few, the least accurate of many."""
    seen = [row for row in rows if row.images]
    shown = seen if len(seen) <= _PRINTED else sorted(seen, key=lambda row: row.accuracy)[:_PRINTED]
    cells = [("class", "images", "top-1", "most often taken for")]
    for row in shown:
        other = "" if row.taken_for is None else f"{row.taken_for} ({row.taken})"
        cells.append((row.name, f"{row.images}", f"{100 * row.accuracy:.2f} %", other))
    name, *numbers = (max(len(line[i]) for line in cells) for i in range(3))
    lines = [f"{a:{name}}  {b:>{numbers[0]}}  {c:>{numbers[1]}}  {d}".rstrip() for a, b, c, d in cells]
    if len(shown) < len(seen):
        lines.append(f"(the {len(shown)} least accurate of {len(seen)} classes)")
    return "\n".join(lines)


def write_report(run_dir: Path, split: str, matrix: np.ndarray, names: Sequence[str]) -> list[Path]:
    """Write `classes_SPLIT.csv`, `confusion_SPLIT.csv` and `confusion_SPLIT.png`.

    Args:
        run_dir: Folder of the files.
        split: `val` or `test`.
        matrix: int64 [C, C], images by true and predicted class.
        names: Names of the C classes.

    Returns:
        The paths of the files.
    """
    classes, confusion, picture = (
        run_dir / f"{stem}_{split}.{ending}"
        for stem, ending in (("classes", "csv"), ("confusion", "csv"), ("confusion", "png"))
    )
    with atomic_path(classes) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["class", "images", "correct", "accuracy", "most_taken_for", "taken"])
        for row in class_rows(matrix, names):
            accuracy = f"{row.accuracy:.6f}" if row.images else ""
            writer.writerow([row.name, row.images, row.correct, accuracy, row.taken_for or "", row.taken])
    with atomic_path(confusion) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["true \\ predicted", *names])
        writer.writerows([name, *counts.tolist()] for name, counts in zip(names, matrix, strict=True))
    _draw(picture, matrix, names)
    return [classes, confusion, picture]


def _draw(path: Path, matrix: np.ndarray, names: Sequence[str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues", interpolation="nearest" if len(names) < 200 else "auto")
    figure.colorbar(image, label="share of the true class")
    axes.set(title="confusion matrix", xlabel="predicted class", ylabel="true class")
    if len(names) <= _NAMED:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


class PredictionsCSV(BasePredictionWriter):
    """Write `file,label,probability,label2,probability2,...`, one row per image, in the order of file names.

    Args:
        path: The CSV file.
        top_k: Number of labels per image, best first; all of them if there are fewer classes.
    """

    def __init__(self, path: Path, top_k: int = 5) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self.top_k = top_k
        self._rows: list[Row] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keep the best labels of a batch.

        Raises:
            NonFiniteError: If a probability is not finite; it names the file.
        """
        paths, probabilities = prediction
        names = cast("list[str] | None", pl_module.class_names)
        if not (finite := probabilities.isfinite().all(-1)).all():
            raise NonFiniteError(f"the prediction of {paths[finite.tolist().index(False)]} is not finite")
        best = probabilities.topk(min(self.top_k, probabilities.shape[-1]))
        for path, values, classes in zip(paths, best.values.tolist(), best.indices.tolist(), strict=True):
            self._rows.append((path, [names[i] if names else str(i) for i in classes], values))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the rows of all processes, write the file, and print the best labels of the first images."""
        parts: list[list[Row]] = [self._rows]
        if trainer.world_size > 1:
            parts = [[] for _ in range(trainer.world_size)]
            dist.all_gather_object(parts, self._rows)
        if trainer.is_global_zero:
            rows = sorted(row for part in parts for row in part)
            write_predictions(self.path, rows)
            for path, labels, probabilities in rows[:_SHOWN]:
                print(f"{path}: {labels[0]} ({100 * probabilities[0]:.1f} %)")
            print(f"wrote {len(rows)} prediction{'s' * (len(rows) != 1)} to {self.path}")


def write_predictions(path: Path, rows: list[Row]) -> None:
    """Write rows of file name, labels and probabilities, the best label first."""
    count = len(rows[0][1]) if rows else 1
    columns = [f"{name}{k if k > 1 else ''}" for k in range(1, count + 1) for name in ("label", "probability")]
    with atomic_path(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", *columns])
        for name, labels, values in rows:
            cells = [cell for pair in zip(labels, (f"{v:.6f}" for v in values), strict=True) for cell in pair]
            writer.writerow([name, *cells])
