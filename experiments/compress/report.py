"""Table and plot of digits classifiers with fewer heads of keys and values."""

import statistics
from pathlib import Path

from benchmarks.measuring import numbers, read_csv
from headmix_vision.analysis.lines import BLACK, OKABE_ITO, label_ends, line_figure, save_svg
from headmix_vision.console.tables import markdown_table, mean_and_deviation

FOLDER = Path(__file__).parent
CLAIMS = {"results": "fewer heads of keys and values"}
HEADER = ["", "h'", "parameters", "missed of keys, values, %", "compressed", "trained on", "new weights, as long"]
LINES = {"base": "all heads", "compressed": "compressed", "recovered": "trained on", "scratch": "new weights, as long"}
Row = dict[str, str]


def groups(path: Path) -> dict[tuple[str, str], list[Row]]:
    """Read the rows of all seeds of each core and number of component heads."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in read_csv(path):
        found.setdefault((row["core"], row["component_heads"]), []).append(row)
    return found


def table(path: Path = FOLDER / "results.csv") -> str:
    """Losses by compressing heads, and what training on recovers, over seeds."""
    lines = []
    for (core, heads), rows in groups(path).items():
        missed = [f"{statistics.mean(numbers(rows, f'{x}_error_percent')):.1f}" for x in ("keys", "values")]
        scores = [mean_and_deviation(numbers(rows, f"{x}_top1_percent")) for x in list(LINES)[1:]]
        lines.append([core, heads, f"{int(rows[0]['parameters']):,}", ", ".join(missed), *scores])
    return markdown_table(HEADER, lines)


def draw(path: Path, table: Path = FOLDER / "results.csv") -> None:
    """Draw top-1 against component heads, a panel for each core; lines are means, bands extremes over seeds."""
    found = groups(table)
    cores = list(dict.fromkeys(core for core, _ in found))
    figure, panels = line_figure(len(cores), height_in=0.6 + 3 * len(cores), sharex=True)
    for axes, core in zip(panels[:, 0], cores, strict=True):
        points = {int(heads): rows for (name, heads), rows in found.items() if name == core}
        for (name, label), colour in zip(LINES.items(), (BLACK, *OKABE_ITO), strict=False):
            x, values = list(points), [numbers(rows, f"{name}_top1_percent") for rows in points.values()]
            style = "--" if name == "base" else ".-"
            axes.plot(x, [statistics.mean(v) for v in values], style, color=colour, label=label)
            axes.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.2)
        axes.set(title=core, xticks=x, ylabel="top-1 on held-out digits, %")
    panels[-1, 0].set_xlabel(f"component heads of keys and values, of {max(points)}")
    label_ends(*panels[:, 0])
    save_svg(path, figure)


TABLES = {"compress": table}
PLOTS = {"results.svg": draw}
