"""Plots of the finished questions of `experiments/`, drawn from their CSV files by `python -m experiments.tables`.

Lines are means of three seeds, bands and bars their extremes. The code that trained is in the history.
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from headmix_lab.tables import Row, read_csv
from headmix_vision.analysis.line_charts import BLACK, OKABE_ITO, label_ends, line_figure, save_svg

Line = dict[float, list[float]]  # values of all seeds by place

_SEEDS = "means of three seeds, extremes as bands"
_MARGIN = 10.0  # a stable learning rate is so many points below the best, at most


def _lines(
    rows: Sequence[Row], label: Callable[[Row], str], place: Callable[[Row], float], column: str
) -> dict[str, Line]:
    """Collect a column by label and place; a value that is not a number counts as 0."""
    lines: dict[str, Line] = {}
    for row in rows:
        line = lines.setdefault(label(row), {})
        line.setdefault(place(row), []).append(float(np.nan_to_num(float(row[column]))))
    return {name: dict(sorted(line.items())) for name, line in lines.items()}


def _draw(axes: Any, name: str, line: Line, colour: str, style: str = ".-") -> None:
    """Draw means as a line with a band, or as points with bars where the style has no line."""
    places, means = list(line), [statistics.mean(seeds) for seeds in line.values()]
    low, high = ([end(seeds) for seeds in line.values()] for end in (min, max))
    axes.plot(places, means, style, color=colour, label=name, markerfacecolor="white" if style == "o" else colour)
    if style[-1] == "-":
        axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    else:
        axes.vlines(places, low, high, color=colour, linewidth=1)


def _save(path: Path, figure: Any, panels: np.ndarray, title: str, y: str, x: str) -> None:
    figure.suptitle(f"{title}\n{_SEEDS}")
    for axes in panels:
        axes.set(ylabel=y, ylim=(0, 104))
    panels[-1].set_xlabel(x)
    label_ends(*(axes for axes in figure.axes if axes.get_subplotspec().is_last_col()))
    save_svg(path, figure)


def draw_compress(rows: Sequence[Row], path: Path) -> None:
    """Draw top-1 against component heads, a panel for each core."""
    names = {"base": "all heads", "compressed": "compressed", "recovered": "trained on", "scratch": "new weights"}
    figure, panels = line_figure(2, height_in=6.6, sharex=True)
    for axes, core in zip(panels[:, 0], ("softmax", "mhla"), strict=True):
        for (column, name), colour in zip(names.items(), (BLACK, *OKABE_ITO), strict=False):
            some = [row for row in rows if row["core"] == core]
            lines = _lines(some, lambda _: "", lambda row: float(row["component_heads"]), f"{column}_top1_percent")
            _draw(axes, name, lines[""], colour, "--" if column == "base" else ".-")
        axes.set(title=core, xticks=range(1, 9), xlim=(0, None))
    title = "Digits, 64 tokens, eight heads of eight dims, fewer of keys and values"
    _save(path, figure, panels[:, 0], title, "top-1 of 360 digits, %", "component heads of keys and values, of 8")


def draw_counting(rows: Sequence[Row], path: Path) -> None:
    """Draw counts exactly right against heads, a panel for each core and modulus."""
    last = [row for row in rows if row["lr"] == "0.003" and row["step"] == row["steps"]]
    wide, symbols = "plain, twice the width", "plain, symbols"

    def name(row: Row) -> str:
        names = {"1": "plain", "2": "P = 2"}
        control = symbols if row["encoding"] == "symbol" else wide if row["width"] != "64" else ""
        return control or names.get(row["pseudo_heads"], "P = H")

    def heads(row: Row) -> float:
        return float(row["heads"])

    settings = list(product((3, 5), ("mhla", "softmax")))
    figure, panels = line_figure(len(settings), height_in=11, sharex=True)
    for axes, (modulus, core) in zip(panels[:, 0], settings, strict=True):
        some = [row for row in last if (row["modulus"], row["core"]) == (str(modulus), core)]
        lines = _lines(some, name, heads, "exact_percent")
        equal = [row for row in some if row["pseudo_heads"] == row["heads"] and not name(row).startswith("plain,")]
        lines |= _lines(equal, lambda _: "P = H", heads, "exact_percent")
        for label, colour in zip(("plain", "P = 2", "P = H", wide, symbols), OKABE_ITO, strict=False):
            _draw(axes, label, lines[label], colour, "o" if label in (wide, symbols) else ".-")
        floor = float(some[0]["floor_percent"])
        axes.plot([1, 16], [floor, floor], ":", color=BLACK, linewidth=1, label="commonest count")
        axes.set_title(f"{core}, M = {modulus}")
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    title = "CPM-3 of 16 tokens, one block of width 64, 5,000 steps of 256 images"
    _save(path, figure, panels[:, 0], title, "exactly right, %", "heads")


def draw_recall(rows: Sequence[Row], path: Path) -> None:
    """Draw glyphs recalled in the course of training and by age, a row for each number of places."""
    ages = sorted({int(row["age"]) for row in rows if row["age"] != "all"})
    figure, panels = line_figure(3, 2, 8.4, sharex="col", sharey=True)
    for pair, places in zip(panels, ("1", "2", "4"), strict=True):
        some = [row for row in rows if row["attributes"] == places]
        training = [row for row in some if row["age"] == "all"]
        aged = [row for row in some if row["age"] != "all"]
        steps = _lines(training, lambda row: row["sub_heads"], lambda row: int(row["step"]), "glyphs_percent")
        by_age = _lines(aged, lambda row: row["sub_heads"], lambda row: ages.index(int(row["age"])), "glyphs_percent")
        for axes, lines in zip(pair, (steps, by_age), strict=True):
            for (rank, line), colour in zip(lines.items(), OKABE_ITO, strict=False):
                _draw(axes, f"r = {rank}", line, colour)
            axes.set_title(f"{places} place{'s' if places != '1' else ''} per write")
    panels[-1, 1].set_xticks(range(len(ages)), [f"{age}" for age in ages])
    panels[-1, 1].set_xlabel("age in patches, least")
    panels[-1, 0].set_xlim(0, None)
    title = "Recall over 64 tokens, one Head-in-Head head; right: after 1,000 steps"
    _save(path, figure, panels[:, 0], title, "glyphs recalled, %", "step of 64 images")


def draw_stable_rates(rows: Sequence[Row], path: Path) -> None:
    """Draw accuracy against the learning rate, a panel for each core, and the highest stable rate as a dot."""
    names = {
        ("plain", "{}"): "core alone",
        ("plain", '{"output_norm": true}'): "core with norm",
        ("mea", "{}"): "MEA",
        ("mea", '{"output_norm": false}'): "MEA without norm",
    }
    rates = sorted({float(row["rate"]) for row in rows})
    figure, panels = line_figure(2, height_in=6.6, sharex=True)
    for axes, core in zip(panels[:, 0], ("softmax", "mhla"), strict=True):
        some = [row for row in rows if row["core"] == core]
        lines = _lines(some, lambda row: names[row["mix"], row["options"]], lambda row: float(row["rate"]), _TEST)
        for name, colour in zip(names.values(), OKABE_ITO, strict=False):
            _draw(axes, name, lines[name], colour, "--" if "norm" in name else "-")
            means = {rate: statistics.mean(seeds) for rate, seeds in lines[name].items()}
            best = max(means, key=lambda rate: means[rate])
            fallen = [rate for rate in means if rate > best and means[rate] < means[best] - _MARGIN]
            stable = max(rate for rate in means if not fallen or rate < fallen[0])
            axes.plot(stable, means[stable], "o", color=colour)
        axes.axhline(10, color=BLACK, linewidth=1, linestyle=":")
        axes.set(xscale="log", title=core)
        axes.set_xticks(rates[::2], [f"{rate:.2g}" for rate in rates[::2]])
        axes.minorticks_off()
    title = "Digits without CPE, 16 tokens, 40 epochs; dots: highest stable rate"
    _save(path, figure, panels[:, 0], title, "top-1 of 360 digits, %", "peak learning rate; dotted: chance")


def draw_head_mixes(rows: Sequence[Row], path: Path) -> None:
    """Draw each seed as a dot and means as dashes, at the learning rate that has all seeds, a panel for each task."""
    cores = {"softmax": "softmax", "linear": "linear", "mhla": "MHLA", "hih": "Head-in-Head"}
    mixes = {
        "no mix": ("plain", True),
        "IHA, equal parameters": ("iha", True),
        "IHA, equal operations": ("iha", False),
        "MEA": ("mea", True),
    }
    titles = {"digits": "digits, 16 tokens", "canvas": "canvases, 36 tokens"}
    rows = [row for row in rows if row["dataset"] != "digits-tuning"]
    figure, panels = line_figure(2, height_in=6, sharex=True)
    for axes, (task, heading) in zip(panels[:, 0], titles.items(), strict=True):
        for index, ((label, (mix, full)), colour) in enumerate(zip(mixes.items(), (BLACK, *OKABE_ITO), strict=False)):
            chosen = {}
            for core in cores:
                some = [row for row in rows if (row["task"], row["core"], row["mix"]) == (task, core, mix)]
                some = [row for row in some if (row["mlp_ratio"] == "4.0") is full]
                rates = _lines(some, lambda row: row["rate"], lambda _: 0.0, _TEST)
                place = list(cores).index(core) + 0.18 * (index - 1.5)
                chosen[place] = max((line[0.0] for line in rates.values()), key=len)
                axes.plot([place] * 3, chosen[place], "o", color=colour, alpha=0.5, markersize=4)
            means = [statistics.mean(seeds) for seeds in chosen.values()]
            axes.plot(list(chosen), means, "_", color=colour, markersize=12, label=label)
        axes.set(title=heading, ylabel="top-1, %", xticks=range(len(cores)), xticklabels=cores.values())
        axes.grid(visible=False, axis="x")
    figure.suptitle("Four blocks of width 64: three seeds as dots, means as dashes")
    label_ends(*panels[:, 0])
    save_svg(path, figure)


_TEST = "test_top1_percent"
_DRAWN: dict[str, Callable[[Sequence[Row], Path], None]] = {
    "compress": draw_compress,
    "counting": draw_counting,
    "head_mixes": draw_head_mixes,
    "recall": draw_recall,
    "stable_rates": draw_stable_rates,
}


def draw(experiments: Path, question: str, path: Path) -> None:
    """Draw the plot of a finished question.

    Args:
        experiments: The folder of the questions.
        question: Name of one.
        path: SVG file to write.
    """
    _DRAWN[question](read_csv(experiments / question / "results.csv"), path)
