"""Tables and pictures of models that draw emoji."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from experiments.emoji.runs import MODELS, REAL, TEST, TRAIN, VALIDATION, Case, Runs
from headmix_lab.photographs import save_png
from headmix_lab.script_runs import mark
from headmix_lab.tables import ResultTable, Row, column_cell, markdown_table, read_csv
from headmix_vision.analysis.line_charts import OKABE_ITO, label_ends, line_figure, save_svg
from headmix_vision.evaluation.sample_sets import SampleSet
from headmix_vision.evaluation.sample_sources import TensorSamples
from headmix_vision.evaluation.scores import nearest
from headmix_vision.sampling.folder import draw_grid

SCORES = {
    "fid": "FID",
    "precision_percent": "precision, %",
    "recall_percent": "recall, %",
    "top1_percent": "as its label, %",
    "balanced_percent": "the same, balanced, %",
    "nearer_percent": "nearer to training, %",
    "copied_percent": "copied, %",
}
COLUMNS = ("row", "seed", "split", "guidance", "steps", "flat", "parameters", *SCORES, "recipe")
FOLDER = Path(__file__).parent
CLAIMS = {"results": "attention in models that draw emoji", "large": "a larger model that draws emoji"}
COPIES = 12  # samples that are shown beside their nearest training pictures, of either choice
WIDTH, SHEET_ROWS = 13, 6


def open_table(path: Path) -> ResultTable:
    """The table of a CSV file.

    Raises:
        ValueError: The file is of another kind.
    """
    places = {name: place for place, name in enumerate((*MODELS, REAL, VALIDATION, TEST))}
    order = lambda key: (places[key[2]], places[key[0]], int(key[1]), float(key[3] or 0))  # noqa: E731
    return ResultTable(path, COLUMNS, 4, order)


def quality(rows: Sequence[Row]) -> str:
    """The table in Markdown of rows of the test split, mean ± standard deviation over seeds, real pictures last."""
    lines = []
    for name in sorted({row["row"] for row in rows}, key=[*MODELS, REAL].index):
        found = [row for row in rows if row["row"] == name]
        size = f"{float(found[0]['parameters']) / 1e6:.2f} M" if found[0]["parameters"] else "–"
        about = [size, (found[0]["steps"] or "–") + mark(found), found[0]["guidance"] or "–"]
        lines.append([name, *about, *(column_cell(found, column) for column in SCORES)])
    return markdown_table(["attention", "parameters", "steps", "guidance", *SCORES.values()], lines)


class Report:
    """Tables and pictures of the rows of these runs.

    Args:
        table: All rows.
        runs: The runs.
    """

    def __init__(self, table: ResultTable, runs: Runs) -> None:
        self.table, self.runs, self.given = table, runs, runs.arguments

    def text(self) -> str:
        """The table in Markdown, mean ± standard deviation over seeds."""
        cases = self.runs.compared(self.table)
        return quality([row for case in cases if (row := self.table.row(case, self.runs.recipe(case)))])

    def draw(self, folder: Path) -> None:
        """Draw samples of the first seed, their nearest training pictures, and the sweep of guidance, as `emoji*`."""
        drawn = {}
        for case in self.runs.compared(self.table):
            file = self.runs.samples(case) / "samples.npz" if case.row != REAL else Path()
            if case.seed == self.given.seeds[0] and file.is_file():
                with np.load(file) as arrays:
                    drawn[case.row] = arrays["arr_0"]
        if drawn:
            shown = self.given.shown if self.given.shown in drawn else next(iter(drawn))
            save_png(folder / f"{self.given.task}.png", sheet(drawn[shown], self._in_turn(WIDTH * SHEET_ROWS)))
            some = self._in_turn(WIDTH)
            sheets = [sheet(pixels, some, row) for row, pixels in drawn.items()]
            save_png(folder / f"{self.given.task}_cores.png", np.concatenate(sheets))
            save_png(folder / f"{self.given.task}_neighbours.png", self._neighbours(drawn[shown]))
        self._plot(folder / f"{self.given.task}_guidance.svg")

    def _in_turn(self, count: int) -> list[int]:
        """Numbers of samples of all classes in turn, group by group: the first of each, then the second."""
        labels = self.runs.labels[TEST]
        seen = [labels[:number].count(label) for number, label in enumerate(labels)]
        names = [self.runs.class_names[label].split()[::-1] for label in labels]
        return sorted(range(len(labels)), key=lambda number: (seen[number], names[number]))[:count]

    def _neighbours(self, pixels: np.ndarray) -> np.ndarray:
        """Samples of classes in turn, then those that lie nearest to training pictures, each above its nearest one."""
        scorer = self.runs.scorer(self.given.features)
        mode = scorer.extractor.mode
        train = self.runs.pictures(self.runs.split(TRAIN), mode)
        samples = SampleSet(TensorSamples(torch.from_numpy(pixels).movedim(-1, 1)), mode)
        distances, numbers = nearest(scorer.collect(samples), scorer.collect(train))
        known = torch.cat(list(train.batches(256))).movedim(1, -1).numpy()
        closest = distances.argsort()[:COPIES].tolist()
        sheets = []
        for title, some in (("samples", self._in_turn(COPIES)), ("the samples nearest to training", closest)):
            sheets.append(sheet(pixels, some, title))
            sheets.append(sheet(known, numbers[some].tolist(), "the training pictures nearest to them"))
        return np.concatenate(sheets)

    def _plot(self, path: Path) -> None:
        """FID of validation against guidance, a line for each row."""
        figure, ((axes,),) = line_figure()
        for row, colour in zip(self.given.rows, OKABE_ITO, strict=False):
            cases = [case for case in self.runs.swept() if case.row == row]
            found = [(float(case.guidance), known) for case in cases if (known := self._swept(case))]
            if found:
                axes.plot(*zip(*found, strict=True), "o-", color=colour, label=row)
        if axes.lines:
            axes.set(xlabel="guidance", ylabel="FID, validation split")
            label_ends(axes)
            save_svg(path, figure)

    def _swept(self, case: Case) -> float | None:
        row = self.table.row(case, self.runs.recipe(case))
        return float(row["fid"]) if row else None


def sheet(pixels: np.ndarray, numbers: Sequence[int], title: str = "") -> np.ndarray:
    """Samples of these numbers side by side, at most `WIDTH` in a row."""
    return draw_grid(pixels[list(numbers)], title=title, columns=min(WIDTH, len(numbers)))


TABLES = {
    "emoji": lambda: quality(read_csv(FOLDER / "results.csv", split=TEST)),
    "emoji_large": lambda: quality(read_csv(FOLDER / "large.csv", split=TEST)),
}
