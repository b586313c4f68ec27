"""Table and plot of the learning rates that explicit heads bear."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import read_csv
from headmix_vision.analysis.lines import BLACK, OKABE_ITO, label_ends, line_figure, save_svg
from headmix_vision.console.tables import markdown_table, mean_and_deviation

FOLDER = Path(__file__).parent
CLAIMS = {"results": "learning rates of explicit heads"}
MARGIN = 10.0  # points below the mean at the best rate
CHANCE_PERCENT = 10
VARIANTS = {
    "core alone": ("plain", "{}"),
    "core with norm": ("plain", '{"output_norm": true}'),
    "MEA": ("mea", "{}"),
    "MEA without norm": ("mea", '{"output_norm": false}'),
}
Scores = dict[float, list[float]]  # test accuracies over seeds by learning rate


def scores_of(path: Path) -> dict[tuple[str, str], Scores]:
    """Read the accuracies of each core and variant; a run that stopped being finite counts as 0."""
    names = {settings: name for name, settings in VARIANTS.items()}
    found: dict[tuple[str, str], Scores] = {(core, name): {} for core in ("softmax", "mhla") for name in VARIANTS}
    for row in read_csv(path):
        score, name = float(row["test_top1_percent"]), names[row["mix"], row["options"]]
        seeds = found[row["core"], name].setdefault(float(row["rate"]), [])
        seeds.append(score if math.isfinite(score) else 0.0)
    return {key: dict(sorted(scores.items())) for key, scores in found.items() if scores}


def fallen(scores: Scores) -> list[float]:
    """Return the rates above the best at which the mean is more than 10 points below."""
    means = {rate: statistics.mean(values) for rate, values in scores.items()}
    best = max(means, key=lambda rate: means[rate], default=0.0)
    return [rate for rate, mean in means.items() if rate > best and mean < means[best] - MARGIN]


def highest_stable(scores: Scores) -> float:
    """Return the last rate before the first above the best that is not stable."""
    unstable = fallen(scores)
    return max(rate for rate in scores if not unstable or rate < unstable[0])


def table(path: Path = FOLDER / "results.csv") -> str:
    """Accuracies against the learning rate, the highest stable one in bold."""
    found = scores_of(path)
    rates = sorted({rate for scores in found.values() for rate in scores})
    lines = []
    for (core, name), scores in found.items():
        bold = {highest_stable(scores): "**"}
        cells = [mean_and_deviation(scores[rate], 1) if rate in scores else "" for rate in rates]
        lines.append(
            [core, name, *(f"{bold.get(r, '')}{cell}{bold.get(r, '')}" for r, cell in zip(rates, cells, strict=True))]
        )
    return markdown_table(["core", "variant", *(f"{rate:.2g}" for rate in rates)], lines)


def draw(path: Path, table: Path = FOLDER / "results.csv") -> None:
    """Draw accuracy against rate, a panel for each core: means over seeds, and bands from the worst to the best."""
    found = scores_of(table)
    cores: Sequence[str] = list(dict.fromkeys(core for core, _ in found))
    rates = sorted({rate for scores in found.values() for rate in scores})
    figure, panels = line_figure(len(cores), height_in=0.6 + 3 * len(cores), sharex=True)
    for axes, core in zip(panels[:, 0], cores, strict=True):
        for name, colour in zip(VARIANTS, OKABE_ITO, strict=False):
            scores = found.get((core, name), {})
            if not scores:
                continue
            means = {rate: statistics.mean(values) for rate, values in scores.items()}
            axes.plot(list(means), list(means.values()), "--" if "norm" in name else "-", color=colour, label=name)
            bounds = [[bound(values) for values in scores.values()] for bound in (min, max)]
            axes.fill_between(list(means), *bounds, color=colour, alpha=0.15, linewidth=0)
            axes.plot(highest_stable(scores), means[highest_stable(scores)], "o", color=colour)
        axes.axhline(CHANCE_PERCENT, color=BLACK, linewidth=1, linestyle=":")
        axes.set(xscale="log", title=core, ylabel="test accuracy, %")
        axes.set_xticks(rates[::2], [f"{rate:.2g}" for rate in rates[::2]])
        axes.minorticks_off()
    panels[-1, 0].set_xlabel("peak learning rate; dots: highest stable one")
    label_ends(*panels[:, 0])
    save_svg(path, figure)


TABLES = {"stable_rates": table}
PLOTS = {"results.svg": draw}
