"""What compare_head_mixes.py draws."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from headmix_vision.analysis.lines import BLACK, OKABE_ITO, label_ends, line_figure, save_svg

# A mix at a budget. Explicit heads cost next to nothing: their one network is within both.
SERIES = {
    "no mix": ("plain", "parameters"),
    "IHA, equal parameters": ("iha", "parameters"),
    "IHA, equal FLOPs": ("iha", "flops"),
    "MEA": ("mea", "parameters"),
}
NAMES = {"softmax": "softmax", "linear": "linear", "mhla": "MHLA", "hih": "Head-in-Head"}


def draw(
    scores: Callable[[str, str, str, str], Sequence[float]], tasks: Sequence[str], cores: Sequence[str], path: Path
) -> None:
    """Draws a panel for each task: every seed a dot, their means as dashes.

    Args:
        scores: From task, core, mix and budget to the accuracies of all seeds, in percent.
        tasks: Tasks.
        cores: Cores.
        path: The SVG.
    """
    figure, panels = line_figure(len(tasks), height_in=2.7 * len(tasks), sharex=True)
    for axes, task in zip(panels[:, 0], tasks, strict=True):
        for index, (label, colour) in enumerate(zip(SERIES, (BLACK, *OKABE_ITO), strict=False)):
            of_cores = {core: seeds for core in cores if (seeds := scores(task, core, *SERIES[label]))}
            x = [cores.index(core) + 0.18 * (index - 1.5) for core in of_cores]
            for place, seeds in zip(x, of_cores.values(), strict=True):
                axes.plot([place] * len(seeds), seeds, "o", color=colour, alpha=0.5, markersize=4)
            means = [statistics.mean(seeds) for seeds in of_cores.values()]
            axes.plot(x, means, "_", color=colour, markersize=12, label=label)
        axes.set(title=task, ylabel="top-1, %", xticks=range(len(cores)), xticklabels=[NAMES[core] for core in cores])
        axes.grid(visible=False, axis="x")
        label_ends(axes)
    save_svg(path, figure)
