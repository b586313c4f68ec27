"""Tables and pictures of attention in models of clips."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from experiments.moving_digits.runs import (
    BASE,
    EXTENDS,
    FORWARD,
    LEARNED_PERCENT,
    MODELS,
    REAL,
    STEP,
    WHOLE,
    WINDOWS,
    Case,
    Runs,
    parse_arguments,
)
from headmix_lab.photographs import save_png
from headmix_lab.script_runs import mark
from headmix_lab.tables import ResultTable, Row, column_cell, markdown_table
from headmix_vision.analysis import line_charts as charts
from headmix_vision.data.datasets.moving_digits import FRAME_RATE, MovingDigits
from headmix_vision.runs.directory import read_curve
from headmix_vision.sampling.folder import draw_strips

FOLDER = Path(__file__).parent
CLAIMS = {"results": "attention in models of clips", "distilled": "clip models distilled from softmax"}
COLUMNS = (
    *("row", "seed", "frames", "way", "steps", "flat", "parameters"),
    *("fvd", "fvd_halves", "fvd_frozen", "fvd_shuffled", "digit_percent", "motion_percent", "direction_percent"),
    *("course_percent", "digit_ceiling_percent", "motion_ceiling_percent", "learned", "ms", "recipe"),
)
KINDS = {
    "Attention": BASE,
    "Distilled": ("softmax", *(f"{core}{way}" for core in ("mhla", "hybrid") for way in ("-distilled", "-short", ""))),
    "Positions": ("mhla", "mhla-cpe", "mhla-cpe-factorised", "mhla-rope"),
}
QUALITY = ("digit_percent", "motion_percent")
CEILINGS = ("digit_ceiling_percent", "motion_ceiling_percent")
CONTROLS = {  # of half of the real clips from the other half
    "half of the real clips": "fvd_halves",
    "the same, frozen": "fvd_frozen",
    "the same, frames shuffled": "fvd_shuffled",
}
SHOWN = 13  # the first sample of "3 left", as classes take turns


def open_table(path: Path) -> ResultTable:
    """The table of a CSV file.

    Raises:
        ValueError: The file is of another kind.
    """
    places = {name: place for place, name in enumerate((*MODELS, REAL, WHOLE, WINDOWS, STEP, FORWARD))}
    return ResultTable(path, COLUMNS, 4, lambda key: (places[key[0]], int(key[1]), places[key[3]], int(key[2])))


class Report:
    """Tables and pictures of the rows of these runs.

    Args:
        table: All rows.
        runs: The runs.
    """

    def __init__(self, table: ResultTable, runs: Runs) -> None:
        self.table, self.runs, self.given = table, runs, runs.arguments

    def text(self) -> str:
        """All tables for which there are rows, in Markdown, mean ± standard deviation over seeds."""
        parts = []
        for title, rows in KINDS.items():
            there = {row for row in rows if self._found(row)}
            if there and (title == "Attention" or there - set(BASE)):
                parts.append(f"{title}:\n\n{self.quality(title)}")
        if self.given.long or self.given.times:
            parts.append(f"Length:\n\n{self.lengths()}")
        if self.given.long:
            parts.append(f"Windows:\n\n{self.windows()}")
        return "\n\n".join(parts)

    def _found(self, row: str, frames: int | None = None, way: str = WHOLE) -> list[Row]:
        cases = (Case(row, seed, frames or self.given.frames, way) for seed in self.given.seeds)
        return [found for case in cases if (found := self.table.row(case, self.runs.recipe(case)))]

    def _ms(self, row: str, frames: int, way: str) -> str:
        case = Case(row, 0, frames, way)
        found = self.table.row(case, self.runs.recipe(case)) if MODELS[row].budget == "full" else None
        return found["ms"] if found else "–"

    def quality(self, title: str) -> str:
        """One of `KINDS`: the rows that are there, then real clips, and between which of them the FVD is taken."""
        rows = [row for row in KINDS[title] if self._found(row)]
        header = ["attention", "parameters", "steps", "step, ms", "FVD", "digit, %", "motion, %"]
        lines = []
        for row in rows:
            name, steps, *scores = self._whole(row)
            size = f"{float(self._found(row)[0]['parameters']) / 1e6:.2f} M"
            lines.append([name, size, steps, self._ms(row, self.given.frames, STEP), *scores])
        ceilings = self._ceilings(rows, self.given.frames, WHOLE)
        case = Case(REAL, 0, self.given.frames, WHOLE)
        real = self.table.row(case, self.runs.recipe(case))
        none = "–"
        lines.append(["real clips", none, none, none, column_cell([real] if real else [], "fvd"), *ceilings])
        for name, control in CONTROLS.items() if real and title == "Attention" else ():
            lines.append([name, none, none, none, column_cell([real], control), none, none])
        return markdown_table(header, lines)

    def lengths(self) -> str:
        """Clips longer than in training, drawn at once, and the times of forward passes."""
        short, long, times = self.given.frames, self.given.long, self.given.times
        header = ["attention", f"digit, % of {short} frames", "motion, %"]
        header += [f"{name}, {long} frames" for name in ("digit", "motion") if long]
        header += [f"{frames} frames, us a frame" for frames in times]
        lines = []
        for row in BASE:
            cells = [column_cell(self._found(row), column) for column in QUALITY]
            cells += [self._lost(row, column, WHOLE) for column in QUALITY if long]
            cells += [_us(self._ms(row, frames, FORWARD)) for frames in times]
            if set(cells) != {"–"}:
                lines.append([row, *cells])
        ceilings = [cell for frames in (short, long) if frames for cell in self._ceilings(BASE, frames, WHOLE)]
        return markdown_table(header, [*lines, ["real clips", *ceilings, *("–" for _ in times)]])

    def windows(self) -> str:
        """Longer clips drawn window by window, of models trained as all are and of those trained for it."""
        short, long = self.given.frames, self.given.long
        header = ["attention", "steps", "FVD", f"digit, % of {short} frames", "motion, %"]
        header += [f"{name}, {long} frames" for name in ("digit", "motion")]
        rows = [row for pair in EXTENDS.items() for row in pair if self._found(row)]
        lines = [[*self._whole(row), *(self._lost(row, column, WINDOWS) for column in QUALITY)] for row in rows]
        ceilings = [*self._ceilings(rows, short, WHOLE), *self._ceilings(rows, long, WINDOWS)]
        return markdown_table(header, [*lines, ["real clips", "–", "–", *ceilings]])

    def _whole(self, row: str) -> list[str]:
        """A row's name, its steps, and the scores of clips of training's length."""
        found = self._found(row)
        steps = " to ".join(sorted({each["steps"] for each in found}, key=int))
        motion = statistics.mean(float(each["motion_percent"]) for each in found)
        learned = "" if motion >= LEARNED_PERCENT else " (has not learned)"
        return [row + learned, steps + mark(found), *(column_cell(found, column) for column in ("fvd", *QUALITY))]

    def _ceilings(self, rows: Sequence[str], frames: int, way: str) -> list[str]:
        """The judge's scores of real clips, which are the same beside all rows."""
        found = [each for row in rows for each in self._found(row, frames, way)][:1]
        return [column_cell(found, column) for column in CEILINGS]

    def _lost(self, row: str, column: str, way: str) -> str:
        """A share of longer clips, and its lead over clips of training's length, seed by seed."""
        short = {each["seed"]: float(each[column]) for each in self._found(row)}
        found = [each for each in self._found(row, self.given.long, way) if each["seed"] in short]
        gains = [float(each[column]) - short[each["seed"]] for each in found]
        return f"{column_cell(found, column)} ({statistics.mean(gains):+.2f})" if found else "–"

    def draw(self, folder: Path) -> None:
        """Draw samples of the first seed, one for each attention, and the plot, as `moving_digits*`."""
        self._draw_samples(folder / "moving_digits.png")
        self._plot(folder / "moving_digits_curves.svg")

    def _draw_samples(self, path: Path) -> None:
        given, clips = self.given, {}
        for row in BASE:
            file = self.runs.samples(Case(row, given.seeds[0], given.frames, WHOLE)) / "samples.npz"
            if file.is_file() and given.samples > SHOWN:
                with np.load(file) as arrays:
                    clips[row] = arrays["arr_0"][SHOWN]
        if not clips:
            return
        real = MovingDigits("validation", (given.frames, given.size, given.size))
        like = int(np.flatnonzero(real.labels == SHOWN)[0])
        clips[REAL] = np.rint(real[like][0].movedim(0, -1).numpy() * 255).astype(np.uint8)
        title = f"{real.class_names[SHOWN]}, {given.frames} frames of {given.size} pixels, seed {given.seeds[0]}"
        picture = draw_strips(np.stack(list(clips.values())), list(clips), title, FRAME_RATE)
        save_png(path, picture)

    def _plot(self, path: Path) -> None:
        """Validation losses of the runs that are there, a line for each seed."""
        figure, ((axes,),) = charts.line_figure()
        colours = (charts.SOFTMAX, charts.LINEAR, charts.MHLA, charts.OTHERS[0], charts.HEAD_IN_HEAD)
        for row, colour in zip(BASE, colours, strict=True):
            for seed in self.given.seeds:
                run = self.runs.directory(row, seed)
                if (run / "metrics.csv").is_file():
                    curve = read_curve(run, "val/loss")
                    label = row if seed == self.given.seeds[0] else None
                    axes.plot(list(curve), list(curve.values()), color=colour, linewidth=1, label=label)
        if axes.lines:
            axes.set(xlabel="step", ylabel="validation loss (log)", yscale="log", xlim=(0, None))
            axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
            axes.set_title(f"Moving digits, {self.given.frames} frames of {self.given.size} px: three seeds")
            charts.label_ends(axes)
            charts.save_svg(path, figure)


def _us(ms: str) -> str:
    return ms if ms == "–" else f"{1000 * float(ms):.2f}"


def table(part: Callable[[Report], str], name: str = "results", seeds: str = "0123") -> str:
    """A table of these seeds: not every row has each of them."""
    arguments = parse_arguments(["--out", str(FOLDER / f"{name}.csv"), "--seeds", *seeds])
    return part(Report(open_table(arguments.out), Runs(arguments, math.inf)))


TABLES: dict[str, Callable[[], str]] = {
    "moving_digits": partial(table, lambda report: report.quality("Attention")),
    # seeds with teachers
    "moving_digits_distilled": partial(table, lambda report: report.quality("Distilled"), "distilled", "01"),
    "moving_digits_lengths": partial(table, Report.lengths),
    "moving_digits_windows": partial(table, Report.windows),
}
