"""The runs of `compare_canvas.py`: what is trained and drawn, with which options, and where it lies."""

import argparse
import hashlib
import shlex
from pathlib import Path
from typing import NamedTuple

import yaml
from training_runs import run_script, train

from headmix_vision.data.datasets.canvas import LENGTHS
from headmix_vision.runs.networks import create_generator, create_network

MODELS = {
    "softmax": ("softmax", {}),
    "linear": ("linear", {}),
    "mhla": ("mhla", {}),
    "mhla+CPE+gate": ("mhla", {"cpe": "true", "output_gate": "true"}),
    "hih": ("hih", {}),
}
FLOORS = {"training handwriting": ("train", 0), "validation handwriting": ("validation", 1)}  # split, seed
BATCH = 256
WARMUP_SHARE = 0.1
# the recipe canvas is for a wider network and 40,000 steps
GENERATOR_RECIPE = ("--model.optimizer.lr", 1e-3, "--ema.decay", 0.998)


class Case(NamedTuple):
    """One row of the table; `task` is `classification`, `generation` or `floor`."""

    task: str
    model: str
    seed: int


class Runs:
    """How the runs of the comparison are started, and where they are.

    Args:
        arguments: The parsed command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.side_by_side = arguments.jobs > 1

    def cases(self, task: str) -> list[Case]:
        """All runs of a task."""
        return [Case(task, model, seed) for seed in self.arguments.seeds for model in self.arguments.models]

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
        if case.task == "floor":
            parts: list[object] = [self.arguments.samples]
        else:
            parts = self.options(case) + (self.sampling(case) if case.task == "generation" else [])
        return hashlib.sha256(shlex.join(map(str, parts)).encode()).hexdigest()[:8]

    def directory(self, case: Case) -> Path:
        """Run directory."""
        return self.arguments.runs / f"{case.task}-{case.model}-seed_{case.seed}-{self.recipe(case)}"

    def classify(self, case: Case) -> None:
        """Train a classifier."""
        options = self.options(case)
        train("train_cls.py", "canvas", self.directory(case), options, side_by_side=self.side_by_side)

    def generate(self, case: Case) -> None:
        """Train a generator and draw its samples."""
        run, options = self.directory(case), self.options(case)
        train("train_gen.py", "canvas", run, options, side_by_side=self.side_by_side)
        command = ["sample.py", "images", "--model", run.absolute(), "--out", self.samples(case).parent.absolute()]
        run_script([*command, "--npz", *self.sampling(case)], side_by_side=self.side_by_side)

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
