"""Runs of the models that draw emoji: what is trained, drawn and scored, with which options, and where."""

import argparse
import json
import shlex
import threading
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from headmix_lab.scoring import RememberingScorer
from headmix_lab.script_runs import GeneratorRuns, flat, hash_of, run_script, trained_steps
from headmix_lab.tables import ResultTable
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import Source, SplitRequest
from headmix_vision.evaluation.sample_sets import SampleSet, open_samples
from headmix_vision.evaluation.scores import accuracy, check_judge, fid, neighbours, precision_recall
from headmix_vision.recipes import find_config
from headmix_vision.runs.networks import create_generator

CORES = ("softmax", "linear", "mhla", "hih")
MODELS = {f"{core}{suffix}": (core, cpe) for suffix, cpe in (("", False), ("-cpe", True)) for core in CORES}
BASE = CORES
REAL = "validation pictures"
VALIDATION, TEST = "validation", "test"
TRAIN = "train"


class Task(NamedTuple):
    """Pictures that are drawn: the data set, which is also the judge's, its recipe and place, and the channels."""

    dataset: str
    recipe: str
    channels: int
    root: str | None = None


TASKS = {
    "emoji": Task("table/style+group", "emoji", 3, "data/emoji"),
    "fashion_mnist": Task("fashion_mnist", "fashion_mnist", 1),
}


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
        self._scoring = threading.Lock()
        self.scorer, self.pictures = cache(RememberingScorer), cache(self._open_pictures)
        self.config = yaml.safe_load(
            Path(find_config(self.task.recipe, "gen")).read_text()
        )  # comments are no part of a recipe

    @cached_property
    def labels(self) -> dict[str, list[int]]:
        """Labels to draw for each split: of all its pictures, or of `--samples` evenly spaced ones."""
        labels = {}
        for split in (VALIDATION, TEST):
            source = self._open(split)
            count = self.arguments.samples or len(source)
            labels[split] = [source.read(number * len(source) // count)[1] for number in range(count)]
        return labels

    @cached_property
    def class_names(self) -> list[str]:
        """The styles and groups."""
        return self._open(TEST).class_names

    def _open(self, split: str) -> Source:
        return open_source(SplitRequest(self.task.dataset, split, (3,), "scoring", root=self.root))

    def split(self, name: str) -> str:
        """Return a split as `headmix evaluate` takes it."""
        return f"{self.task.dataset}:{name}"

    def swept(self) -> list[Case]:
        """The cases by which the guidance of each row is chosen: of the first seed, on the validation split."""
        given = self.arguments
        return [Case(row, given.seeds[0], VALIDATION, f"{scale:g}") for row in given.rows for scale in given.guidance]

    def chosen(self, table: ResultTable, row: str) -> str | None:
        """Return the guidance of a row with the lowest validation FID; None before all are there."""
        found = {case.guidance: table.row(case, self.recipe(case)) for case in self.swept() if case.row == row}
        fids = {scale: float(known["fid"]) for scale, known in found.items() if known}
        return min(fids, key=lambda scale: fids[scale]) if len(fids) == len(found) else None

    def compared(self, table: ResultTable) -> list[Case]:
        """The cases that are compared: real pictures, and the rows whose guidance is chosen, of all seeds."""
        chosen = {row: scale for row in self.arguments.rows if (scale := self.chosen(table, row))}
        seeds = self.arguments.seeds
        return [Case(REAL, 0, TEST, ""), *(Case(row, seed, TEST, chosen[row]) for seed in seeds for row in chosen)]

    def network(self, row: str) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a row's network."""
        given, (core, cpe) = self.arguments, MODELS[row]
        sizes = {"embed_dim": given.dim, "depth": given.depth, "num_heads": given.heads, "patch_size": given.patch}
        return f"dit_{core}_s_4", {**sizes, "in_channels": self.task.channels, "cpe": cpe, "output_gate": False}

    def parameters(self, row: str) -> int:
        """Number of parameters of a row's network."""
        name, arguments = self.network(row)
        network = create_generator(name, len(self.class_names), self.arguments.size, arguments)
        return sum(parameter.numel() for parameter in network.parameters())

    def options(self, row: str, seed: int) -> list[object]:
        """Options of a training run, those that follow from the data left out."""
        given, (name, arguments) = self.arguments, self.network(row)
        options: list[object] = ["--model.name", name, "--model.input_size", given.size]
        options += ["--model.model_args", json.dumps(arguments), "--seed_everything", seed]
        options += ["--trainer.max_epochs", given.epochs, "--trainer.check_val_every_n_epoch", given.interval]
        options += ["--data.batch_size", given.batch, "--samples.every_n_steps", "null", "--trainer.devices", 1]
        options += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
        return [*options, *shlex.split(given.options)]

    def directory(self, row: str, seed: int) -> Path:
        """Run directory."""
        name = f"{row}-seed_{seed}-{hash_of(self.config, *self.options(row, seed))}"
        return self.arguments.runs.absolute() / name

    def train(self, row: str, seed: int) -> Path:
        """Train, as `train_once` does."""
        data = ["--data.root", self.root or "null", "--model.num_classes", len(self.class_names)]
        options = [*self.options(row, seed), *data]
        return self.train_once(self.directory(row, seed), "train_gen.py", self.task.recipe, lambda: options)

    def recipe(self, case: Case) -> str:
        """Hash of everything that a row of the table depends on but the pictures and the classifiers."""
        given = self.arguments
        sampling = () if case.row == REAL else (self.config, *self.options(case.row, case.seed), *self.sampling())
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
            return {"recipe": self.recipe(case), **self._scores(self.split(VALIDATION), case)}
        run, folder = self.train(case.row, case.seed), self.samples(case)
        if not (folder / "samples.npz").exists():
            labels = self.labels[case.split]
            drawing = ["--num", len(labels), "--classes", ",".join(map(str, labels)), "--guidance", case.guidance]
            drawing += ["--seed", case.seed, "--batch-size", 256, "--npz", *self.sampling()]
            run_script(["sample.py", "images", "--model", run, "--out", folder, *drawing], **self.how)
        facts = {"steps": trained_steps(run), "flat": flat(run), "parameters": self.parameters(case.row)}
        return {**facts, "recipe": self.recipe(case), **self._scores(str(folder / "samples.npz"), case)}

    def check(self) -> None:
        """Open the classifiers, before anything is trained that they cannot score.

        Raises:
            InputError: One cannot be opened, or the judge knows other classes.
        """
        self.scorer(self.arguments.features)
        judge = self.scorer(self.arguments.judge).extractor
        check_judge(judge, self.pictures(self.split(TEST), judge.mode))

    def _open_pictures(self, source: str, mode: str) -> SampleSet:
        return open_samples(source, mode, self.arguments.size, self.root)

    def _scores(self, fake: str, case: Case) -> dict[str, float]:
        """FID from the split; of the test split also precision, recall, what the judge says, and copies."""
        with self._scoring:
            scorer = self.scorer(self.arguments.features)
            mode, split = scorer.extractor.mode, self.split(case.split)
            real, samples = self.pictures(split, mode), self._open_pictures(fake, mode)
            scores = {"fid": fid(scorer, real, samples)["fid"]}
            if case.split == VALIDATION:
                return scores
            found = precision_recall(scorer, real, samples)
            scores |= {f"{name}_percent": 100 * found[name] for name in ("precision", "recall")}
            scores |= self._judged(split if case.row == REAL else fake)
            found = neighbours(scorer, self.pictures(self.split(TRAIN), mode), samples, real)
            return scores | {f"{name}_percent": 100 * found[name] for name in ("nearer", "copied")}

    def _judged(self, source: str) -> dict[str, float]:
        """Return the judge's accuracies of the pictures of a data set, or of a file of samples."""
        judge = self.scorer(self.arguments.judge)
        images = self._open_pictures(source, judge.extractor.mode)
        found = accuracy(judge, images, images.labels())
        return {f"{name}_percent": 100 * found[name] for name in ("top1", "balanced")}
