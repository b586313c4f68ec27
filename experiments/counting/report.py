"""Runs of the counting of pairs: their CSV, the choice among learning rates, tables and plot."""

import csv
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from headmix_vision.analysis.lines import BLACK, OKABE_ITO, label_ends, line_figure, save_svg
from headmix_vision.console.tables import markdown_table, mean_and_deviation
from headmix_vision.files.result_table import write_table

FOLDER = Path(__file__).parent
CLAIMS = {"results": "how many heads count pairs"}
RESULTS = ("step", "loss", "tuning_percent", "exact_percent", "floor_percent", "parameters", "attention_flops")
DEGENERATE = 2  # heads up to which P = H is a model that also has another name
WIDER, SYMBOLS = "plain, twice the width", "plain, symbols"  # controls, at one or two numbers of heads
FLOOR = "commonest count"
COLOURS = dict(zip(("plain", "P = 2", "P = H", WIDER, SYMBOLS), OKABE_ITO, strict=False))


class Setting(NamedTuple):
    """One run; its fields are columns of the CSV, and runs with equal ones are the same."""

    encoding: str
    modulus: int
    core: str
    pseudo_heads: int
    heads: int
    width: int
    grid: int
    steps: int
    batch_size: int
    lr: float
    seed: int


FIELDS = (*Setting._fields, *RESULTS)
Row = dict[str, str]
Runs = dict[Setting, list[Row]]
"""Rows of each run, in the order of its steps."""
Models = dict[Setting, list[list[Row]]]
"""Runs of each model, one for each seed; its setting names neither learning rate nor seed."""


def read_runs(path: Path) -> Runs:
    """The runs that a CSV holds; none if there is no such file."""
    runs: Runs = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                kinds = Setting.__annotations__
                setting = Setting(**{name: kinds[name](row[name]) for name in Setting._fields})
                runs.setdefault(setting, []).append(row)
    return runs


def write_runs(path: Path, runs: Runs) -> None:
    write_table(path, FIELDS, (row for setting in sorted(runs) for row in runs[setting]), completed=True)


def unseeded(setting: Setting) -> Setting:
    """The model of a run: its setting without learning rate and seed."""
    return setting._replace(lr=0.0, seed=0)


def tuned(runs: Runs, num_seeds: int) -> Models:
    """Models with the runs at that learning rate which is best on the images for tuning, in the mean over seeds.

    Rates without runs of all seeds do not count.
    """
    by_rate: dict[tuple[Setting, float], list[list[Row]]] = {}
    for setting, rows in runs.items():
        by_rate.setdefault((unseeded(setting), setting.lr), []).append(rows)
    models: Models = {}
    for (model, _), seeds in by_rate.items():
        if len(seeds) == num_seeds and score(seeds) > score(models.get(model, [])):
            models[model] = seeds
    return models


def score(seeds: list[list[Row]]) -> float:
    """What learning rates are compared by; -1 without runs."""
    return statistics.mean(last(seeds, "tuning_percent")) if seeds else -1.0


def last(seeds: list[list[Row]], name: str) -> list[float]:
    """A column's values after the last step, one for each seed."""
    return [float(rows[-1][name]) for rows in seeds]


def column(model: Setting, width: int) -> str:
    """Name of the column and of the line that a model belongs to."""
    if model.encoding == "symbol":
        return SYMBOLS
    if model.width != width:
        return WIDER
    return {1: "plain", 2: "P = 2"}.get(model.pseudo_heads, "P = H")


def accuracy_table(models: Models, width: int) -> str:
    """Counts exactly right by modulus, core and number of heads."""
    columns = list(dict.fromkeys(column(model, width) for model in models))
    lines: dict[tuple[int, str, int], dict[str, str]] = {}
    for model, seeds in models.items():
        line = lines.setdefault((model.modulus, model.core, model.heads), {})
        line[column(model, width)] = mean_and_deviation(last(seeds, "exact_percent"))
    rows = [[*map(str, key), *(lines[key].get(name, "") for name in columns)] for key in sorted(lines)]
    return markdown_table(["M", "core", "heads", *columns], rows)


def training_table(models: Models, width: int) -> str:
    """Learning rate, training loss in the last two tenths of the steps, and sizes of each model."""
    rows = []
    for model, seeds in sorted(
        models.items(), key=lambda item: (item[0].modulus, item[0].core, column(item[0], width))
    ):
        losses = [statistics.mean(float(rows[index]["loss"]) for rows in seeds) for index in (-2, -1)]
        final = seeds[0][-1]
        name, flops = column(model, width), int(final["attention_flops"])
        sizes = [f"{int(final['parameters']):,}", f"{flops / 1e6:.2f}"]
        rows.append([str(model.modulus), model.core, name, str(model.heads), final["lr"]])
        rows[-1] += [", ".join(f"{loss:.3f}" for loss in losses), *sizes]
    header = ["M", "core", "model", "heads", "rate", "loss, last two tenths", "parameters", "attention, MFLOP"]
    return markdown_table(header, rows)


def plot(path: Path, models: Models, width: int) -> None:
    """Write `draw` as an SVG."""
    save_svg(path, draw(models, width))


def draw(models: Models, width: int) -> Any:
    """Counts exactly right against heads, a panel for each modulus and core: means, and extremes as bands and bars."""
    panels = sorted({(model.modulus, model.core) for model in models})
    heads = sorted({model.heads for model in models})
    figure, axes_of = line_figure(len(panels), height_in=0.6 + 2.5 * len(panels), sharex=True)
    for (modulus, core), axes in zip(panels, axes_of[:, 0], strict=True):
        some = {model: runs for model, runs in models.items() if (model.modulus, model.core) == (modulus, core)}
        draw_lines(axes, some, width)
        axes.set(title=f"{core}, M = {modulus}", ylim=(0, 102), ylabel="exactly right, %")
        axes.set_xscale("log", base=2)
        axes.set_xticks(heads, map(str, heads))
    axes_of[-1, 0].set_xlabel("heads")
    label_ends(*axes_of[:, 0])
    return figure


def draw_lines(axes: Any, models: Models, width: int) -> None:
    """Lines over heads; models that are controls at one or two numbers of heads are points with bars."""
    points: dict[str, dict[int, list[float]]] = {}
    for model, seeds in models.items():
        name = column(model, width)
        names = [name] if name in (WIDER, SYMBOLS) else [name, "P = H"]
        for place in names if model.pseudo_heads == model.heads <= DEGENERATE else names[:1]:
            points.setdefault(place, {})[model.heads] = last(seeds, "exact_percent")
    for name, values in points.items():
        heads = sorted(values)
        means = [statistics.mean(values[count]) for count in heads]
        lows, highs = ([extreme(values[count]) for count in heads] for extreme in (min, max))
        if name in (WIDER, SYMBOLS):
            spans = [[abs(mean - end) for mean, end in zip(means, ends, strict=True)] for ends in (lows, highs)]
            style = {"fmt": "o", "markerfacecolor": "white", "capsize": 3, "elinewidth": 1}
            axes.errorbar(heads, means, spans, color=COLOURS[name], **style)
            axes.plot(heads, means, " ", color=COLOURS[name], label=name)
            continue
        axes.plot(heads, means, ".-", color=COLOURS[name], label=name)
        axes.fill_between(heads, lows, highs, color=COLOURS[name], alpha=0.2)
    floor = max(last(seeds, "floor_percent")[0] for seeds in models.values())
    axes.plot([1, max(model.heads for model in models)], [floor] * 2, ":", color=BLACK, linewidth=1, label=FLOOR)


def table(path: Path = FOLDER / "results.csv") -> str:
    """Counts that are exactly right, at the learning rate of 3e-3."""
    runs = read_runs(path)
    settings = sorted(runs, key=lambda setting: (setting.encoding == "symbol", setting.width, setting.pseudo_heads))
    return accuracy_table(tuned({setting: runs[setting] for setting in settings if setting.lr == 3e-3}, 3), 64)


def draw_results(path: Path) -> None:
    """Draw the runs of the table."""
    runs = {setting: rows for setting, rows in read_runs(FOLDER / "results.csv").items() if setting.lr == 3e-3}
    plot(path, tuned(runs, 3), 64)


TABLES = {"counting": table}
PLOTS = {"results.svg": draw_results}
