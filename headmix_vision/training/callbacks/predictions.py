"""Write predictions into a CSV file."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from headmix_vision.files.writing import atomic_path
from headmix_vision.training.callbacks.non_finite import NonFiniteError

Row = tuple[str, list[str], list[float]]


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
        """Collect the rows of all processes, and write the file."""
        parts: list[list[Row]] = [self._rows]
        if trainer.world_size > 1:
            parts = [[] for _ in range(trainer.world_size)]
            dist.all_gather_object(parts, self._rows)
        if trainer.is_global_zero:
            rows = sorted(row for part in parts for row in part)
            write_predictions(self.path, rows)
            print(f"wrote {len(rows)} predictions to {self.path}")


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
