"""Table and plot of what the rank of Head-in-Head's transition is good for."""

import statistics
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.measuring import numbers, read_csv
from headmix_vision.analysis.lines import OKABE_ITO, label_ends, line_figure, save_svg
from headmix_vision.console.tables import markdown_table, mean_and_deviation

FOLDER = Path(__file__).parent
CLAIMS = {"results": "rank of Head-in-Head's transition"}
Row = dict[str, str]


def table(path: Path = FOLDER / "results.csv") -> str:
    """Glyphs and dots recalled after the last step, by places per write and rank of the transition."""
    rows = read_csv(path, age="all")
    last = [row for row in rows if row["step"] == max((row["step"] for row in rows), key=int)]
    lines = []
    for attributes, sub_heads in dict.fromkeys((row["attributes"], row["sub_heads"]) for row in last):
        seeds = [row for row in last if (row["attributes"], row["sub_heads"]) == (attributes, sub_heads)]
        recalled = [mean_and_deviation(numbers(seeds, f"{what}_percent")) for what in ("glyphs", "dots")]
        lines.append([attributes, sub_heads, *recalled, f"{int(seeds[0]['parameters']):,}"])
    return markdown_table(["places per write", "r", "glyphs recalled, %", "dots right, %", "parameters"], lines)


def draw(path: Path, table: Path = FOLDER / "results.csv") -> None:
    """Draw glyphs recalled in the course of training and by age; lines are means, bands extremes."""
    rows = read_csv(table)
    attributes = list(dict.fromkeys(row["attributes"] for row in rows))
    steps = max(int(row["step"]) for row in rows)
    figure, panels = line_figure(len(attributes), 2, 0.8 + 2.4 * len(attributes), sharex="col", sharey=True)
    for (training, ages), count in zip(panels, attributes, strict=True):
        some = [row for row in rows if row["attributes"] == count]
        final = [row for row in some if row["age"] != "all"]
        ranges = sorted({int(row["age"]) for row in final})
        draw_lines(training, [(int(row["step"]), row) for row in some if row["age"] == "all"])
        draw_lines(ages, [(ranges.index(int(row["age"])), row) for row in final])
        for axes in (training, ages):
            axes.set(title=f"{count} place{'s' if count != '1' else ''} per write", ylim=(0, 102))
        training.set_ylabel("glyphs recalled, %")
        ages.set_xticks(range(len(ranges)), map(str, ranges))
    panels[-1, 0].set_xlabel("training step")
    panels[-1, 1].set_xlabel(f"age in patches, at least, after {steps} steps")
    label_ends(*panels[:, 1])
    save_svg(path, figure)


def draw_lines(axes: Any, points: Sequence[tuple[int, Row]]) -> None:
    """Draw a line of means with a band of extremes for each r."""
    for sub_heads, colour in zip(dict.fromkeys(row["sub_heads"] for _, row in points), cycle(OKABE_ITO), strict=False):
        found: dict[int, list[float]] = {}
        for x, row in points:
            if row["sub_heads"] == sub_heads:
                found.setdefault(x, []).append(float(row["glyphs_percent"]))
        places, values = sorted(found), [found[x] for x in sorted(found)]
        axes.plot(places, [statistics.mean(v) for v in values], ".-", color=colour, label=f"r = {sub_heads}")
        axes.fill_between(places, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.2)


TABLES = {"recall": table}
PLOTS = {"results.svg": draw}
