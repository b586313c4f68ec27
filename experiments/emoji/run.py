"""Attention in models that draw emoji or clothes: softmax, linear, MHLA and Head-in-Head, under one recipe.

    python -m experiments.emoji.run --root data/emoji --features lite0:LITE0.pth --judge runs/emoji_judge \\
        --out experiments/emoji/results.csv --pictures experiments/emoji --jobs 9

README.md makes data and judge. Each row is a model of `headmix train-gen -c emoji` for each seed, with a class for each
pair of a style and a group. Pictures are drawn for the labels of the split that they are scored against.

- Guidance has the lowest FID from the validation split at the first seed. All other scores use the test split.
- `as its label` comes from the judge, a classifier of the same training split. Its accuracy on real pictures is the
  ceiling. The row of real pictures scores the validation split as if it were drawn.
- `nearer to training` and `copied` are the numbers of `headmix evaluate neighbours`: 50 % and 1 % where samples lie
  as near to training pictures as the test split does.
- All train for --epochs. The table marks validation losses that were not flat at the end or had been lower.
- `-cpe` is the same model with convolutional position encoding (--rows all).

The same command leaves out finished rows and resumes interrupted ones whose directories (--runs) are still there. After
--minutes it interrupts what is running and ends with status 75. Another machine needs the CSV and directories of runs.

`--task fashion_mnist` draws Fashion-MNIST (../fashion_mnist/README.md), `--task animated_emoji` clips: FVD takes the
place of FID, guidance is chosen by it, and the judge is trained on the sheets of clips (data set `sheets`). `loop
closure` is 1 where a clip ends as it began. The row of real clips has the FVD of two halves, frozen and shuffled.

`--latents FOLDER` trains on cached latents of the same samples, in FOLDER/train and FOLDER/validation. --patch then
counts latent places. Samples are decoded to pixels before they are scored (../animated_emoji/README.md).

On a CPU, to try it: --size 16 --dim 32 --depth 2 --heads 2 --batch 16 --epochs 2 --interval 1 --samples 40
--sampling-steps 2 --guidance 1 2 --seeds 0; for clips also --frames 4 --blocks 2 2 2 --rows softmax linear mhla hybrid
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from experiments.emoji.report import Report, open_table
from experiments.emoji.runs import CORES, MODELS, Runs
from headmix_lab.drawing_tasks import TASKS, TEST
from headmix_lab.script_runs import Outcome, add_options, check_options, compare, find_features
from headmix_lab.script_runs import complete as score_all
from headmix_lab.tables import ResultTable


def complete(runs: Runs, table: ResultTable) -> Outcome:
    """Run everything that the table lacks, until the deadline."""
    start_s, given = time.monotonic(), runs.arguments
    distance, name = next(iter(runs.task.scores.items()))
    shown = {name: distance, "as its label, %": "top1_percent", "copied, %": "copied_percent", "steps": "steps"}
    wanted = {(case.row, case.seed) for case in table.lacking([*runs.swept(), *runs.compared(table)], runs.recipe)}
    if wanted:
        runs.scores.check()
    with ThreadPoolExecutor(given.jobs) as pool:
        for seed, row in product(given.seeds, given.rows):
            if runs.chosen(table, row) is None or (row, seed) in wanted:
                pool.submit(runs.train, row, seed)  # what goes wrong is said by the rows that need it
    swept = table.lacking(runs.swept(), runs.recipe)
    failures, missing = score_all(table, swept, runs.score, shown, given.jobs, start_s)
    cases = table.lacking(runs.compared(table), runs.recipe)
    others = score_all(table, cases, runs.score, shown, given.jobs, start_s)
    return Outcome(failures + others.failures, missing + others.missing)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_options(parser, "runs/emoji_gen")
    add("--task", choices=TASKS, default="emoji", help="the pictures, and the recipe of training (%(default)s)")
    add("--root", type=Path, help="folder of the data, as of headmix_lab.emoji (default: the recipe's)")
    add("--latents", type=Path, help="folder of cached latents, `train` and `validation`, to train on (none: pixels)")
    add("--features", required=True, help="of FID, precision, recall and copies: lite0:PATH, inception, a run")
    add("--judge", required=True, help="classifier of the same classes: a run or an export")
    add("--rows", nargs="+", default=list(CORES), help=f"all, or of {', '.join(MODELS)} (the first four)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of training and samples (0 1 2)")
    add("--guidance", type=float, nargs="+", default=[1, 1.5, 2, 3, 4], help="scales to choose from (1 1.5 2 3 4)")
    add("--size", type=int, default=64, help="height and width in pixels (%(default)s)")
    add("--patch", type=int, default=4, help="height and width of a patch (%(default)s)")
    add("--frames", type=int, default=24, help="frames of a clip (%(default)s)")
    add("--frame-patch", type=int, default=2, help="frames of a patch of clips (%(default)s)")
    add("--blocks", type=int, nargs=3, default=[3, 4, 4], help="token blocks of MHLA in clips (3 4 4)")
    add("--dim", type=int, default=192, help="width (%(default)s)")
    add("--depth", type=int, default=8, help="blocks of the transformer (%(default)s)")
    add("--heads", type=int, default=3, help="attention heads (%(default)s)")
    add("--batch", type=int, default=128, help="pictures of a training step (%(default)s)")
    add("--epochs", type=int, default=100, help="epochs of training (%(default)s)")
    add("--interval", type=int, default=10, help="epochs between validations (%(default)s)")
    add("--samples", type=int, default=0, help="pictures drawn for a split, 0 for as many as it has (%(default)s)")
    add("--sampling-steps", type=int, default=50, help="steps of the sampler (%(default)s)")
    add("--dtype", default="bfloat16", help="type of the sampler's network (%(default)s)")
    add("--shown", default="mhla", help="the row whose samples are in the first picture (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    check_options(arguments, list(MODELS), ("rows", "seeds", "guidance"), samples=0)
    arguments.features, arguments.judge = (find_features(name, vars(arguments)[name]) for name in ("features", "judge"))

    def run(deadline_s: float) -> tuple[Outcome, Report]:
        runs = Runs(arguments, deadline_s)
        table = open_table(arguments.out, runs.task)
        print(f"{len(runs.labels[TEST])} pictures of {len(runs.class_names)} classes are drawn for the test split")
        outcome = complete(runs, table)
        return outcome, Report(table, runs)

    compare(arguments, run)


if __name__ == "__main__":
    main()
