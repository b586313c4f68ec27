"""Keeps `metrics.csv`, one row per logged step, also across resumed runs."""

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from headmix_vision.atomic import atomic_path

_FIRST_COLUMNS = ("epoch", "step")


class MetricsCSV(Logger):
    """Writes all metrics of a step into one row of a CSV file; the file on disk is always whole.

    Lightning's own CSV logger deletes the file of the run that is being resumed, writes a row per call and appends.

    Args:
        path: The CSV file.
        resume_step: Number of optimizer steps at which the run continues: earlier rows of an existing file are kept,
            later ones dropped. None starts a new file.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        super().__init__()
        self.path = path
        self._rows: dict[int, dict[str, Any]] = {}
        if resume_step is not None and path.is_file():
            with path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if int(row["step"]) < resume_step]
            self._rows = {int(row["step"]): {name: v for name, v in row.items() if v != ""} for row in kept}

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.path.parent.name

    @property
    def version(self) -> str:
        """Not used: there is one file per run directory."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run directory."""
        return str(self.path.parent)

    @property
    @rank_zero_experiment
    def experiment(self) -> "MetricsCSV":
        """The logger itself."""
        return self

    @property
    def rows(self) -> list[dict[str, float]]:
        """All rows so far, in the order of steps, without empty cells."""
        return [{name: float(value) for name, value in row.items()} for _, row in sorted(self._rows.items())]

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Logs nothing, as hyper-parameters are in `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Adds metrics to the row of a step."""
        assert step is not None
        self._rows.setdefault(step, {"step": step}).update(metrics)

    @rank_zero_only
    def save(self) -> None:
        """Writes the file."""
        if not self._rows:
            return
        rows = [row for _, row in sorted(self._rows.items())]
        others = sorted({name for row in rows for name in row} - set(_FIRST_COLUMNS))
        with atomic_path(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*_FIRST_COLUMNS, *others], restval="")
            writer.writeheader()
            writer.writerows(rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes the file."""
        self.save()
