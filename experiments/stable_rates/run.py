"""Claim of explicit heads (MEA): they train at three times the learning rate. Does the mix bear it, or its norm?

    python -m experiments.stable_rates.run --out experiments/stable_rates/results.csv

Softmax attention and MHLA on digits without CPE (networks of classifier_runs.py), each in four variants: the core
alone, the core with MEA's norm and no mix, MEA, and MEA without its norm, which by the paper degenerates to the core
alone. Rates rise by a factor of the square root of 3. The recipe is `digits` with its warm-up of 3 epochs and its
gradient clipping at norm 1 (--clip none trains without), but for the epochs.

A rate is stable if the mean of the test accuracies over seeds is at most 10 points below that at the variant's best
rate. A run whose numbers stop being finite counts as 0. The highest stable rate is the last before the first above the
best that is not. At one rate seeds lie up to 4 points apart even near the best, hence 10 points.

The four lowest rates of a variant are all run. A higher one follows once the rate before it is known, and as long as
fewer than two rates are unstable. Rows are written as groups of runs end. The same command again does what is missing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.harness.classifier_runs import Network, Run
from experiments.harness.run_groups import add_options, check_options, complete
from experiments.harness.run_table import RunTable, open_table
from experiments.stable_rates import report
from experiments.stable_rates.report import VARIANTS

STEP = math.sqrt(3)
LOW_RATES = 4
FALLEN_RATES = 2
CORES = ("softmax", "mhla")


class Sweep:
    """The runs of all variants at all rates.

    Args:
        arguments: The parsed command line.
        table: Results so far.
    """

    def __init__(self, arguments: argparse.Namespace, table: RunTable) -> None:
        self.arguments, self.table = arguments, table
        self.rates = [round(arguments.lowest * STEP**step, 6) for step in range(arguments.steps)]

    def runs(self, core: str, variant: str, rate: float) -> list[Run]:
        """Return the runs of a variant at a rate, one for each seed."""
        mix, options = VARIANTS[variant]
        network = Network("digits", core, mix, options=tuple(json.loads(options).items()))
        clip = ("--trainer.gradient_clip_val", "null" if self.arguments.clip is None else str(self.arguments.clip))
        further = (*clip, *self.arguments.options)
        return [Run(network, "digits", rate, seed, self.arguments.epochs, 0, further) for seed in self.arguments.seeds]

    def wanted(self, core: str, variant: str) -> list[Run]:
        """Return the runs of a variant that may start."""
        runs = {rate: self.runs(core, variant, rate) for rate in self.rates}
        scores = {rate: self.table.values(some, "top1_percent") for rate, some in runs.items()}
        known = {
            rate: [score if math.isfinite(score) else 0.0 for score in values]
            for rate, values in scores.items()
            if len(values) == len(self.arguments.seeds)
        }
        fallen = report.fallen(known)
        return [
            run
            for index, rate in enumerate(self.rates)
            if index < LOW_RATES
            or (self.rates[index - 1] in known and sum(lower < rate for lower in fallen) < FALLEN_RATES)
            for run in runs[rate]
        ]

    def first(self) -> list[Run]:
        """Return the runs of all variants that may start, the highest rates first: others wait for them."""
        runs = [run for core in self.arguments.cores for variant in VARIANTS for run in self.wanted(core, variant)]
        return sorted(runs, key=lambda run: run.rate, reverse=True)

    def follow(self, run: Run) -> Iterable[Run]:
        """Return the runs that may start now that this one has ended."""
        settings = run.network.mix, json.dumps(dict(run.network.options))
        (variant,) = (name for name, known in VARIANTS.items() if known == settings)
        return self.wanted(run.network.core, variant)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="CSV to write, or to complete")
    add("--plot", type=Path, help="SVG to write")
    add("--cores", nargs="+", choices=CORES, default=list(CORES))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    add("--lowest", type=float, default=1e-3 * STEP, help="lowest rate (%(default).3g)")
    add("--steps", type=int, default=9, help="most rates, each the square root of 3 above the last (%(default)s)")
    add("--epochs", type=int, default=40, help="epochs of a run (%(default)s)")
    add("--clip", type=lambda text: None if text == "none" else float(text), default=1.0, help="gradient norm, or none")
    add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    check_options(arguments)
    with open_table(arguments.out) as table:
        sweep = Sweep(arguments, table)
        completion = complete(table, arguments, sweep.first(), sweep.follow)
    if table:
        print(f"\n{report.table(arguments.out)}")
        if arguments.plot:
            report.draw(arguments.plot, arguments.out)
    completion.exit()


if __name__ == "__main__":
    main()
