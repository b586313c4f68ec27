"""Cores without a head mix, with IHA and with MEA: digits without CPE, and canvases until they are learned.

    python -m experiments.head_mixes.run --out experiments/head_mixes/results.csv

Each core competes with itself under a mix, at equal parameters (2 %) and at equal FLOPs (5 %), for which the MLPs of a
costlier network are narrowed. Runs are `headmix-train-cls fit -c digits` (or canvas) with the options of
classifier_runs.py, trained side by side as graphed_training.py describes.

- Learning rates: for each core and mix the one with the highest accuracy at seed 0 on a split that is not reported.
  Digits are tuned on a fifth of the training images and trained anew on all. Canvases are tuned and stopped on boards
  of training handwriting, and scored on 5,000 boards of other handwriting.
- Canvases have 1,000 training boards: with the 50,000 of the recipe every network exceeds 99 %.
- Digits train for all epochs. A canvas run is validated every fifth epoch. It ends when its accuracy has not risen by
  0.5 points for 4 validations, after a third of --canvas-epochs at the earliest. Below 50 % it has not learned.

Rows are written as groups of runs end; the same command started again does what is missing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.harness.classifier_runs import CORES, MIXES, Network, Run, check_equal, of_equal_flops
from experiments.harness.run_groups import add_options, check_options, complete
from experiments.harness.run_table import RunTable, open_table
from experiments.head_mixes import report

TASKS = ("digits", "canvas")
BUDGETS = ("parameters", "flops")
PATIENCE = 4
# A rule of stopping needs a rate that does not depend on the end, which is unknown.
CANVAS_OPTIONS = (
    *("--model.schedule.sched", "constant", "--model.schedule.warmup_epochs", "1"),
    *("--ema.decay", "0.99", "--data.batch_size", "64"),
)


class Comparison:
    """The runs of the comparison.

    Args:
        arguments: The parsed command line.
        table: Results so far.
    """

    def __init__(self, arguments: argparse.Namespace, table: RunTable) -> None:
        self.arguments, self.table = arguments, table

    def network(self, task: str, core: str, mix: str, budget: str) -> Network:
        """The network of a row: equal in parameters to its core alone, or in FLOPs."""
        network = Network(task, core, mix)
        network = of_equal_flops(network) if budget == "flops" else network
        check_equal(network, budget)
        return network

    def networks(self) -> list[Network]:
        """All networks, those with two budgets once."""
        arguments = self.arguments
        return list(
            dict.fromkeys(
                self.network(task, core, mix, budget)
                for task in arguments.tasks
                for core in sorted(arguments.cores, key=CORES.index, reverse=True)  # the slowest first
                for mix in MIXES
                for budget in BUDGETS
            )
        )

    def tuning(self, network: Network) -> list[Run]:
        """Runs that choose the learning rate of a core and a mix, for both budgets."""
        wide = Network(network.task, network.core, network.mix)
        rates = self.arguments.digits_rates if network.task == "digits" else self.arguments.canvas_rates
        return [self._run(wide, "tuning", rate, 0) for rate in rates]

    def rate(self, network: Network) -> float | None:
        """The rate with the highest accuracy in tuning, the lowest of equals; None before all are known."""
        runs = self.tuning(network)
        scores = self.table.values(runs, "top1_percent")
        if len(scores) < len(runs):
            return None
        return max(runs, key=lambda run: (_finite(*self.table.values([run], "top1_percent")), -run.rate)).rate

    def final(self, network: Network) -> list[Run]:
        """The runs that are reported; none before the rate is known."""
        rate = self.rate(network)
        if rate is None:
            return []
        return [self._run(network, "final", rate, seed) for seed in self.arguments.seeds]

    def follow(self, run: Run) -> Iterable[Run]:
        """The reported runs that may start now."""
        done = run.network
        return [
            final
            for network in self.networks()
            if (network.task, network.core, network.mix) == (done.task, done.core, done.mix)
            for final in self.final(network)
        ]

    def _run(self, network: Network, phase: str, rate: float, seed: int) -> Run:
        if network.task == "canvas":
            options = (*CANVAS_OPTIONS, *self.arguments.options)
            return Run(network, "canvas-few", rate, seed, self.arguments.canvas_epochs, PATIENCE, options)
        dataset = "digits-tuning" if phase == "tuning" else "digits"
        return Run(network, dataset, rate, seed, self.arguments.digits_epochs, 0, tuple(self.arguments.options))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="CSV to write, or to complete")
    add("--plot", type=Path, help="SVG to write")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--cores", nargs="+", choices=CORES, default=list(CORES))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the reported runs (0 1 2)")
    add("--digits-rates", type=float, nargs="+", default=[1.5e-3, 3e-3, 6e-3], help="to choose from (%(default)s)")
    add("--canvas-rates", type=float, nargs="+", default=[1e-3, 2e-3], help="to choose from (%(default)s)")
    add("--digits-epochs", type=int, default=80, help="epochs of a run (%(default)s)")
    add("--canvas-epochs", type=int, default=150, help="epochs of a run, 15 steps each, at most (%(default)s)")
    add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    check_options(arguments)
    with open_table(arguments.out) as table:
        comparison = Comparison(arguments, table)
        tuning = [run for network in comparison.networks() for run in comparison.tuning(network)]
        completion = complete(table, arguments, tuning, comparison.follow)
    for task in arguments.tasks if table else ():
        print(f"\n{task}:\n\n{report.table(task, arguments.out)}")
    if arguments.plot and table:
        report.draw(arguments.plot, arguments.out)
    completion.exit()


if __name__ == "__main__":
    main()
