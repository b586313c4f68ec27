"""Keep `metrics.csv`, one row per logged step, also across resumed runs."""

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from headmix_vision.errors import InputError
from headmix_vision.files.writing import atomic_path
from headmix_vision.training.run_directory import RunDirectory

_FIRST_COLUMNS = ("epoch", "step")


class MetricsCSV(Logger):
    """Write all metrics of a step into one row of a CSV file.

    Rows are appended; the last one is written again when more metrics of its step come, and the whole file when there
    is a new column. Lightning's own CSV logger deletes the file of the run that is being resumed, and writes a row per
    call.

    Args:
        path: The CSV file.
        resume_step: Number of optimizer steps at which the run continues: earlier rows of an existing file are kept,
            later ones dropped. None starts a new file.
        existing: The file whose rows are kept; `path` when None.
        run: The run directory; nothing is written to one that is lost.

    Raises:
        InputError: If the file of the run that is continued is damaged.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int | None = None,
        existing: Path | None = None,
        run: RunDirectory | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.run = run
        self._rows: dict[int, dict[str, Any]] = {}
        existing = existing or path
        if resume_step is not None and existing.is_file():
            self._rows = {step: row for step, row in _read(existing).items() if step < resume_step}
        self._names = {name for row in self._rows.values() for name in row} - set(_FIRST_COLUMNS)
        self._unsaved: set[int] = set()
        # what the file holds, once it has been written: its columns, the step and the place of the last row, its size
        self._columns: list[str] = []
        self._last_step = self._last_row_bytes = self._size_bytes = 0

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
        """Log nothing, as hyper-parameters are in `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add metrics to the row of a step."""
        assert step is not None
        self._rows.setdefault(step, {"step": step}).update(metrics)
        self._names |= metrics.keys() - set(_FIRST_COLUMNS)
        self._unsaved.add(step)

    @rank_zero_only
    def save(self) -> None:
        """Write what has been logged since the last time."""
        if not self._unsaved or (self.run is not None and self.run.lost()):
            return
        try:
            self._save()
        except OSError as error:
            if self.run is None:
                raise
            self.run.note(error)

    def _save(self) -> None:
        columns = [*_FIRST_COLUMNS, *sorted(self._names)]
        whole = columns != self._columns or min(self._unsaved) < self._last_step or not self._is_untouched()
        if whole:
            steps = sorted(self._rows)
            head = _line(columns)
            with atomic_path(self.path) as temporary:
                place = self._write(temporary, 0, head, columns, steps)
        else:
            steps = sorted(self._unsaved | {self._last_step})
            place = self._write(self.path, self._last_row_bytes, b"", columns, steps)
        self._columns, self._last_step, self._last_row_bytes = columns, steps[-1], place
        self._size_bytes = self.path.stat().st_size
        self._unsaved.clear()

    def _is_untouched(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self._size_bytes

    def _write(self, path: Path, start: int, head: bytes, columns: list[str], steps: list[int]) -> int:
        """Write a head and the rows of steps from a byte on, to the end of the file; return where the last one is."""
        lines = [_line([self._rows[step].get(name, "") for name in columns]) for step in steps]
        data = head + b"".join(lines)
        try:
            with path.open("rb+" if start else "wb") as file:
                file.seek(start)
                file.write(data)
                file.truncate()
        except OSError as error:
            error.filename = error.filename or str(path)  # a full disk is said without a name
            raise
        return start + len(data) - len(lines[-1])

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        self.save()


def _line(cells: list[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue().encode()


def _read(path: Path) -> dict[int, dict[str, str]]:
    """Read the rows of a file by their steps, without empty cells; not a last one that a power cut has torn."""
    number, rows = 1, {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = file.read().splitlines(keepends=True)
        torn = bool(lines) and not lines[-1].endswith("\n")
        reader = csv.DictReader(lines[:-1] if torn else lines)
        if len({*(reader.fieldnames or ())}) < len(reader.fieldnames or ()):
            raise ValueError("a column has the name of another")
        for cells in reader:
            number += 1
            row = {name: value for name, value in cells.items() if value}
            list(map(float, row.values()))
            if "epoch" not in row and any(name.startswith(("train/", "val/")) for name in row):
                raise KeyError("epoch")
            rows[int(row["step"])] = row
    except (KeyError, TypeError, ValueError, csv.Error):
        raise InputError(f"{path} is damaged in line {number}; correct it, or remove the file") from None
    return rows
