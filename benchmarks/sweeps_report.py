"""Tables and figures of `headmix-analyze sweep` in documents, from the CSV files that it has written."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from headmix_vision.analysis.lines import OKABE_ITO, label_ends, line_figure, save_svg
from headmix_vision.analysis.sweeps.drawing import draw
from headmix_vision.analysis.sweeps.report import LABELS, values
from headmix_vision.console.tables import markdown_table, mean_and_deviation
from headmix_vision.files.result_table import Row

SCORES = ("val_percent", "test_top1_percent", "test_balanced_percent")


def compared(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Of each network the runs of all seeds at its rate, which is the one with the best validation of seed 0."""
    found = {}
    for name in dict.fromkeys(row["variant"] for row in rows):
        tuning = [row for row in rows if (row["variant"], row["seed"]) == (name, "0")]
        rate = max(tuning, key=lambda row: float(row["val_percent"]))["rate"]
        found[name] = [row for row in rows if (row["variant"], row["rate"]) == (name, rate)]
    return found


def sweep(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Networks with their learning rates and these columns, mean ± standard deviation over seeds.

    A rate at an end of those that were tried has a star.
    """
    lines = [[name, *_cells(rows, of_it, columns)] for name, of_it in compared(rows).items()]
    return markdown_table(["network", "rate", *(LABELS[column] for column in columns)], lines)


def figure(kind: str, rows: Sequence[Row], path: Path, curves: Sequence[Row] = ()) -> None:
    """Write the figure of a sweep whose networks were chosen by balanced accuracy."""
    drawn = draw(kind, compared(rows), SCORES[-1], curves)
    assert drawn is not None
    save_svg(path, drawn)


def training(curves: Sequence[Row], path: Path) -> None:
    """Draw validation against rank in the course of the training, a line for each network: means over seeds."""
    drawn, panels = line_figure()
    axes = panels[0, 0]
    for name, colour in zip(dict.fromkeys(row["variant"] for row in curves), OKABE_ITO, strict=False):
        epochs: dict[int, list[Row]] = {}
        for row in curves:
            if row["variant"] == name:
                epochs.setdefault(int(row["epoch"]), []).append(row)
        means = [[statistics.mean(values(rows, x)) for rows in epochs.values()] for x in ("rank", "val_percent")]
        axes.plot(*means, "o-", color=colour, markersize=4, label=name)
    axes.set(xlabel=LABELS["rank"], ylabel=LABELS["val_percent"], xlim=(0, None))
    label_ends(axes)
    save_svg(path, drawn)


def classifiers(tasks: Mapping[str, Sequence[Row]], ceilings: Mapping[str, Mapping[str, float]]) -> str:
    """Rates and accuracies of networks on several tasks, below them a ceiling and what naming the commonest class has.

    Args:
        tasks: The rows of a sweep, by the name of its task.
        ceilings: The accuracies of a pretrained network, by the name of the task.
    """
    of_task = {task: compared(rows) for task, rows in tasks.items()}
    lines = []
    for name in next(iter(of_task.values())):
        cells = [_cells(rows, of_task[task][name], SCORES) for task, rows in tasks.items()]
        lines.append([name, *(cell for of_it in cells for cell in of_it)])
    known = {"EfficientNet-Lite0 of ImageNet": SCORES[1:], "always the commonest class": ("floor_percent",)}
    for name, columns in known.items():
        cells = [[f"{ceilings[task][column]:.2f}" for column in columns] for task in tasks]
        lines.append([name, *(cell for of_it in cells for cell in ("–", "–", *of_it, "–")[:4])])
    titles = ("rate", *(LABELS[column] for column in SCORES))
    return markdown_table(["network", *(f"{task}: {title}" for task in tasks for title in titles)], lines)


def _cells(rows: Sequence[Row], of_it: Sequence[Row], columns: Sequence[str]) -> list[str]:
    rate, tried = of_it[0]["rate"], sorted({float(row["rate"]) for row in rows})
    star = "*" if len(tried) > 1 and float(rate) in (tried[0], tried[-1]) else ""
    return [rate + star, *(mean_and_deviation(values(of_it, column)) for column in columns)]
