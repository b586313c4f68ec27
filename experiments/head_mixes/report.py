"""Tables and plot of cores with and without head mixes."""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.measuring import numbers, read_csv
from headmix_vision.analysis.lines import BLACK, OKABE_ITO, label_ends, line_figure, save_svg
from headmix_vision.console.tables import markdown_table, mean_and_deviation

FOLDER = Path(__file__).parent
CLAIMS = {"results": "cores with and without head mixes"}
CORES = {"softmax": "softmax", "linear": "linear", "mhla": "MHLA", "hih": "Head-in-Head"}
# A mix, with MLPs of full width or not. Explicit heads cost next to nothing: their one network is within both budgets.
MIXES = {
    "IHA, equal parameters": ("iha", True),
    "IHA, equal operations": ("iha", False),
    "MEA": ("mea", True),
}
SERIES = {"no mix": ("plain", True), **MIXES}
LEARNED_PERCENT = 50
Row = dict[str, str]


def accuracies(rows: Sequence[Row], task: str, core: str, mix: str, full_mlp: bool) -> list[float]:
    """Return test accuracies over seeds at the learning rate that was chosen."""
    given = {"task": task, "core": core, "mix": mix}
    rows = [row for row in rows if given.items() <= row.items() and row["dataset"] != "digits-tuning"]
    rows = [row for row in rows if (row["mlp_ratio"] == "4.0") is full_mlp]
    rates = {rate: [row for row in rows if row["rate"] == rate] for rate in {row["rate"] for row in rows}}
    return numbers(max(rates.values(), key=len, default=[]), "test_top1_percent")  # only the chosen one has all seeds


def table(task: str, path: Path = FOLDER / "results.csv") -> str:
    """Accuracies of each core alone and under each mix, with differences of means and their standard errors."""
    rows, lines = read_csv(path, task=task), []
    for core in [core for core in CORES if core in {row["core"] for row in rows}]:
        alone = accuracies(rows, task, core, "plain", True)
        cells = [core, _score(alone)]
        for mix in MIXES.values():
            mixed = accuracies(rows, task, core, *mix)
            cells.append(f"{_score(mixed)}{_gain(mixed, alone)}")
        lines.append(cells)
    return markdown_table(["core", "alone", *MIXES], lines)


def _score(values: Sequence[float]) -> str:
    learned = not values or statistics.mean(values) >= LEARNED_PERCENT
    return mean_and_deviation(values) + ("" if learned else " (has not learned)")


def _gain(mixed: Sequence[float], alone: Sequence[float]) -> str:
    if min(len(mixed), len(alone)) < 2:
        return ""
    gain = statistics.mean(mixed) - statistics.mean(alone)
    error = math.sqrt(sum(statistics.variance(sample) / len(sample) for sample in (mixed, alone)))
    return f" ({gain:+.2f} ± {error:.2f})".replace("-", "−")


def draw(path: Path, table: Path = FOLDER / "results.csv") -> None:
    """Draw a panel for each task: every seed as a dot, means as dashes."""
    rows = read_csv(table)
    tasks = [task for task in ("digits", "canvas") if task in {row["task"] for row in rows}]
    cores = [core for core in CORES if core in {row["core"] for row in rows}]
    figure, panels = line_figure(len(tasks), height_in=2.7 * len(tasks), sharex=True)
    for axes, task in zip(panels[:, 0], tasks, strict=True):
        for index, (label, colour) in enumerate(zip(SERIES, (BLACK, *OKABE_ITO), strict=False)):
            found = {core: accuracies(rows, task, core, *SERIES[label]) for core in cores}
            found = {core: seeds for core, seeds in found.items() if seeds}
            x = [cores.index(core) + 0.18 * (index - 1.5) for core in found]
            for place, seeds in zip(x, found.values(), strict=True):
                axes.plot([place] * len(seeds), seeds, "o", color=colour, alpha=0.5, markersize=4)
            means = [statistics.mean(seeds) for seeds in found.values()]
            axes.plot(x, means, "_", color=colour, markersize=12, label=label)
        axes.set(title=task, ylabel="top-1, %", xticks=range(len(cores)), xticklabels=[CORES[core] for core in cores])
        axes.grid(visible=False, axis="x")
        label_ends(axes)
    save_svg(path, figure)


TABLES = {"head_mixes_digits": partial(table, "digits"), "head_mixes_canvas": partial(table, "canvas")}
PLOTS = {"results.svg": draw}
