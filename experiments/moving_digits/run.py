"""Attention in models of clips: softmax, linear, MHLA, a hybrid and Head-in-Head on moving digits, under one recipe.

    python -m experiments.moving_digits.run --out experiments/moving_digits/results.csv --jobs 8 --minutes 9
    python -m experiments.moving_digits.run --out experiments/moving_digits/results.csv --rows all ...  # CPE, RoPE, too

Each row is a model of `headmix train-gen` (recipe.yaml) for each seed, sampled by `headmix sample videos` and scored by
`headmix evaluate fvd` and `moving-digits`. README.md describes the rows.

- The validation loss of the EMA weights is taken every --interval steps. It is flat if it fell by less than 2 % in the
  last tenth of the steps, and rising if it was more than 2 % lower before. The table marks runs that are not flat.
- A model whose samples move as asked in less than half of the clips has not learned, and is marked.
- Longer clips (--long) are drawn at once (`whole`) and window by window (`windows`). Windows after the first have no
  class: it tells the direction at the start alone. Networks are timed before anything else runs (--times).
- Distilled rows take 15 % of their steps on the layers' errors. Further options of theirs: `--distilled='--ema.decay
  0.99 --model.distill_steps 300'`.

The same command leaves out finished rows and resumes interrupted ones whose directories (--runs) are still there. After
--minutes it interrupts what is running and ends with status 75. Another machine needs the CSV; of `softmax` runs
`finished` and `checkpoints/last.ckpt` for distillation; whole directories of unfinished runs; for pictures
`metrics.csv` and `drawn_*/samples.npz`.

On a CPU, to try it: --size 16 --frames 8 --patch 2 4 4 --blocks 2 2 2 --dim 32 --depth 3 --heads 2 --batch 8 --steps 20
--interval 10 --samples 40 --long 16 --long-samples 40 --sampling-steps 2 --times 8 16 --seeds 0
"""

import argparse
import time
from collections.abc import Sequence

from experiments.moving_digits.report import Report, open_table
from experiments.moving_digits.runs import MODELS, Runs, parse_arguments
from headmix_lab.script_runs import Outcome, check_options, compare, say
from headmix_lab.script_runs import complete as score_all
from headmix_lab.tables import ResultTable


def complete(runs: Runs, table: ResultTable, deadline_s: float) -> Outcome:
    """Run everything that the table lacks, until the deadline."""
    start_s, late = time.monotonic(), list[tuple[object, ...]]()
    for case in table.lacking(runs.timed(), runs.recipe):  # alone, before others need the device
        if time.monotonic() >= deadline_s:
            late.append(case)
            continue
        table.add(case, ms=f"{(ms := runs.time(case)):.4g}", recipe=runs.recipe(case))
        say(start_s, case, f"{ms:.4g} ms")

    shown = {"FVD": "fvd", "digit, %": "digit_percent", "motion, %": "motion_percent", "steps": "steps"}
    drawn = table.lacking(runs.drawn(), runs.recipe)
    failures, missing = score_all(table, drawn, runs.score, shown, runs.arguments.jobs, start_s)
    return Outcome(failures, late + missing)


def check_arguments(arguments: argparse.Namespace) -> None:
    """End with one line for wrong options."""
    check_options(arguments, list(MODELS), ("rows", "seeds", "times"), samples=4, long_samples=4, long=0)
    if 0 < arguments.long <= arguments.frames:
        raise SystemExit(f"error: --long must be 0 or above --frames {arguments.frames}, got {arguments.long}")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv, __doc__)
    check_arguments(arguments)

    def run(deadline_s: float) -> tuple[Outcome, Report]:
        runs, table = Runs(arguments, deadline_s), open_table(arguments.out)
        outcome = complete(runs, table, deadline_s)
        return outcome, Report(table, runs)

    compare(arguments, run)


if __name__ == "__main__":
    main()
