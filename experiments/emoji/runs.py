"""Runs of the models that draw emoji: what is trained, drawn and scored, with which options, and where."""

import argparse
import json
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from headmix_lab.drawing_tasks import TASKS, TEST, VALIDATION, Scores
from headmix_lab.script_runs import GeneratorRuns, flat, hash_of, run_script, trained_steps
from headmix_lab.tables import ResultTable
from headmix_vision.recipes import find_config
from headmix_vision.runs.networks import create_generator

CORES = ("softmax", "linear", "mhla", "hih")
MODELS = {
    f"{core}{suffix}": (core, {"cpe": cpe}) for suffix, cpe in (("", False), ("-cpe", True)) for core in CORES
} | {f"hybrid{suffix}": ("mhla", {"cpe": cpe, "softmax_every": 3}) for suffix, cpe in (("", False), ("-cpe", True))}
REAL = "validation pictures"


class Case(NamedTuple):
    """One row of the table: pictures for the labels of a split, drawn with a guidance, scored against that split."""

    row: str
    seed: int
    split: str
    guidance: str


class Runs(GeneratorRuns):
    """Runs of the comparison: commands and places."""

    def __init__(self, arguments: argparse.Namespace, deadline_s: float) -> None:
        super().__init__(arguments, deadline_s)
        self.task = TASKS[arguments.task]
        root = arguments.root or self.task.root
        self.root = None if root is None else str(Path(root).absolute())
        self.scores = Scores(self.task, arguments, self.root)
        self.task = self.scores.trained_on(arguments.latents)
        self.config = (yaml.safe_load(Path(find_config(self.task.recipe, "gen")).read_text()), *self.task.keys)

    @cached_property
    def labels(self) -> dict[str, list[int]]:
        """Labels to draw for each split: of all its pictures, or of `--samples` evenly spaced ones."""
        labels = {}
        for split in (VALIDATION, TEST):
            source = self.scores.open(split)
            count = self.arguments.samples or len(source)
            labels[split] = [source.read(number * len(source) // count)[1] for number in range(count)]
        return labels

    @cached_property
    def class_names(self) -> list[str]:
        """The styles and groups."""
        return self.scores.open(TEST).class_names

    def swept(self) -> list[Case]:
        """The cases by which the guidance of each row is chosen: of the first seed, on the validation split."""
        given = self.arguments
        return [Case(row, given.seeds[0], VALIDATION, f"{scale:g}") for row in given.rows for scale in given.guidance]

    def chosen(self, table: ResultTable, row: str) -> str | None:
        """Return the guidance of a row with the lowest validation FID or FVD; None before all are there."""
        distance = next(iter(self.task.scores))
        found = {case.guidance: table.row(case, self.recipe(case)) for case in self.swept() if case.row == row}
        known = {scale: float(row[distance]) for scale, row in found.items() if row}
        return min(known, key=lambda scale: known[scale]) if len(known) == len(found) else None

    def compared(self, table: ResultTable) -> list[Case]:
        """The cases that are compared: real pictures, and the rows whose guidance is chosen, of all seeds."""
        chosen = {row: scale for row in self.arguments.rows if (scale := self.chosen(table, row))}
        seeds = self.arguments.seeds
        return [Case(REAL, 0, TEST, ""), *(Case(row, seed, TEST, chosen[row]) for seed in seeds for row in chosen)]

    def network(self, row: str) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a row's network."""
        core, options = MODELS[row]
        return self.task.network(core, self.arguments, options)

    def parameters(self, row: str) -> int:
        """Number of parameters of a row's network."""
        name, arguments = self.network(row)
        network = create_generator(name, len(self.class_names), self.task.input_size(self.arguments), arguments)
        return sum(parameter.numel() for parameter in network.parameters())

    def options(self, row: str, seed: int) -> list[object]:
        """Options of a training run, those that follow from the data left out."""
        given, (name, arguments) = self.arguments, self.network(row)
        options: list[object] = ["--model.name", name, "--model.input_size", self.task.input_size(given)]
        options += ["--model.model_args", json.dumps(arguments), "--seed_everything", seed]
        options += ["--trainer.max_epochs", given.epochs, "--trainer.check_val_every_n_epoch", given.interval]
        options += ["--data.batch_size", given.batch, "--samples.every_n_steps", "null", "--trainer.devices", 1]
        options += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
        return [*options, *shlex.split(given.options)]

    def directory(self, row: str, seed: int) -> Path:
        """Run directory."""
        name = f"{row}-seed_{seed}-{hash_of(*self.config, *self.options(row, seed))}"
        return self.arguments.runs.absolute() / name

    def train(self, row: str, seed: int) -> Path:
        """Train, as `train_once` does."""
        options = [*self.options(row, seed), *self.task.data(self.root), "--model.num_classes", len(self.class_names)]
        return self.train_once(self.directory(row, seed), "train_gen.py", self.task.recipe, lambda: options)

    def recipe(self, case: Case) -> str:
        """Hash of everything that a row of the table depends on but the pictures and the classifiers."""
        given = self.arguments
        sampling = () if case.row == REAL else (*self.config, *self.options(case.row, case.seed), *self.sampling())
        return hash_of(*sampling, case.split, case.guidance, given.samples, given.size)

    def sampling(self) -> list[object]:
        """Options of `sample.py images` for all cases."""
        return ["--steps", self.arguments.sampling_steps, "--dtype", self.arguments.dtype]

    def samples(self, case: Case) -> Path:
        """The folder of a case's pictures."""
        name = f"drawn_{case.split}_{case.guidance}-{hash_of(self.arguments.samples, *self.sampling())}"
        return self.directory(case.row, case.seed) / name

    def score(self, case: Case) -> dict[str, object]:
        """Train, draw and score; what is there already is left as it is.

        Returns:
            The columns of the table.

        Raises:
            RunFailed: A command failed.
            TimeOver: There was no time for all of it.
        """
        if case.row == REAL:
            return {"recipe": self.recipe(case), **self.scores(case.split, None)}
        run, folder = self.train(case.row, case.seed), self.samples(case)
        if not (folder / "samples.npz").exists():
            labels = self.labels[case.split]
            drawing = ["--num", len(labels), "--classes", ",".join(map(str, labels)), "--guidance", case.guidance]
            drawing += ["--seed", case.seed, "--batch-size", 32 if self.task.clips else 256, "--npz", *self.sampling()]
            kind = "videos" if self.task.clips else "images"
            run_script(["sample.py", kind, "--model", run, "--out", folder, *drawing], **self.how)
        facts = {"steps": trained_steps(run), "flat": flat(run), "parameters": self.parameters(case.row)}
        return {**facts, "recipe": self.recipe(case), **self.scores(case.split, str(folder / "samples.npz"))}
