"""Attention in models of clips: softmax, linear, MHLA, a hybrid and Head-in-Head on moving digits, under one recipe.

    python -m experiments.moving_digits.run --out experiments/moving_digits/results.csv --jobs 8 --minutes 9
    python -m experiments.moving_digits.run --out experiments/moving_digits/results.csv --rows all ...  # CPE, RoPE, too

A row is a model of `headmix-train-gen` (recipe.yaml) for each seed, drawn from by `headmix-sample
videos`, scored by `headmix-evaluate fvd` (with the digits classifier; halves, frozen and shuffled real clips beside it)
and `moving-digits` (with the judge's ceiling, that of real clips). Real training clips are scored like samples.

- `hybrid` is MHLA with softmax attention in every third layer.
- All train for --steps, over which the learning rate falls by half a cosine. The table says whose loss was not flat at
  the end: that of the averaged weights on validation clips, noise and levels always the same, is asked for after each
  --interval steps, is flat if it is less than 2 % below what it was a tenth of the steps before, and rising if it has
  been more than 2 % lower.
- A model whose samples move as their class says in less than half of all cases has not learned; the table says so.
- Clips longer than those of training (--long) are drawn at once (`whole`) and window by window (`windows`, `--extend`).
  The class tells in which direction a clip starts, which is wrong for a window in its middle: windows after the first
  are drawn without it (`--extend-guidance 0`), from the frames before them alone. Beside them stand the times of
  forward passes of the network on 32 clips (--times), and its training steps, timed alone before anything else runs.
- `softmax-extends` and so on are the first five, trained for such windows: half of the training clips begin with known
  frames, and half of these lose their class. Windows keep three quarters of their frames (`--overlap`), not half.
- `mhla-distilled` and `hybrid-distilled` start from the softmax model of the same seed and have a fifth of its steps,
  the first 15 % of them on the layers' errors (`headmix-distill`); `-short` is the same model from new weights in as
  many steps. Both have the recipe of all but for what --distilled and --short say: `--distilled='--ema.decay 0.99
  --model.optimizer.lr 2e-3 --model.distill_steps 300'`.
- `mhla-cpe`, `mhla-cpe-factorised` and `mhla-rope` are MHLA with position encodings by convolution of 3 x 3 x 3 tokens,
  of 3 x 3 and of 3 in time, and with rotary positions.

The CSV is written anew after each row. Started again, the same command leaves out finished rows and goes on with
interrupted ones where their directories (--runs) are still there. After --minutes it interrupts what is running and
ends with status 75: repeat the command. What another machine needs to go on: the CSV; of `softmax` runs `finished` and
`checkpoints/last.ckpt` (4 bytes a parameter, once finished) where models are still to be distilled; whole directories
of unfinished runs (16 bytes a parameter); for pictures `metrics.csv` and `drawn_*/samples.npz`. A run that is needed
and not there is trained again.

On a CPU, to try it: --size 16 --frames 8 --patch 2 4 4 --blocks 2 2 2 --dim 32 --depth 3 --heads 2 --batch 8 --steps 20
--interval 10 --samples 40 --long 16 --long-samples 40 --sampling-steps 2 --times 8 16 --seeds 0
"""

import argparse
import time
from collections.abc import Sequence

from experiments.harness.script_runs import Outcome, check_options, compare, say
from experiments.harness.script_runs import complete as score_all
from experiments.moving_digits.report import Report, open_table
from experiments.moving_digits.runs import MODELS, Case, Runs, parse_arguments
from headmix_vision.files.result_table import ResultTable


def complete(runs: Runs, table: ResultTable, deadline_s: float) -> Outcome:
    """Run everything that the table lacks, until the deadline."""
    start_s, late = time.monotonic(), list[tuple[object, ...]]()

    def lacking(cases: Sequence[Case]) -> list[Case]:
        return [case for case in cases if table.row(case, runs.recipe(case)) is None]

    for case in lacking(runs.timed()):  # alone, before others need the device
        if time.monotonic() >= deadline_s:
            late.append(case)
            continue
        table.add(case, ms=f"{(ms := runs.time(case)):.4g}", recipe=runs.recipe(case))
        say(start_s, case, f"{ms:.4g} ms")

    shown = {"FVD": "fvd", "digit, %": "digit_percent", "motion, %": "motion_percent", "steps": "steps"}
    failures, missing = score_all(table, lacking(runs.drawn()), runs.score, shown, runs.arguments.jobs, start_s)
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
