"""Softmax, linear and MHLA attention on boards of digits, as classifiers and as generators, under one recipe each.

    python benchmarks/compare_canvas.py --out docs/canvas.csv --jobs 4     # runs side by side on one GPU

Classifiers are `train_cls.py fit -c canvas`, generators `train_gen.py fit -c canvas`
with the options of `GENERATOR_RECIPE` (canvas_runs.py), all of one width and depth; only attention and seed differ. A
generator's samples are compared with the 5,000 validation canvases by the last features of one classifier: of the first
seed's the one with the highest accuracy, or --features. The same distance of real canvases, as many as samples, is the
floor.

The CSV is written anew after each run. Started again, the same command leaves out finished rows, and goes on with
interrupted runs where their directories are still there.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from canvas_report import open_table, report
from canvas_runs import FLOORS, MODELS, Case, Runs

from headmix_vision.console.scripts import RunFailed
from headmix_vision.data.datasets.canvas import CanvasDigits
from headmix_vision.evaluation import scores
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.npz import npz_labels
from headmix_vision.evaluation.sample_sets import DatasetImages, ImageSet, open_images
from headmix_vision.files.result_table import ResultTable, Row
from headmix_vision.runs.directory import read_curve


class Judge:
    """Distances from the validation canvases, by the features of one classifier.

    Args:
        features: The classifier, as for `headmix_vision.evaluate`.
        name: What the CSV calls it.
        count: Canvases of each floor.
    """

    def __init__(self, features: str, name: str, count: int) -> None:
        extractor = open_extractor(features, "cuda" if torch.cuda.is_available() else "cpu")
        self.name = f"{name} {extractor.description['sha256'][:8]}"
        self.mode = extractor.mode
        self.scorer = scores.Scorer(extractor, batch_size=500)
        self.count = count

    @cached_property
    def real(self) -> Any:
        """Statistics of all validation canvases."""
        return self.scorer.statistics(open_images("canvas", self.mode))

    def samples(self, path: Path) -> dict[str, object]:
        """Scores of a generator's samples."""
        return self._score(open_images(str(path), self.mode), npz_labels(path))

    def floor(self, split: str, seed: int) -> dict[str, object]:
        """Scores of other real canvases."""
        canvases = CanvasDigits(split, seed=seed, length=self.count)
        _, labels = canvases.read_batch(range(self.count))
        return self._score(ImageSet(DatasetImages(canvases.name(0), canvases, slice(None)), self.mode), labels)

    def _score(self, images: ImageSet, labels: torch.Tensor) -> dict[str, object]:
        distance = scores.fid(self.scorer, self.real, images)["fid"]
        share = scores.accuracy(self.scorer, images, labels)["top1"]
        return {"fid": f"{distance:.4f}", "as_labelled_percent": 100 * share, "features": self.name}


def compare(arguments: argparse.Namespace) -> tuple[ResultTable, list[str]]:
    """Run everything that the table lacks.

    Returns:
        The table, and what went wrong.
    """
    start, runs, table, failures = time.monotonic(), Runs(arguments), open_table(arguments.out), []

    def say(case: Case, text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {case.task} {case.model} seed {case.seed}: {text}", flush=True)

    def finished(futures: dict[Future[None], Case]) -> Iterator[Case]:
        for future in as_completed(futures):
            case = futures[future]
            try:
                future.result()
            except RunFailed as error:
                failures.append(str(error))
                say(case, "failed")
            else:
                yield case

    with ThreadPoolExecutor(arguments.jobs) as pool:
        started = {task: start_missing(pool, runs, table, task) for task in ("classification", "generation")}
        for case in finished(started["classification"]):
            top1 = [100 * value for value in read_curve(runs.directory(case), "val/top1").values()]
            add_run(table, runs, case, last_top1_percent=top1[-1], best_top1_percent=max(top1))
            say(case, f"top-1 {top1[-1]:.2f} %, best {max(top1):.2f} %")

        judge = open_judge(runs, table)
        for name, place in FLOORS.items():
            case = Case("floor", name, place[1])
            row = table.row(case, runs.recipe(case))
            if judge and (row is None or row["features"] != judge.name):
                row = table.add(case, recipe=runs.recipe(case), **judge.floor(*place))
                say(case, f"FID {row['fid']}, {row['as_labelled_percent']} % as labelled")
        for case in finished(started["generation"]):
            if judge:
                row = add_run(table, runs, case, **judge.samples(runs.samples(case)))
                say(case, f"FID {row['fid']}, {row['as_labelled_percent']} % as labelled")
    for case, features in scored_by_others(runs, table, judge):
        failures.append(f"{case.model} seed {case.seed} was scored with {features}: remove its row")
    return table, failures


def start_missing(pool: ThreadPoolExecutor, runs: Runs, table: ResultTable, task: str) -> dict[Future[None], Case]:
    """Submit the runs of a task which have no row yet."""
    work = runs.classify if task == "classification" else runs.generate
    missing = [case for case in runs.cases(task) if table.row(case, runs.recipe(case)) is None]
    return {pool.submit(work, case): case for case in missing}


def add_run(table: ResultTable, runs: Runs, case: Case, **values: object) -> Row:
    """Add the row of a training run."""
    facts = {"steps": runs.steps(case.task), "parameters": runs.parameters(case), "recipe": runs.recipe(case)}
    return table.add(case, **facts, **values)


def open_judge(runs: Runs, table: ResultTable) -> Judge | None:
    """The classifier of --features, else the first seed's best, trained again if its run is gone; None without one."""
    arguments = runs.arguments
    if arguments.features is not None:
        return Judge(arguments.features, Path(arguments.features).name, arguments.samples)
    accuracies = {
        case: float(row["best_top1_percent"])
        for case in runs.cases("classification")
        if case.seed == arguments.seeds[0] and (row := table.row(case, runs.recipe(case)))
    }
    if not accuracies:
        return None
    best = max(accuracies, key=lambda case: accuracies[case])
    runs.classify(best)
    return Judge(str(runs.directory(best)), f"{best.model} seed {best.seed}", arguments.samples)


def scored_by_others(runs: Runs, table: ResultTable, judge: Judge | None) -> list[tuple[Case, str]]:
    """Generators that another extractor than this run's has scored, and its name: they are not to be compared."""
    scored = [
        (case, row["features"]) for case in runs.cases("generation") if (row := table.row(case, runs.recipe(case)))
    ]
    return [(case, features) for case, features in scored if judge and features != judge.name]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="CSV to write, or to complete")
    add("--runs", type=Path, default=Path("runs/compare_canvas"), help="place of the run directories (%(default)s)")
    add("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    add("--models", nargs="+", default=list(MODELS)[:4], help=f"of {', '.join(MODELS)} (all but hih)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of training and samples (0 1 2)")
    add("--steps-cls", type=int, default=2500, help="steps of a classifier, 256 canvases each (%(default)s)")
    add("--steps-gen", type=int, default=1500, help="steps of a generator, 256 canvases each (%(default)s)")
    add("--dim", type=int, default=128, help="width (%(default)s)")
    add("--depth", type=int, default=6, help="blocks (%(default)s)")
    add("--heads", type=int, default=4, help="attention heads (%(default)s)")
    add("--validations", type=int, default=5, help="validations of a classifier at most (%(default)s)")
    add("--samples", type=int, default=2250, help="samples of a generator, classes in turn (%(default)s)")
    add("--sampling-steps", type=int, default=25, help="steps of the sampler (%(default)s)")
    add("--guidance", type=float, default=1.5, help="scale of classifier-free guidance (%(default)s)")
    add("--features", help="run directory or export of the classifier that scores (the best of the first seed)")
    add("--cls-options", default="", help="further options of train_cls.py, in quotes, the same for all")
    add("--gen-options", default="", help="further options of train_gen.py, in quotes, the same for all")
    return parser.parse_args(argv)


def check_arguments(arguments: argparse.Namespace) -> None:
    """End with one line for wrong options."""
    for name in ("jobs", "steps_cls", "steps_gen", "dim", "depth", "heads", "validations", "sampling_steps"):
        if getattr(arguments, name) < 1:
            raise SystemExit(f"error: --{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    if arguments.samples < 2:
        raise SystemExit(f"error: --samples must be at least 2, got {arguments.samples}")
    for name in ("models", "seeds"):
        if len(set(getattr(arguments, name))) < len(getattr(arguments, name)):
            raise SystemExit(f"error: --{name} names one twice")
    for model in arguments.models:
        if model not in MODELS:
            raise SystemExit(f"error: --models knows {', '.join(MODELS)}, got {model!r}")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    check_arguments(arguments)
    try:
        table, failures = compare(arguments)
    except (ValueError, RunFailed) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"\n{report(table, Runs(arguments))}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
