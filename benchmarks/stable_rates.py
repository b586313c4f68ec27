"""MEA's claim of stability: how large a learning rate does it bear, and is it the mix or the norm that bears it?

    python benchmarks/stable_rates.py --out docs/stable_rates.csv --plot docs/images/stable_rates.png --cpu-jobs 44

Softmax attention and MHLA on digits without CPE (networks of head_mix_runs.py), each in four variants: the core alone;
the core with MEA's norm and no mix, which says what the norm does; MEA; MEA without its norm, which the paper says
degenerates to the core alone. Rates rise by a factor of the square root of 3, so that the claim, rates three times as
large, is two steps. The recipe is `digits` as it is shipped, with its warm-up of 3 epochs and its gradient clipping at
norm 1 (--clip none trains without), but for the epochs: a claim of stability is one about how people train.

A rate is stable if every seed ends with a finite loss and a test accuracy of at most --margin points less than the mean
over seeds at the variant's best rate. The highest stable rate is the last before the first that is not, counted from
the best rate upward. The claim holds for a core if MEA's is at least two steps above that of the core alone; it is the
mix that does it, and not the norm, if MEA's is also above that of the core with the norm.

Rows are written as runs end; the same command started again does what is missing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from head_mix_runs import Network, Run
from run_pool import RunTable, Workers, complete
from training_runs import markdown_table, mean_and_deviation

from headmix_vision.files.atomic import atomic_path

STEP = math.sqrt(3)
CLAIMED_STEPS = 2
CHANCE_PERCENT = 10
CORES = ("softmax", "mhla")
VARIANTS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "core alone": ("plain", ()),
    "core with norm": ("plain", (("output_norm", True),)),
    "MEA": ("mea", ()),
    "MEA without norm": ("mea", (("output_norm", False),)),
}


class Sweep:
    """The runs of all variants at all rates.

    Args:
        arguments: The parsed command line.
        table: Results so far.
    """

    def __init__(self, arguments: argparse.Namespace, table: RunTable) -> None:
        self.arguments, self.table = arguments, table
        self.rates = [arguments.lowest * STEP**step for step in range(arguments.steps)]

    def runs(self, core: str, variant: str, rate: float) -> list[Run]:
        """The runs of a variant at a rate, one for each seed."""
        mix, options = VARIANTS[variant]
        network, epochs = Network("digits", core, mix, options=options), self.arguments.epochs
        clip = ("--trainer.gradient_clip_val", "null" if self.arguments.clip is None else str(self.arguments.clip))
        further = (*clip, *self.arguments.options)
        return [Run(network, "digits", round(rate, 6), seed, epochs, 0, further) for seed in self.arguments.seeds]

    def all_runs(self) -> list[Run]:
        """All runs, high rates first: what is missing when the time is over is known to be stable elsewhere."""
        return [
            run
            for rate in reversed(self.rates)
            for core in self.arguments.cores
            for variant in VARIANTS
            for run in self.runs(core, variant, rate)
        ]

    def accuracies(self, core: str, variant: str, rate: float) -> list[float]:
        """Test accuracies over seeds in percent; 0 for a run whose numbers stopped being finite."""
        values = self.table.values(self.runs(core, variant, rate), "top1_percent")
        return [value if math.isfinite(value) else 0.0 for value in values]

    def best(self, core: str, variant: str) -> float:
        """The rate with the highest mean accuracy."""
        return max(self.rates, key=lambda rate: statistics.mean(self.accuracies(core, variant, rate) or [0.0]))

    def highest_stable(self, core: str, variant: str) -> int | None:
        """Index of the highest stable rate; None before all runs are there."""
        seeds = len(self.arguments.seeds)
        if any(len(self.accuracies(core, variant, rate)) < seeds for rate in self.rates):
            return None
        best = self.rates.index(self.best(core, variant))
        bar = statistics.mean(self.accuracies(core, variant, self.rates[best])) - self.arguments.margin
        stable = [min(self.accuracies(core, variant, rate)) >= bar for rate in self.rates]
        return next((index - 1 for index in range(best + 1, len(stable)) if not stable[index]), len(stable) - 1)


def report(sweep: Sweep) -> str:
    """The accuracies at all rates, and the verdict on each core."""
    header = ["core", "variant", *(f"{rate:.2g}" for rate in sweep.rates), "highest stable rate"]
    rows = []
    for core in sweep.arguments.cores:
        for variant in VARIANTS:
            cells = [mean_and_deviation(sweep.accuracies(core, variant, rate), 1) for rate in sweep.rates]
            rows.append([core, variant, *cells, stable_cell(sweep, core, variant)])
    return "\n\n".join([markdown_table(header, rows), *(verdict(sweep, core) for core in sweep.arguments.cores)])


def stable_cell(sweep: Sweep, core: str, variant: str) -> str:
    """The highest stable rate, marked where no higher one was tried."""
    index = sweep.highest_stable(core, variant)
    if index is None:
        return "–"
    return f"{'at least ' if index == len(sweep.rates) - 1 else ''}{sweep.rates[index]:.2g}"


def verdict(sweep: Sweep, core: str) -> str:
    """Whether MEA bears the claimed rates on a core, whether the norm alone does, and whether MEA needs it."""
    found = {variant: sweep.highest_stable(core, variant) for variant in VARIANTS}
    if None in found.values():
        return f"Verdict ({core}): runs are missing."
    steps = {variant: (index or 0) - (found["core alone"] or 0) for variant, index in found.items()}
    ratios = {variant: f"{STEP**count:.2g} times" for variant, count in steps.items()}
    claim = "holds" if steps["MEA"] >= CLAIMED_STEPS else "does not hold"
    more = steps["MEA"] - steps["core with norm"]
    cause = (
        "the mix adds to the norm" if more > 0 else "the norm alone does as much" if not more else "the norm does more"
    )
    top = [variant for variant, index in found.items() if index == len(sweep.rates) - 1]
    bound = f" No higher rate was tried than the highest stable one of: {', '.join(top)}." if top else ""
    return (
        f"Verdict ({core}): the claim of rates three times as large {claim}: MEA is stable up to {ratios['MEA']} the "
        f"rate of the core alone, the core with the norm up to {ratios['core with norm']} ({cause}), MEA without its "
        f"norm up to {ratios['MEA without norm']}.{bound}"
    )


def plot(sweep: Sweep, path: Path) -> None:
    """Accuracy against rate, a panel for each core: means over seeds, and bands from the worst seed to the best."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(sweep.arguments.cores), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sweep.arguments.cores), sharey=True, squeeze=False)[0]
    for axes, core in zip(panels, sweep.arguments.cores, strict=True):
        for number, variant in enumerate(VARIANTS):
            known = [(rate, scores) for rate in sweep.rates if (scores := sweep.accuracies(core, variant, rate))]
            rates, color = [rate for rate, _ in known], f"C{number}"
            style = "--" if "norm" in variant else "-"
            axes.plot(rates, [statistics.mean(scores) for _, scores in known], style, color=color, label=variant)
            bounds = [[bound(scores) for _, scores in known] for bound in (min, max)]
            axes.fill_between(rates, *bounds, color=color, alpha=0.15, linewidth=0)
            index = sweep.highest_stable(core, variant)
            if index is not None:
                mean = statistics.mean(sweep.accuracies(core, variant, sweep.rates[index]))
                axes.plot(sweep.rates[index], mean, "o", color=color)
        axes.axhline(CHANCE_PERCENT, color="0.6", linewidth=1, linestyle=":")
        axes.set(xscale="log", xlabel="peak learning rate", title=core)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, % (dots: highest stable rate)")
    panels[0].legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="CSV to write, or to complete")
    add("--plot", type=Path, help="PNG to write")
    add("--cores", nargs="+", choices=CORES, default=list(CORES))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    add("--lowest", type=float, default=1e-3, help="lowest rate (%(default)s)")
    add("--steps", type=int, default=8, help="number of rates, each the square root of 3 above the last (%(default)s)")
    add("--epochs", type=int, default=40, help="epochs of a run (%(default)s)")
    add("--margin", type=float, default=2.0, help="points below the best rate at which one is stable (%(default)s)")
    add("--clip", type=lambda text: None if text == "none" else float(text), default=1.0, help="gradient norm, or none")
    add("--cpu-jobs", type=int, default=1, help="runs at a time, one thread each (%(default)s)")
    add("--minutes", type=float, default=1440.0, help="time after which the rest is left to the next call")
    add("--options", nargs=argparse.REMAINDER, default=[], help="further options of headmix-train-cls, as the last")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    deadline_s, arguments = time.monotonic(), parse_arguments(argv)
    deadline_s += 60 * arguments.minutes
    try:
        sweep = Sweep(arguments, RunTable(arguments.out))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    with Workers(arguments.cpu_jobs, 0, deadline_s) as workers:
        failures = complete(sweep.table, workers, sweep.all_runs(), on_gpu=lambda run: False)
    print(f"\n{report(sweep)}")
    if arguments.plot:
        plot(sweep, arguments.plot)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
