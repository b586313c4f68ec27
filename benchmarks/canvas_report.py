"""The table of `compare_canvas.py`, as a CSV file and in Markdown."""

from collections.abc import Sequence
from pathlib import Path

from canvas_runs import FLOORS, MODELS, Case, Runs

from headmix_vision.console.tables import markdown_table, mean_and_deviation
from headmix_vision.files.result_table import ResultTable, Row

COLUMNS = (
    *("task", "model", "seed", "steps", "parameters", "last_top1_percent", "best_top1_percent"),
    *("fid", "as_labelled_percent", "features", "recipe"),
)


def open_table(path: Path) -> ResultTable:
    """The table of a CSV file.

    Raises:
        ValueError: The file is of another kind.
    """
    places = {name: place for place, name in enumerate(("classification", "generation", "floor", *MODELS, *FLOORS))}
    return ResultTable(path, COLUMNS, 3, lambda key: (places[key[0]], places[key[1]], int(key[2])))


def report(table: ResultTable, runs: Runs) -> str:
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
