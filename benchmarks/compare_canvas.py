"""Softmax, linear and MHLA attention on boards of digits, as classifiers and as generators, under one recipe each.

    python benchmarks/compare_canvas.py --out docs/canvas.csv --jobs 16    # runs side by side on one GPU

Classifiers are `train_cls.py fit -c configs/cls/canvas.yaml`, generators `train_gen.py fit -c configs/gen/canvas.yaml`
with the options of `GENERATOR_RECIPE`, all of one width and depth; only attention and seed differ. A generator's
samples are compared with the 5,000 validation canvases by the last features of one classifier: of the first seed's the
one with the highest accuracy, or --features. The same distance of real canvases, as many as samples, is the floor.

The CSV is written anew after each run. Started again, the same command leaves out finished rows, and goes on with
interrupted runs where their directories are still there.
"""

import argparse
import csv
import hashlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from training_runs import RunFailed, markdown_table, mean_and_deviation, read_metric, run_script, train

from headmix_vision.data.canvas import LENGTHS, CanvasDigits
from headmix_vision.evaluation import scores
from headmix_vision.evaluation.images import DatasetImages, ImageSet, open_images
from headmix_vision.evaluation.npz import npz_labels
from headmix_vision.files import atomic_path
from headmix_vision.training.feature_extractors import open_extractor
from headmix_vision.training.networks import create_generator, create_network

MODELS = {
    "softmax": ("softmax", {}),
    "linear": ("linear", {}),
    "mhla": ("mhla", {}),
    "mhla+CPE+gate": ("mhla", {"cpe": "true", "output_gate": "true"}),
    "hih": ("hih", {}),
}
BATCH = 256
WARMUP_SHARE = 0.1
# configs/gen/canvas.yaml is for a wider network and 40,000 steps
GENERATOR_RECIPE = ("--model.optimizer.lr", 1e-3, "--ema.decay", 0.998)
FLOORS = {"training handwriting": ("train", 0), "validation handwriting": ("validation", 1)}  # split, seed
COLUMNS = (
    *("task", "model", "seed", "steps", "parameters", "last_top1_percent", "best_top1_percent"),
    *("fid", "as_labelled_percent", "features", "recipe"),
)

Row = dict[str, str]


class Case(NamedTuple):
    """One run: `classification`, `generation` or `floor`."""

    task: str
    model: str
    seed: int


class Table:
    """The rows of a CSV file, which is rewritten whole with every new one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[Case, Row] = {}
        if path.exists():
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            if any(set(row) != set(COLUMNS) for row in rows):
                raise ValueError(f"{path} is no table of this script; choose another --out")
            self.rows = {Case(row["task"], row["model"], int(row["seed"])): row for row in rows}

    def add(self, case: Case, **values: object) -> Row:
        """Add or replace a row."""
        given = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in values.items()}
        self.rows[case] = dict.fromkeys(COLUMNS, "") | {k: str(v) for k, v in case._asdict().items()} | given
        order = {name: place for place, name in enumerate(("classification", "generation", "floor", *MODELS, *FLOORS))}
        with atomic_path(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            for key in sorted(self.rows, key=lambda case: (order[case.task], order[case.model], case.seed)):
                writer.writerow(self.rows[key])
        return self.rows[case]

    def values(self, task: str, model: str, column: str, seeds: Sequence[int]) -> list[float]:
        """A column of one model, over seeds."""
        rows = (self.rows.get(Case(task, model, seed), {}) for seed in seeds)
        return [float(row[column]) for row in rows if row.get(column)]


class Runs:
    """How the runs of the comparison are started, and where they are.

    Args:
        arguments: The parsed command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.one_thread = arguments.jobs > 1

    def steps(self, task: str) -> int:
        """Optimizer steps of a run."""
        return self.arguments.steps_cls if task == "classification" else self.arguments.steps_gen

    def options(self, case: Case) -> list[object]:
        """Options of a training run; all that differs between models is in the first two lines."""
        core, extras = MODELS[case.model]
        prefix, suffix = ("deit", "digits") if case.task == "classification" else ("dit", "s_4")
        shape = {"embed_dim": self.arguments.dim, "depth": self.arguments.depth, "num_heads": self.arguments.heads}
        network = {"cpe": "false", "output_gate": "false"} | extras | shape
        options: list[object] = ["--model.name", f"{prefix}_{core}_{suffix}", "--seed_everything", case.seed]
        options += [part for name, value in network.items() for part in (f"--model.model_args.{name}", value)]
        steps, steps_per_epoch = self.steps(case.task), LENGTHS["train"] // BATCH
        options += ["--trainer.max_epochs", -1, "--trainer.max_steps", steps, "--data.batch_size", BATCH]
        options += ["--model.schedule.warmup_epochs", f"{WARMUP_SHARE * steps / steps_per_epoch:.4f}"]
        options += ["--trainer.precision", "bf16-mixed", "--trainer.devices", 1]
        options += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
        if case.task == "classification":
            interval = validation_interval(steps, self.arguments.validations)
            options += ["--trainer.check_val_every_n_epoch", "null", "--trainer.val_check_interval", interval]
            return [*options, *shlex.split(self.arguments.cls_options)]
        options += ["--data.val_split", "null", "--samples.every_n_steps", "null", *GENERATOR_RECIPE]
        return [*options, *shlex.split(self.arguments.gen_options)]

    def sampling(self, case: Case) -> list[object]:
        """Options of `sample.py`."""
        settings = {"num": self.arguments.samples, "steps": self.arguments.sampling_steps}
        settings |= {"guidance": self.arguments.guidance, "seed": case.seed, "batch-size": 500}
        return [*(part for name, value in settings.items() for part in (f"--{name}", value)), "--classes", "balanced"]

    def recipe(self, case: Case) -> str:
        """Hash of everything that the row depends on but the feature extractor."""
        parts = self.options(case) + (self.sampling(case) if case.task == "generation" else [])
        return hashlib.sha256(shlex.join(map(str, parts)).encode()).hexdigest()[:8]

    def directory(self, case: Case) -> Path:
        """Run directory."""
        return self.arguments.runs / f"{case.task}-{case.model}-seed_{case.seed}-{self.recipe(case)}"

    def classify(self, case: Case) -> None:
        """Train a classifier."""
        options = self.options(case)
        train("train_cls.py", "configs/cls/canvas.yaml", self.directory(case), options, one_thread=self.one_thread)

    def generate(self, case: Case) -> None:
        """Train a generator and draw its samples."""
        run, options = self.directory(case), self.options(case)
        train("train_gen.py", "configs/gen/canvas.yaml", run, options, one_thread=self.one_thread)
        command = ["sample.py", "images", "--model", run.absolute(), "--out", self.samples(case).parent.absolute()]
        run_script([*command, "--npz", *self.sampling(case)], one_thread=self.one_thread)

    def samples(self, case: Case) -> Path:
        """The drawn samples, with their labels."""
        return self.directory(case) / "drawn" / "samples.npz"

    def parameters(self, case: Case) -> int:
        """Number of parameters of a trained network."""
        model = yaml.safe_load((self.directory(case) / "config.yaml").read_text())["model"]
        if case.task == "classification":
            network = create_network(model["name"], model["num_classes"], model["img_size"], model["model_args"])
        else:
            network = create_generator(model["name"], model["num_classes"], model["input_size"], model["model_args"])
        return sum(parameter.numel() for parameter in network.parameters())


def validation_interval(steps: int, validations: int) -> int:
    """Steps between validations, a divisor of all steps so that the last one is at the end."""
    return steps // max(count for count in range(1, validations + 1) if steps % count == 0)


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
        return self._score(ImageSet(DatasetImages(canvases.name(0), [canvases], slice(None)), self.mode), labels)

    def _score(self, images: ImageSet, labels: torch.Tensor) -> dict[str, object]:
        distance = scores.fid(self.scorer, self.real, images)["fid"]
        share = scores.accuracy(self.scorer, images, labels)["top1"]
        return {"fid": f"{distance:.4f}", "as_labelled_percent": 100 * share, "features": self.name}


def compare(arguments: argparse.Namespace) -> tuple[Table, list[str]]:
    """Run everything that the table lacks.

    Returns:
        The table, and what went wrong.
    """
    start, runs, table, failures = time.monotonic(), Runs(arguments), Table(arguments.out), []

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
            top1 = [100 * value for value in read_metric(runs.directory(case), "val/top1")]
            add_run(table, runs, case, last_top1_percent=top1[-1], best_top1_percent=max(top1))
            say(case, f"top-1 {top1[-1]:.2f} %, best {max(top1):.2f} %")

        judge = open_judge(runs, table)
        for name, place in FLOORS.items():
            case = Case("floor", name, place[1])
            if judge and table.rows.get(case, {}).get("features") != judge.name:
                row = table.add(case, **judge.floor(*place))
                say(case, f"FID {row['fid']}, {row['as_labelled_percent']} % as labelled")
        for case in finished(started["generation"]):
            if judge:
                row = add_run(table, runs, case, **judge.samples(runs.samples(case)))
                say(case, f"FID {row['fid']}, {row['as_labelled_percent']} % as labelled")
    for case in stale_scores(runs, table, judge):
        failures.append(f"{case.model} seed {case.seed} was scored with {table.rows[case]['features']}: remove its row")
    return table, failures


def start_missing(pool: ThreadPoolExecutor, runs: Runs, table: Table, task: str) -> dict[Future[None], Case]:
    """Submit the runs of a task which have no row yet."""
    cases = [Case(task, model, seed) for seed in runs.arguments.seeds for model in runs.arguments.models]
    work = runs.classify if task == "classification" else runs.generate
    missing = [case for case in cases if table.rows.get(case, {}).get("recipe") != runs.recipe(case)]
    return {pool.submit(work, case): case for case in missing}


def add_run(table: Table, runs: Runs, case: Case, **values: object) -> Row:
    """Add the row of a training run."""
    facts = {"steps": runs.steps(case.task), "parameters": runs.parameters(case), "recipe": runs.recipe(case)}
    return table.add(case, **facts, **values)


def open_judge(runs: Runs, table: Table) -> Judge | None:
    """The classifier of --features, else the first seed's best, trained again if its run is gone; None without one."""
    arguments = runs.arguments
    if arguments.features is not None:
        return Judge(arguments.features, Path(arguments.features).name, arguments.samples)
    cases = [Case("classification", model, arguments.seeds[0]) for model in arguments.models]
    cases = [case for case in cases if table.rows.get(case, {}).get("recipe") == runs.recipe(case)]
    if not cases:
        return None
    best = max(cases, key=lambda case: float(table.rows[case]["best_top1_percent"]))
    runs.classify(best)
    return Judge(str(runs.directory(best)), f"{best.model} seed {best.seed}", arguments.samples)


def stale_scores(runs: Runs, table: Table, judge: Judge | None) -> list[Case]:
    """Generators whose scores are of another extractor than this run's, hence not to be compared."""
    cases = [Case("generation", model, seed) for seed in runs.arguments.seeds for model in runs.arguments.models]
    return [
        case for case in cases if judge and table.rows.get(case, {"features": judge.name})["features"] != judge.name
    ]


def report(table: Table, models: Sequence[str], seeds: Sequence[int]) -> str:
    """The tables in Markdown, mean ± standard deviation over seeds."""
    header = ["attention", "parameters, classifier", "top-1 in %, last", "best"]
    header += ["parameters, generator", "FID", "classified as their label, %"]
    rows = []
    for model in models:

        def cell(task: str, column: str, digits: int = 2, model: str = model) -> str:
            return mean_and_deviation(table.values(task, model, column, seeds), digits)

        counts = [table.values(task, model, "parameters", seeds) for task in ("classification", "generation")]
        sizes = [f"{count[0] / 1e6:.2f} M" if count else "–" for count in counts]
        accuracies = [cell("classification", f"{which}_top1_percent") for which in ("last", "best")]
        drawn = [cell("generation", "fid", 3), cell("generation", "as_labelled_percent")]
        rows.append([model, sizes[0], *accuracies, sizes[1], *drawn])
    for name, (_, seed) in FLOORS.items():
        floor = table.rows.get(Case("floor", name, seed))
        if floor:
            cells = [f"{float(floor['fid']):.3f}", floor["as_labelled_percent"]]
            rows.append([f"real canvases, {name}", *["–"] * 4, *cells])
    features = sorted({row["features"] for row in table.rows.values() if row["features"]})
    return f"{markdown_table(header, rows)}\n\nFeatures: {', '.join(features) or 'none'}."


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
    print(f"\n{report(table, arguments.models, arguments.seeds)}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
