"""Tables and pictures of models that draw emoji."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.emoji.runs import MODELS, REAL, Runs
from headmix_lab.drawing_tasks import TASKS, TEST, TRAIN, VALIDATION, Task
from headmix_lab.photographs import save_picture
from headmix_lab.script_runs import mark
from headmix_lab.tables import ResultTable, Row, column_cell, markdown_table, read_csv
from headmix_vision.analysis.line_charts import BLACK, OKABE_ITO, label_ends, line_figure, save_svg
from headmix_vision.evaluation.scores import nearest
from headmix_vision.sampling.folder import draw_grid

FOLDER = Path(__file__).parent
CLAIMS = {"results": "attention in models that draw emoji", "large": "a larger model that draws emoji"}
COPIES = 12  # samples that are shown beside their nearest training pictures, of either choice
SHEETS = {False: (13, 6), True: (5, 3)}  # samples in a row, and rows, of pictures and of clips


def open_table(path: Path, task: Task = TASKS["emoji"]) -> ResultTable:
    """The table of a CSV file.

    Raises:
        ValueError: The file is of another kind.
    """
    places = {name: place for place, name in enumerate((*MODELS, REAL, VALIDATION, TEST))}
    order = lambda key: (places[key[2]], places[key[0]], int(key[1]), float(key[3] or 0))  # noqa: E731
    about = ("row", "seed", "split", "guidance", "steps", "flat", "parameters")
    columns = (*about, *task.scores, *task.controls, "recipe")
    return ResultTable(path, columns, 4, order)


def quality(rows: Sequence[Row], task: Task = TASKS["emoji"]) -> str:
    """The table in Markdown of rows of the test split, mean ± standard deviation over seeds, real pictures last."""
    lines = []
    for name in sorted({row["row"] for row in rows}, key=[*MODELS, REAL].index):
        found = [row for row in rows if row["row"] == name]
        size = f"{float(found[0]['parameters']) / 1e6:.2f} M" if found[0]["parameters"] else "–"
        about = [size, (found[0]["steps"] or "–") + mark(found), found[0]["guidance"] or "–"]
        lines.append([name, *about, *(column_cell(found, column) for column in task.scores)])
    return markdown_table(["attention", "parameters", "steps", "guidance", *task.scores.values()], lines)


class Report:
    """Tables and pictures of the rows of these runs.

    Args:
        table: All rows.
        runs: The runs.
    """

    def __init__(self, table: ResultTable, runs: Runs) -> None:
        self.table, self.runs, self.given = table, runs, runs.arguments
        self.distance = next(iter(runs.task.scores.items()))
        self.width, self.rows = SHEETS[runs.task.clips]

    def text(self) -> str:
        """The table in Markdown, mean ± standard deviation over seeds."""
        cases = self.runs.compared(self.table)
        return quality([row for case in cases if (row := self.table.row(case, self.runs.recipe(case)))], self.runs.task)

    def draw(self, folder: Path) -> None:
        """Draw samples of the first seed, their nearest training samples, and the sweep of guidance, as `emoji*`."""
        files = {}
        for case in self.runs.compared(self.table):
            file = self.runs.samples(case) / "samples.npz" if case.row != REAL else Path()
            if case.seed == self.given.seeds[0] and file.is_file():
                files[case.row] = file
        name = folder / self.given.task
        if files:
            shown = self.given.shown if self.given.shown in files else next(iter(files))
            first, some = self._in_turn(self.width * self.rows), self._in_turn(self.width)
            save_picture(name, self._sheet(read_pixels(files[shown]), first))
            sheets = [self._sheet(read_pixels(file), some, row) for row, file in files.items()]
            save_picture(name.with_name(f"{name.name}_cores"), np.concatenate(sheets, -3))
            save_picture(name.with_name(f"{name.name}_neighbours"), self._neighbours(files[shown]))
            self._plot_distances(name.with_name(f"{name.name}_distances.svg"), files)
        self._plot(name.with_name(f"{name.name}_guidance.svg"))

    def _in_turn(self, count: int) -> list[int]:
        """Numbers of samples of all classes in turn, group by group: the first of each, then the second."""
        labels = self.runs.labels[TEST]
        seen = [labels[:number].count(label) for number, label in enumerate(labels)]
        names = [self.runs.class_names[label].split()[::-1] for label in labels]
        return sorted(range(len(labels)), key=lambda number: (seen[number], names[number]))[:count]

    def _sheet(self, pixels: np.ndarray, numbers: Sequence[int], title: str = "") -> np.ndarray:
        """Samples of these numbers side by side, at most `width` in a row."""
        return draw_grid(pixels[list(numbers)], title=title, columns=min(self.width, len(numbers)))

    def _distances(self, source: str) -> tuple[Tensor, Tensor]:
        """Distances of samples to their nearest training samples, and the numbers of these."""
        scores = self.runs.scores
        scorer = scores.scorer(self.given.features)
        sides = (scores.samples(one, scorer.extractor.mode) for one in (source, scores.split(TRAIN)))
        return nearest(*map(scorer.collect, sides))

    def _neighbours(self, file: Path) -> np.ndarray:
        """Samples of classes in turn, then those that lie nearest to training samples, each above its nearest one."""
        scores, pixels, count = self.runs.scores, read_pixels(file), min(COPIES, self.width)
        train = scores.samples(scores.split(TRAIN), scores.scorer(self.given.features).extractor.mode)
        distances, numbers = self._distances(str(file))
        known = torch.cat(list(train.batches(256))).movedim(1, -1).numpy()
        closest = distances.argsort()[:count].tolist()
        sheets = []
        for title, some in (("samples", self._in_turn(count)), ("the samples nearest to training", closest)):
            sheets.append(self._sheet(pixels, some, title))
            sheets.append(self._sheet(known, numbers[some].tolist(), "the training samples nearest to them"))
        return np.concatenate(sheets, -3)

    def _plot_distances(self, path: Path, files: dict[str, Path]) -> None:
        """Distances to the nearest training sample, a line for each row and for the test split, which none has seen."""
        figure, ((axes,),) = line_figure()
        sources = {"test split": self.runs.scores.split(TEST), **{row: str(file) for row, file in files.items()}}
        for (row, source), colour in zip(sources.items(), (BLACK, *OKABE_ITO), strict=False):
            distances = self._distances(source)[0].sort().values
            axes.plot(100 * torch.arange(1, len(distances) + 1) / len(distances), distances, color=colour, label=row)
        axes.set(xlabel="samples, %", ylabel="distance to the nearest training sample (log)", yscale="log")
        label_ends(axes)
        save_svg(path, figure)

    def _plot(self, path: Path) -> None:
        """Validation FID or FVD against guidance, a line for each row."""
        found = [row for case in self.runs.swept() if (row := self.table.row(case, self.runs.recipe(case)))]
        if found:
            draw_guidance(path, found, self.distance[0], f"{self.given.task}, {self.given.size} px")


def draw_guidance(path: Path, rows: Sequence[Row], score: str, data: str) -> None:
    """Draw FID or FVD of the validation split against guidance, a line for each row."""
    figure, ((axes,),) = line_figure()
    for name, colour in zip(dict.fromkeys(row["row"] for row in rows), OKABE_ITO, strict=False):
        points = [(float(row["guidance"]), float(row[score])) for row in rows if row["row"] == name]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
    axes.set(xlabel="guidance", ylabel=score.upper(), xlim=(0, None), ylim=(0, None))
    axes.set_title(f"Generators of {data}, seed {rows[0]['seed']}: validation {score.upper()}")
    label_ends(axes)
    save_svg(path, figure)


def read_pixels(file: Path) -> np.ndarray:
    """Read the samples of a file."""
    with np.load(file) as arrays:
        return arrays["arr_0"]


TABLES = {
    "emoji": lambda: quality(read_csv(FOLDER / "results.csv", split=TEST)),
    "emoji_large": lambda: quality(read_csv(FOLDER / "large.csv", split=TEST)),
}
SWEPT = read_csv(FOLDER / "results.csv", split=VALIDATION)
PLOTS = {"emoji_guidance.svg": lambda path: draw_guidance(path, SWEPT, "fid", "emoji, 64 px")}
