"""Draw learning curves into an SVG file."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

Rows = list[dict[str, float]]
Panels = dict[str, list[str]]
CLASSIFIER_PANELS: Panels = {
    "loss": ["train/loss", "val/loss"],
    "accuracy": ["val/top1", "val/top5", "val/balanced"],
    "learning rate": ["lr"],
}
GENERATOR_PANELS: Panels = {
    "loss": ["train/loss", "val/loss"],
    "loss by noise level": [f"train/loss_level_{i}" for i in range(0, 10, 3)],
    "FID": ["val/fid"],
    "learning rate": ["lr"],
}

DISTILLED_PANELS: Panels = {
    "attention error": ["val/attention_error"],
    "feature cosine": ["val/feature_cosine"],
    "accuracy": ["val/top1", "val/balanced"],
    "loss": ["train/loss_step"],
    "learning rate": ["lr"],
}


class LearningCurves(Callback):
    """Draw logged metrics over the epochs into an SVG file, after epochs and at the end.

    Args:
        path: The picture.
        rows: Returns the logged metrics, one dictionary per row.
        panels: What each panel shows, and its metrics.
        needs: The metric without which nothing is drawn.
        min_interval_s: Least time before a drawing during training, from the start or the one before, in seconds;
            drawing takes about one.
    """

    def __init__(
        self,
        path: Path,
        rows: Callable[[], Rows],
        panels: Panels = CLASSIFIER_PANELS,
        needs: str = "val/top1",
        min_interval_s: float = 60.0,
    ) -> None:
        self.path = path
        self.rows = rows
        self.panels = panels
        self.needs = needs
        self.min_interval_s = min_interval_s
        self._drawn_at_s = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the epochs before this one."""
        if time.monotonic() - self._drawn_at_s >= self.min_interval_s:
            self._draw(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the whole run."""
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and any(self.needs in row for row in self.rows()):
            draw_curves(self.path, self.rows(), self.panels)
            self._drawn_at_s = time.monotonic()


def draw_curves(path: Path, rows: Rows, panels: Panels = CLASSIFIER_PANELS) -> None:
    """Draw the learning curves of logged rows into an SVG file; a panel without any of its metrics is left out."""
    from headmix_vision.analysis.line_charts import OKABE_ITO, label_ends, line_figure, save_svg

    logged = {name for row in rows for name in row}
    panels = {label: names for label, names in panels.items() if logged.intersection(names)}
    figure, all_axes = line_figure(len(panels), height_in=2 * len(panels), sharex=True)
    figure.suptitle(f"Run {path.absolute().parent.name}")
    for axes, (label, names) in zip(all_axes[:, 0], panels.items(), strict=True):
        for name, colour in zip(names, OKABE_ITO, strict=False):
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                steps, values = zip(*points, strict=True)
                marker = "." if len(points) < 40 else None
                axes.plot(_epochs(steps, rows), values, color=colour, label=name, marker=marker)
        axes.set_ylabel(label)
    all_axes[-1, 0].set_xlabel("epoch")
    label_ends(*all_axes[:, 0])
    save_svg(path, figure)


def _epochs(steps: Sequence[float], rows: Rows) -> np.ndarray:
    """Return the epochs done after each of these steps, as fractions, from the rows that close an epoch."""
    ends = {row["step"] + 1: row["epoch"] + 1 for row in rows if "train/loss" in row}
    return np.interp(np.asarray(steps) + 1, [0, *ends], [0, *ends.values()])
