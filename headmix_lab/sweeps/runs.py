"""The runs of a sweep: their options, where they are, and what is read from them."""

import csv
import hashlib
import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from headmix_lab.scripts import RunFailed, run_python
from headmix_lab.sweeps.kinds import SWEEPS, Sweep, Variant
from headmix_lab.tables import ResultTable, Row
from headmix_lab.training_runs import train
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_fields, read_text
from headmix_vision.layers import CORES
from headmix_vision.recipes import find_config
from headmix_vision.runs.checkpoints import read_checkpoint
from headmix_vision.runs.directory import LAST, metric_names, read_curve, read_metrics
from headmix_vision.runs.networks import create_network

NUMBERS = (
    *("epochs", "val_percent", "test_top1_percent", "test_balanced_percent", "floor_percent"),
    *("images_per_s", "rank", "stable_rank", "entropy", "parameters"),
)
COLUMNS = ("variant", "rate", "seed", *NUMBERS, "ended", "recipe")
CURVES = ("variant", "rate", "seed", "epoch", "val_percent", "rank")
TRAINING = ("-m", "headmix_vision.train_cls")
QUIET = ("--trainer.devices", 1, "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false")
POOLING = {"class_token": False, "global_pool": "avg"}  # else softmax alone would have a class token
REPORTED = {"val/top1": "test_top1_percent", "val/balanced": "test_balanced_percent"}  # of what is chosen by
RATE_FACTORS = (0.5, 1.0, 2.0)
HOLDOUT_EVERY = 5
BY_PATIENCE, AT_LIMIT, NOT_FINITE = "patience", "limit", "not finite"


class Case(NamedTuple):
    """One run: a row of the table."""

    variant: str
    rate: str
    seed: int


@dataclass(frozen=True)
class Request:
    """Request of a user.

    Args:
        kind: Name of the sweep.
        sweep: What it is.
        recipes: Recipes of `headmix train-cls`, in their order.
        root: Place of the data; that of the recipe when None.
        options: Further options of `headmix train-cls fit`.
        rates: Learning rates of which each variant chooses; half, once and twice that of the recipe when None.
        seeds: So many runs of each variant.
        epochs: All train for so many; until validation stops to improve when None.
        out: Folder of the results.
        jobs: So many runs at a time.
    """

    kind: str
    sweep: Sweep
    recipes: Sequence[str]
    root: str | None
    options: Sequence[str]
    rates: Sequence[float] | None
    seeds: int
    epochs: int | None
    out: Path
    jobs: int

    @property
    def rule(self) -> list[object]:
        """Options that end a run, with a rate that does not depend on an unknown end."""
        if self.epochs is not None:
            schedule = ["--model.schedule.sched", "cosine", "--model.schedule.min_lr", 0]
            return ["--trainer.max_epochs", self.epochs, *schedule]
        ends = ["--trainer.max_epochs", 200, "--early_stopping.patience", 20]
        return [*ends, "--model.schedule.sched", "constant"]

    @property
    def table(self) -> Path:
        """The CSV file of the results."""
        return self.out / f"{self.kind}.csv"


class Runs:
    """The runs of a sweep.

    Args:
        request: What is asked for.
        deadline_s: When the last of them has to end, on the clock of `time.monotonic`.

    Attributes:
        variants: The networks by name.
        config: All options of the training, without a variant's own, as in `config.yaml`.
        rates: The learning rates, as they are written in the table, from the lowest on.
        monitor: Metric whose best validation chooses the rate, the tested checkpoint and the end.
        accuracy: The column of the same accuracy of the reported split.
        reported: The split that accuracies are reported of.
        holds_out: Whether rate and end are chosen on training images that are held out; else on the validation split.
        parameters: Of each network, the number of parameters.

    Raises:
        InputError: An option that the training refuses, or a network that cannot be.
    """

    def __init__(self, request: Request, deadline_s: float) -> None:
        self.request = request
        self.variants = {variant.name: variant for variant in request.sweep.variants}
        self.how: dict[str, Any] = {"side_by_side": request.jobs > 1, "deadline_s": deadline_s}
        texts = [find_config(recipe, "cls") for recipe in request.recipes]
        self._texts = [read_text(text) if Path(text).is_file() else text for text in texts]
        self._place = [] if request.root is None else ["--data.root", request.root]
        recipes = [part for recipe in request.recipes for part in ("-c", recipe)]
        self._given = [*recipes, *request.rule, *QUIET, *request.sweep.options, *request.options]
        self.config = yaml.safe_load(self._ask("fit", *self._given, *self._place, "--print_config"))
        data = self.config["data"]
        self.monitor = self.config["best"]["monitor"]
        if self.monitor not in REPORTED:
            raise InputError(
                f"a sweep chooses by an accuracy, best.monitor is {self.monitor}: set it to {' or '.join(REPORTED)}"
            )
        self.accuracy = REPORTED[self.monitor]
        self.reported = data["test_split"] or data["val_split"]
        given = data["holdout_every"] is not None
        self.holds_out = given or self.reported == data["val_split"]
        self._holdout = ("--data.holdout_every", HOLDOUT_EVERY) if self.holds_out and not given else ()
        base = self.config["model"]["optimizer"]["lr"]
        self.rates = [f"{rate:g}" for rate in sorted(request.rates or [factor * base for factor in RATE_FACTORS])]
        self._models = {name: self._model(variant) for name, variant in self.variants.items()}
        self.parameters = {name: _count_parameters(model) for name, model in self._models.items()}

    def _ask(self, *arguments: object) -> str:
        try:
            return run_python([*TRAINING, *arguments])
        except RunFailed as error:
            raise InputError(error.reason) from None

    def check(self, case: Case) -> None:
        """Try a run with one batch, and write nothing.

        Raises:
            InputError: What the training says of it.
        """
        place = self.directory(case).with_name("tried")
        self._ask("fit", *self._options(case), *self._place, "--run_dir", place, "--dry_run")

    def place(self, key: tuple[str, ...]) -> Any:
        """Return the place of a row in the table."""
        variant, rate, seed = key
        names = [known.name for known in SWEEPS[self.request.kind].variants]
        return [*names, variant].index(variant), float(rate), int(seed)

    def ready(self, table: ResultTable) -> list[Case]:
        """List the runs that lack a row and can start: first the choice of the rate, then all seeds."""
        cases = []
        for variant in self.variants:
            known = self.compared(table, variant) or self._tuning(variant)
            cases += [case for case in known if not self.row(table, case)]
        return cases

    def missing(self, table: ResultTable) -> int:
        """Count the runs that lack a row."""
        count = 0
        for variant in self.variants:
            others = self.request.seeds - 1
            done = sum(row["seed"] != "0" for row in self.rows(table, variant))
            count += others - done + sum(self.row(table, case) is None for case in self._tuning(variant))
        return count

    def rows(self, table: ResultTable, variant: str) -> list[Row]:
        """Return the rows of the compared runs of a variant."""
        return [row for case in self.compared(table, variant) if (row := self.row(table, case))]

    def compared(self, table: ResultTable, variant: str) -> list[Case]:
        """List the compared runs of a variant, at its chosen rate; none before it is chosen."""
        rate = self.chosen(table, variant)
        return [] if rate is None else [Case(variant, rate, seed) for seed in range(self.request.seeds)]

    def chosen(self, table: ResultTable, variant: str) -> str | None:
        """Return the rate with the best validation at seed 0, the lowest of equals, or the only one."""
        if len(self.rates) == 1:
            return self.rates[0]
        rows = {case.rate: self.row(table, case) for case in self._tuning(variant)}
        scores = {rate: float(row["val_percent"]) for rate, row in rows.items() if row}
        return max(scores, key=lambda rate: scores[rate]) if len(scores) == len(self.rates) else None

    def curves(self, table: ResultTable) -> list[Row]:
        """Read validation and rank (mean of layers) by epoch of the compared runs that still have metrics."""
        found = []
        for case in (case for variant in self.variants for case in self.compared(table, variant)):
            run = self.directory(case)
            layers = [name for name in metric_names(run) if name.startswith("analysis/rank/")]
            if not layers or not self.row(table, case):
                continue
            epochs: dict[int, dict[str, float]] = {}
            for row in read_metrics(run):
                epochs.setdefault(int(row["epoch"]) + 1, {}).update(row)
            for epoch, row in epochs.items():
                if layers[0] in row:
                    rank = statistics.mean(row[name] for name in layers)
                    validation = f"{100 * row[self.monitor]:.2f}" if self.monitor in row else ""
                    cells = (case.variant, case.rate, str(case.seed), str(epoch), validation, f"{rank:.2f}")
                    found.append(dict(zip(CURVES, cells, strict=True)))
        return found

    def row(self, table: ResultTable, case: Case) -> Row | None:
        """Return the row of a run."""
        return table.row(case, self.recipe(case))

    def _tuning(self, variant: str) -> list[Case]:
        return [Case(variant, rate, 0) for rate in self.rates]

    def _model(self, variant: Variant) -> dict[str, Any]:
        """Return the options of the model of a variant: `name`, `num_classes`, `img_size` and `model_args`."""
        base = self.config["model"]
        model = {name: base[name] for name in ("name", "num_classes", "img_size", "model_args")}
        model["name"] = with_core(base["name"], variant.core)
        model["model_args"] = {**(base["model_args"] or {}), **POOLING, **variant.model_args}
        if variant.side_tokens is not None:
            model["img_size"] = variant.side_tokens * _create(model).patch_embed.patch_size[0]
        return model

    def _options(self, case: Case) -> list[object]:
        model = self._models[case.variant]
        options = [*self._given, *self._holdout, "--model.name", model["name"]]
        options += ["--model.model_args", json.dumps(model["model_args"])]
        if model["img_size"] is not None:
            options += ["--model.img_size", json.dumps(model["img_size"])]
        return [*options, "--model.optimizer.lr", case.rate, "--seed_everything", case.seed]

    def recipe(self, case: Case) -> str:
        """Return a hash of everything that a run depends on, except the place of the data."""
        return hashlib.sha256(shlex.join(map(str, [*self._texts, *self._options(case)])).encode()).hexdigest()[:8]

    def directory(self, case: Case) -> Path:
        """Return the run directory."""
        name = f"{case.variant}-rate_{case.rate}-seed_{case.seed}-{self.recipe(case)}"
        return self.request.out.absolute() / self.request.kind / name

    def complete(self, case: Case) -> dict[str, object]:
        """Train and test, or resume, and read the columns of the table.

        Raises:
            RunFailed: A command failed.
            TimeOver: It was interrupted.
        """
        run, known = self.directory(case), {"parameters": self.parameters[case.variant], "recipe": self.recipe(case)}
        try:
            train(TRAINING, run, [*self._options(case), *self._place], **self.how)
        except RunFailed as error:
            if "not finite" not in str(error) and "non-finite" not in str(error):
                raise
            return {**known, "ended": NOT_FINITE, "val_percent": 0.0}
        counted = run / "classes_test.csv"
        if not counted.exists():
            run_python([*TRAINING, "test", "--run_dir", run, *self._place], **self.how)
        found = known | read_run(run, self.monitor) | read_test(counted)
        if self.request.jobs > 1:
            found.pop("images_per_s")  # runs side by side slow each other down
        return found


def read_run(run: Path, monitor: str) -> dict[str, object]:
    """Read the columns of the table from the metrics of a finished run; validation is the best `monitor`."""
    speeds = list(read_curve(run, "train/images_per_s").values())
    numbers: dict[str, object] = {
        "epochs": int(read_metrics(run)[-1]["epoch"]) + 1,
        "ended": BY_PATIENCE if _has_stopped(run) else AT_LIMIT,
        "val_percent": 100 * max(read_curve(run, monitor).values()),
        "images_per_s": statistics.median(speeds[1:] or speeds),
    }
    for number in ("rank", "stable_rank", "entropy"):
        layers = [name for name in metric_names(run) if name.startswith(f"analysis/{number}/")]
        if layers:
            numbers[number] = statistics.mean(list(read_curve(run, name).values())[-1] for name in layers)
    return numbers


def _create(model: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return create_network(**model)


def _count_parameters(model: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in _create(model).parameters())


def _has_stopped(run: Path) -> bool:
    """Return whether a run ended because validation no longer improved."""
    path = run / LAST
    states = check_fields(str(path), read_checkpoint(path, sharded=(), values=False), {"callbacks": dict})["callbacks"]
    rules = [
        check_fields(f"{name} of {path}", state, {"wait_count": int, "patience": int})
        for name, state in states.items()
        if str(name).startswith("EarlyStop")
    ]
    return any(rule["wait_count"] >= rule["patience"] for rule in rules)


def read_test(path: Path) -> dict[str, float]:
    """Read accuracies in percent from the counts of `test`, and the accuracy of the commonest class."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["images"])]
    images = [int(row["images"]) for row in rows]
    correct = [int(row["correct"]) for row in rows]
    return {
        "test_top1_percent": 100 * sum(correct) / sum(images),
        "test_balanced_percent": 100 * statistics.mean(a / b for a, b in zip(correct, images, strict=True)),
        "floor_percent": 100 * max(images) / sum(images),
    }


def with_core(name: str, core: str) -> str:
    """Replace the core in the name of a model.

    Raises:
        InputError: If the model has no core.
    """
    family, _, rest = name.partition("_")
    old, _, member = rest.partition("_")
    if family not in ("deit", "vit") or old not in CORES:
        raise InputError(f"a sweep changes the core of a model such as deit_mhla_tiny, the recipe trains {name}")
    return f"{family}_{core}_{member}"
