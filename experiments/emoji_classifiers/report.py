"""Tables and figures of classifiers of emoji, from the CSV files that `headmix analyze sweep` has written."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headmix_lab.model_families import read_spelling
from headmix_lab.sweeps.figure import draw
from headmix_lab.sweeps.recorded import SCORES, cells, compared, network_table
from headmix_lab.sweeps.runs import read_test
from headmix_lab.sweeps.table import LABELS, values
from headmix_lab.tables import Row, markdown_table, read_csv
from headmix_vision.analysis.line_charts import OKABE_ITO, label_ends, line_figure, save_svg

FOLDER = Path(__file__).parent
CLAIMS = {
    "groups": "attention in classifiers of emoji, 9 groups",
    "subgroups": "the same, 37 subgroups",
    "groups_lite0": "a pretrained network on the 9 groups",
    "subgroups_lite0": "a pretrained network on the 37 subgroups",
    "rank": "rank of attention matrices in the course of training",
    "rank_curves": "the same ranks by epoch",
    "modules": "modules of MHLA in classifiers of emoji",
    "block_count": "token blocks of MHLA in classifiers of emoji",
    "block_count_curves": "rank and validation by epoch and token blocks",
    "length": "256 and 1,024 tokens in classifiers of emoji",
    "speeds": "images per second of these classifiers",
}


TITLE = "ViT of 128 dims without CPE, 37 subgroups of emoji"


def sweep(name: str, *columns: str) -> str:
    """Networks with their learning rates and these columns, mean ± standard deviation over seeds."""
    return network_table(FOLDER / f"{name}.csv", *columns)


def figure(kind: str, path: Path, name: str = "", curves: str = "") -> None:
    """Write the figure of a sweep whose networks were chosen by balanced accuracy."""
    rows, title = compared(_read(name or kind)), TITLE + (", 256 tokens" if kind != "length" else "")
    drawn = draw(kind, rows, SCORES[-1], _read(curves) if curves else (), title)
    assert drawn is not None
    save_svg(path, drawn)


def training(path: Path) -> None:
    """Draw validation against rank in the course of the training, a line for each network: means over seeds."""
    curves = _read("block_count_curves")
    drawn, panels = line_figure()
    axes = panels[0, 0]
    for name, colour in zip(dict.fromkeys(row["variant"] for row in curves), OKABE_ITO, strict=False):
        epochs: dict[int, list[Row]] = {}
        for row in curves:
            if row["variant"] == name:
                epochs.setdefault(int(row["epoch"]), []).append(row)
        means = [[statistics.mean(values(rows, x)) for rows in epochs.values()] for x in ("rank", "val_percent")]
        axes.plot(*means, "o-", color=colour, markersize=4, label=name)
    axes.set(xlabel=LABELS["rank"], ylabel=LABELS["val_percent"], xlim=(0, None), ylim=(0, 48))
    axes.set_title("MHLA, 37 subgroups of emoji, 256 tokens: from epoch to epoch")
    label_ends(axes)
    save_svg(path, drawn)


def classifiers() -> str:
    """Rates and accuracies of networks on both tasks, of a pretrained network, and of naming the commonest class."""
    titles = {"groups": "9 groups", "subgroups": "37 subgroups"}
    tasks = {task: _read(task) for task in titles}
    ceilings = {task: read_test(FOLDER / f"{task}_lite0.csv") for task in titles}
    of_task = {task: compared(rows) for task, rows in tasks.items()}
    lines = []
    for name in of_task["groups"]:
        of_tasks = [cells(rows, of_task[task][name], SCORES) for task, rows in tasks.items()]
        lines.append([name, *(cell for of_it in of_tasks for cell in of_it)])
    known = {"EfficientNet-Lite0 of ImageNet": SCORES[1:], "always the commonest class": ("floor_percent",)}
    for name, columns in known.items():
        scores = [[f"{ceilings[task][column]:.2f}" for column in columns] for task in tasks]
        lines.append([name, *(cell for of_it in scores for cell in ("–", "–", *of_it, "–")[:4])])
    header = [f"{title}: {x}" for title in titles.values() for x in ("rate", *(LABELS[column] for column in SCORES))]
    return markdown_table(["network", *header], lines)


def speeds() -> str:
    """Images per second of the classifiers in training, by the size of the pictures."""
    rows, sizes = _read("speeds"), {"64": "256 tokens", "128": "1,024 tokens"}
    lines = []
    for spelling in dict.fromkeys(row["model"] for row in rows):
        name, options = read_spelling(spelling)
        core, side = name.split("_")[1], options.get("block_grid")
        network = core + (f", M = {side**2}" if side else "") + ("+CPE" if options.get("cpe") else "")
        found = [next(row for row in rows if (row["model"], row["size"]) == (spelling, size)) for size in sizes]
        numbers = [(float(row["imgs_per_s"]), float(row["ratio_to_baseline"])) for row in found]
        lines.append([network, *(f"{speed:,.0f} ({ratio:.2f})" for speed, ratio in numbers)])
    return markdown_table(["images/s", *sizes.values()], lines)


def _read(name: str) -> list[Row]:
    return read_csv(FOLDER / f"{name}.csv")


RANKS = ("rank", "stable_rank", "entropy")
TABLES: dict[str, Callable[[], str]] = {
    "emoji_classifiers": classifiers,
    "emoji_rank": partial(sweep, "rank", "val_percent", "test_balanced_percent", *RANKS),
    "emoji_modules": partial(sweep, "modules", *SCORES),
    "emoji_block_count": partial(sweep, "block_count", *SCORES, "rank"),
    "emoji_length": partial(sweep, "length", *SCORES, "rank"),
    "emoji_speeds": speeds,
}
PLOTS: dict[str, Callable[[Path], None]] = {
    "rank.svg": lambda path: figure("rank_over_training", path, "rank", "rank_curves"),
    "block_count.svg": partial(figure, "block_count"),
    "length.svg": partial(figure, "length"),
    "block_count_curves.svg": training,
}
