"""The table of `compare_canvas.py`, as a CSV file and in Markdown."""

import csv
from collections.abc import Sequence
from pathlib import Path

from canvas_runs import FLOORS, MODELS, Case, Runs
from training_runs import markdown_table, mean_and_deviation

from headmix_vision.files.atomic import atomic_path

COLUMNS = (
    *("task", "model", "seed", "steps", "parameters", "last_top1_percent", "best_top1_percent"),
    *("fid", "as_labelled_percent", "features", "recipe"),
)

Row = dict[str, str]


class Table:
    """The rows of a CSV file, which is rewritten whole with every new one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[Case, Row] = {}
        if path.exists():
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            if any(set(row) != set(COLUMNS) for row in rows):
                raise ValueError(f"{path} is no table of this script; choose another --out")
            self.rows = {Case(row["task"], row["model"], int(row["seed"])): row for row in rows}

    def add(self, case: Case, **values: object) -> Row:
        """Add or replace a row."""
        given = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in values.items()}
        self.rows[case] = dict.fromkeys(COLUMNS, "") | {k: str(v) for k, v in case._asdict().items()} | given
        order = {name: place for place, name in enumerate(("classification", "generation", "floor", *MODELS, *FLOORS))}
        with atomic_path(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            for key in sorted(self.rows, key=lambda case: (order[case.task], order[case.model], case.seed)):
                writer.writerow(self.rows[key])
        return self.rows[case]

    def row(self, case: Case, recipe: str) -> Row | None:
        """The row of a case; None if there is none, or one of another recipe."""
        row = self.rows.get(case)
        return row if row and row["recipe"] == recipe else None


def report(table: Table, runs: Runs) -> str:
    """The table in Markdown, mean ± standard deviation over seeds, of rows of the recipe of these runs alone."""
    header = ["attention", "parameters, classifier", "top-1 in %, last", "best"]
    header += ["parameters, generator", "FID", "classified as their label, %"]
    used: list[Row] = []

    def values(task: str, model: str, column: str, seeds: Sequence[int]) -> list[float]:
        cases = (Case(task, model, seed) for seed in seeds)
        rows = [row for case in cases if (row := table.row(case, runs.recipe(case)))]
        used.extend(rows)
        return [float(row[column]) for row in rows if row[column]]

    def cell(task: str, model: str, column: str, digits: int = 2) -> str:
        return mean_and_deviation(values(task, model, column, runs.arguments.seeds), digits)

    def size(task: str, model: str) -> str:
        counts = values(task, model, "parameters", runs.arguments.seeds)
        return f"{counts[0] / 1e6:.2f} M" if counts else "–"

    rows = []
    for model in runs.arguments.models:
        accuracies = [cell("classification", model, f"{which}_top1_percent") for which in ("last", "best")]
        drawn = [cell("generation", model, "fid", 3), cell("generation", model, "as_labelled_percent")]
        rows.append([model, size("classification", model), *accuracies, size("generation", model), *drawn])
    for name, (_, seed) in FLOORS.items():
        cells = [
            mean_and_deviation(values("floor", name, column, [seed]), digits)
            for column, digits in (("fid", 3), ("as_labelled_percent", 2))
        ]
        rows.append([f"real canvases, {name}", *["–"] * 4, *cells])
    features = sorted({row["features"] for row in used if row["features"]})
    return f"{markdown_table(header, rows)}\n\nFeatures: {', '.join(features) or 'none'}."
