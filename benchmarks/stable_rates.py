"""MEA's claim of stability: how large a learning rate does it bear, and is it the mix or the norm that bears it?

    python benchmarks/stable_rates.py --out docs/stable_rates.csv --plot docs/images/stable_rates.svg

Softmax attention and MHLA on digits without CPE (networks of head_mix_runs.py), each in four variants: the core alone;
the core with MEA's norm and no mix, which says what the norm does; MEA; MEA without its norm, which the paper says
degenerates to the core alone. Rates rise by a factor of the square root of 3, so that the claim, rates three times as
large, is two steps. The recipe is `digits` as it is shipped, with its warm-up of 3 epochs and its gradient clipping at
norm 1 (--clip none trains without), but for the epochs: a claim of stability is one about how people train.

A rate is stable if the mean of the test accuracies over seeds is at most 10 points below that at the variant's best
rate; a run whose numbers stop being finite counts as 0. The highest stable rate is the last before the first that is
not, counted from the best rate upward. At high rates accuracy falls step by step, hardly a run collapses, and at one
rate seeds lie up to 4 points apart even near the best: 10 points are more than the choice of seeds explains. A stricter
rule, which every seed has to pass with 2 points, mostly measures that spread; its verdict stands beside the other.

The claim holds for a core if MEA's highest stable rate is at least two steps above that of the core alone; it is the
mix that does it, and not the norm, if MEA's is also above that of the core with the norm.

The four lowest rates of a variant are all run. One above follows if the one before it is known and fewer than two of
the known rates below it, above the best, are unstable: two steps after a variant fell, no higher rate is tried.

Runs are trained side by side, see graphed_training.py. Rows are written as groups of them end; the same command
started again does what is missing.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from head_mix_runs import Network, Run
from run_groups import add_options, check_options, complete
from run_table import RunTable, open_table

from headmix_vision.analysis.lines import BLACK, OKABE_ITO, label_ends, line_figure, save_svg
from headmix_vision.console.tables import markdown_table, mean_and_deviation

STEP = math.sqrt(3)
CLAIMED_STEPS = 2
LOW_RATES = 4
FALLEN_RATES = 2
CHANCE_PERCENT = 10
CORES = ("softmax", "mhla")
VARIANTS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "core alone": ("plain", ()),
    "core with norm": ("plain", (("output_norm", True),)),
    "MEA": ("mea", ()),
    "MEA without norm": ("mea", (("output_norm", False),)),
}


class Rule(NamedTuple):
    """What a rate has to pass to be stable.

    Args:
        text: The rule in words.
        margin: Points below the mean at the best rate.
        score: Which number of the seeds has to be within them.
    """

    text: str
    margin: float
    score: Callable[[Sequence[float]], float]


MEAN_RULE = Rule("mean within 10 points", 10.0, statistics.mean)
STRICT_RULE = Rule("every seed within 2 points", 2.0, min)


class Sweep:
    """The runs of all variants at all rates.

    Args:
        arguments: The parsed command line.
        table: Results so far.
    """

    def __init__(self, arguments: argparse.Namespace, table: RunTable) -> None:
        self.arguments, self.table = arguments, table
        self.rates = [arguments.lowest * STEP**step for step in range(arguments.steps)]
        self.variants = [(core, variant) for core in arguments.cores for variant in VARIANTS]

    def runs(self, core: str, variant: str, rate: float) -> list[Run]:
        """The runs of a variant at a rate, one for each seed."""
        mix, options = VARIANTS[variant]
        network, epochs = Network("digits", core, mix, options=options), self.arguments.epochs
        clip = ("--trainer.gradient_clip_val", "null" if self.arguments.clip is None else str(self.arguments.clip))
        further = (*clip, *self.arguments.options)
        return [Run(network, "digits", round(rate, 6), seed, epochs, 0, further) for seed in self.arguments.seeds]

    def accuracies(self, core: str, variant: str, rate: float) -> list[float]:
        """Test accuracies over seeds in percent; 0 for a run whose numbers stopped being finite."""
        values = self.table.values(self.runs(core, variant, rate), "top1_percent")
        return [value if math.isfinite(value) else 0.0 for value in values]

    def known(self, core: str, variant: str) -> dict[int, list[float]]:
        """The accuracies at the rates that all seeds were trained at, by the index of the rate."""
        scores = {index: self.accuracies(core, variant, rate) for index, rate in enumerate(self.rates)}
        return {index: values for index, values in scores.items() if len(values) == len(self.arguments.seeds)}

    def fallen(self, core: str, variant: str, rule: Rule) -> list[int]:
        """Indices of the known rates above the best that are not stable."""
        known = self.known(core, variant)
        if not known:
            return []
        best = max(known, key=lambda index: statistics.mean(known[index]))
        bar = statistics.mean(known[best]) - rule.margin
        return [index for index, scores in known.items() if index > best and rule.score(scores) < bar]

    def wanted(self, core: str, variant: str) -> list[Run]:
        """The runs of a variant that may start."""
        known, fallen = self.known(core, variant), self.fallen(core, variant, MEAN_RULE)
        return [
            run
            for index in range(len(self.rates))
            if index < LOW_RATES or (index - 1 in known and sum(i < index for i in fallen) < FALLEN_RATES)
            for run in self.runs(core, variant, self.rates[index])
        ]

    def wanted_by_all(self) -> list[Run]:
        """The runs of all variants that may start, the highest rates first: they are what others wait for."""
        runs = [run for core, variant in self.variants for run in self.wanted(core, variant)]
        return sorted(runs, key=lambda run: run.rate, reverse=True)

    def follow(self, run: Run) -> Iterable[Run]:
        """The runs that may start now that this one has ended."""
        variant = {settings: name for name, settings in VARIANTS.items()}[run.network.mix, run.network.options]
        return self.wanted(run.network.core, variant)

    def highest_stable(self, core: str, variant: str, rule: Rule) -> int | None:
        """Index of the highest stable rate; None before all runs are there."""
        if any(run not in self.table for run in self.wanted(core, variant)):
            return None
        fallen = self.fallen(core, variant, rule)
        return fallen[0] - 1 if fallen else len(self.rates) - 1


def report(sweep: Sweep) -> str:
    """The accuracies at all rates, and the verdicts on each core."""
    rules = (MEAN_RULE, STRICT_RULE)
    header = ["core", "variant", *(f"{rate:.2g}" for rate in sweep.rates), *(f"stable: {rule.text}" for rule in rules)]
    rows = []
    for core, variant in sweep.variants:
        cells = [mean_and_deviation(sweep.accuracies(core, variant, rate), 1) for rate in sweep.rates]
        rows.append([core, variant, *cells, *(stable_cell(sweep, core, variant, rule) for rule in rules)])
    verdicts = [verdict(sweep, core, rule) for core in sweep.arguments.cores for rule in rules]
    return "\n\n".join([markdown_table(header, rows), *verdicts])


def stable_cell(sweep: Sweep, core: str, variant: str, rule: Rule) -> str:
    """The highest stable rate, marked where no higher one was tried."""
    index = sweep.highest_stable(core, variant, rule)
    if index is None:
        return "–"
    return f"{'at least ' if index == len(sweep.rates) - 1 else ''}{sweep.rates[index]:.2g}"


def verdict(sweep: Sweep, core: str, rule: Rule) -> str:
    """Whether MEA bears the claimed rates on a core, whether the norm alone does, and whether MEA needs it."""
    stable = {variant: sweep.highest_stable(core, variant, rule) for variant in VARIANTS}
    steps = {name: index - (stable["core alone"] or 0) for name, index in stable.items() if index is not None}
    if len(steps) < len(stable):
        return f"Verdict ({core}, {rule.text}): runs are missing."
    ratios = {variant: f"{STEP**count:.2g} times" for variant, count in steps.items()}
    claim = "holds" if steps["MEA"] >= CLAIMED_STEPS else "does not hold"
    more = steps["MEA"] - steps["core with norm"]
    cause = (
        "the mix adds to the norm" if more > 0 else "the norm alone does as much" if not more else "the norm does more"
    )
    top = [variant for variant, index in stable.items() if index == len(sweep.rates) - 1]
    bound = f" No higher rate was tried than the highest stable one of: {', '.join(top)}." if top else ""
    return (
        f"Verdict ({core}, {rule.text}): the claim of rates three times as large {claim}: MEA is stable up to "
        f"{ratios['MEA']} the rate of the core alone, the core with the norm up to {ratios['core with norm']} "
        f"({cause}), MEA without its norm up to {ratios['MEA without norm']}.{bound}"
    )


def plot(sweep: Sweep, path: Path) -> None:
    """Accuracy against rate, a panel for each core: means over seeds, and bands from the worst seed to the best."""
    cores = sweep.arguments.cores
    figure, panels = line_figure(len(cores), height_in=0.6 + 3 * len(cores), sharex=True)
    for axes, core in zip(panels[:, 0], cores, strict=True):
        for variant, colour in zip(VARIANTS, OKABE_ITO, strict=False):
            known = [(rate, scores) for rate in sweep.rates if (scores := sweep.accuracies(core, variant, rate))]
            rates = [rate for rate, _ in known]
            style = "--" if "norm" in variant else "-"
            axes.plot(rates, [statistics.mean(scores) for _, scores in known], style, color=colour, label=variant)
            bounds = [[bound(scores) for _, scores in known] for bound in (min, max)]
            axes.fill_between(rates, *bounds, color=colour, alpha=0.15, linewidth=0)
            index = sweep.highest_stable(core, variant, MEAN_RULE)
            if index is not None:
                mean = statistics.mean(sweep.accuracies(core, variant, sweep.rates[index]))
                axes.plot(sweep.rates[index], mean, "o", color=colour)
        axes.axhline(CHANCE_PERCENT, color=BLACK, linewidth=1, linestyle=":")
        axes.set(xscale="log", title=core, ylabel="test accuracy, %")
        axes.set_xticks(sweep.rates[::2], [f"{rate:.2g}" for rate in sweep.rates[::2]])
        axes.minorticks_off()
    panels[-1, 0].set_xlabel("peak learning rate; dots: highest stable one")
    label_ends(*panels[:, 0])
    path.parent.mkdir(parents=True, exist_ok=True)
    save_svg(path, figure)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="CSV to write, or to complete")
    add("--plot", type=Path, help="SVG to write")
    add("--cores", nargs="+", choices=CORES, default=list(CORES))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    add("--lowest", type=float, default=1e-3 * STEP, help="lowest rate (%(default).3g)")
    add(
        "--steps",
        type=int,
        default=9,
        help="number of rates at most, each the square root of 3 above the last (%(default)s)",
    )
    add("--epochs", type=int, default=40, help="epochs of a run (%(default)s)")
    add("--clip", type=lambda text: None if text == "none" else float(text), default=1.0, help="gradient norm, or none")
    add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    check_options(arguments)
    with open_table(arguments.out) as table:
        sweep = Sweep(arguments, table)
        completion = complete(table, arguments, sweep.wanted_by_all(), sweep.follow)
    print(f"\n{report(sweep)}")
    if arguments.plot:
        plot(sweep, arguments.plot)
    completion.exit()


if __name__ == "__main__":
    main()
