"""Cores without a head mix, with IHA and with MEA: digits without CPE, and canvases until they are learned.

    python benchmarks/compare_head_mixes.py --out docs/head_mixes.csv --plot docs/images/head_mixes.svg

Each core is compared with itself under a mix, once at equal parameters (2 %) and once at equal FLOPs (5 %), for which
the MLPs of a network that costs more are narrowed. All networks have width 64, 4 blocks and 4 heads of 16 dims, those
of canvases CPE; runs are `headmix-train-cls fit -c digits` (or canvas) with the options of head_mix_runs.py, trained
side by side as graphed_training.py describes.

Learning rates: each core and mix takes the one with the highest accuracy at seed 0 on a split that is not reported, of
the recipe's, half and twice that for digits, of the recipe's and twice that for canvases. Digits are tuned on a fifth
of the training images, trained anew on all and scored on the 360 held-out images. Canvases are tuned and stopped on
boards of training handwriting, and scored on the 5,000 of other handwriting.

Of canvases only 1,000 are trained on, in batches of 64: with the 50,000 of the recipe every network is right in more
than 99 % of all cases, and nothing can be compared. What is compared is how well a network generalises from few boards.

The rule of stopping: digits train for all epochs. A canvas run is validated every fifth epoch, and ends when its
accuracy has not risen by 0.5 points for 4 validations, not before a third of --canvas-epochs and not after all of them.
One that ends below 50 % has not learned, and is marked.

Rows are written as groups of runs end; the same command started again does what is missing.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from head_mix_runs import CORES, MIXES, Network, Run, check_equal, of_equal_flops, size_of
from head_mixes_report import draw
from run_groups import add_options, check_options, complete
from run_table import RunTable, open_table

from headmix_vision.console.tables import markdown_table, mean_and_deviation

TASKS = ("digits", "canvas")
BUDGETS = ("parameters", "flops")
LEARNED_PERCENT = 50
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

    def scores(self, task: str, core: str, mix: str, budget: str) -> list[float]:
        """Reported accuracies over seeds."""
        return self.table.values(self.final(self.network(task, core, mix, budget)), "test_top1_percent")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def report(comparison: Comparison) -> str:
    """A table for each task and budget, each with its verdict."""
    parts = []
    for task in comparison.arguments.tasks:
        for budget in BUDGETS:
            rows = [row(comparison, task, core, mix, budget) for core in comparison.arguments.cores for mix in MIXES]
            header = ["core", "mix", "parameters", "MFLOPs", "learning rate", "top-1, %", "against the core alone"]
            parts += [f"{task}, equal {budget}:\n\n{markdown_table(header, rows)}", verdict(comparison, task, budget)]
    return "\n\n".join(parts)


def row(comparison: Comparison, task: str, core: str, mix: str, budget: str) -> list[str]:
    """The cells of one network."""
    network = comparison.network(task, core, mix, budget)
    size, rate = size_of(network), comparison.rate(network)
    scores, alone = (comparison.scores(task, core, name, budget) for name in (mix, "plain"))
    learned = "" if not scores or statistics.mean(scores) >= LEARNED_PERCENT else " (has not learned)"
    gain = "" if mix == "plain" or not (scores and alone) else gain_cell(scores, alone)
    cells = [core, mix, f"{size.parameters:,}", f"{size.flops / 1e6:.2f}", "–" if rate is None else f"{rate:g}"]
    return [*cells, mean_and_deviation(scores) + learned, gain]


def gain_cell(scores: Sequence[float], alone: Sequence[float]) -> str:
    """Difference of two means, with its standard error."""
    gain, error = difference(scores, alone)
    return f"{gain:+.2f} ± {error:.2f}"


def difference(scores: Sequence[float], alone: Sequence[float]) -> tuple[float, float]:
    """Difference of the means of two samples and its standard error; nan with less than two each."""
    gain = statistics.mean(scores) - statistics.mean(alone)
    if min(len(scores), len(alone)) < 2:
        return gain, math.nan
    return gain, math.sqrt(sum(statistics.variance(sample) / len(sample) for sample in (scores, alone)))


def verdict(comparison: Comparison, task: str, budget: str) -> str:
    """One sentence for each mix: over which cores it is ahead, or behind, by more than two standard errors."""
    sentences = []
    for mix in MIXES[1:]:
        groups: dict[str, list[str]] = {"ahead of": [], "behind": [], "level with": []}
        for core in comparison.arguments.cores:
            scores, alone = (comparison.scores(task, core, name, budget) for name in (mix, "plain"))
            if not (scores and alone):
                continue
            gain, error = difference(scores, alone)
            apart = abs(gain) > 2 * error  # not where the error is unknown
            side = ("ahead of" if gain > 0 else "behind") if apart else "level with"
            groups[side].append(f"{core} ({gain:+.2f})")
        said = "; ".join(f"{side} {', '.join(cores)}" for side, cores in groups.items() if cores)
        sentences.append(f"{mix.upper()} is {said or 'not there yet'}.")
    return f"Verdict ({task}, equal {budget}; two standard errors): {' '.join(sentences)}"


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
    print(f"\n{report(comparison)}")
    if arguments.plot:
        draw(comparison.scores, arguments.tasks, arguments.cores, arguments.plot)
    completion.exit()


if __name__ == "__main__":
    main()
