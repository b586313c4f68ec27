"""Runs of the models of clips: what is trained, drawn, scored and timed, with which options, and where."""

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headmix_lab.measuring import REPOSITORY, release_memory, time_calls
from headmix_lab.script_runs import GeneratorRuns, add_options, flat, hash_of, run_script, trained_steps, yes
from headmix_vision.console import default_device, open_device
from headmix_vision.models import HeadMixVideoDiT
from headmix_vision.runs.networks import create_generator

CONFIG = "experiments/moving_digits/recipe.yaml"  # its text, comments included, is part of the hash of a row
JUDGE = "headmix_vision/models/weights/deit_mhla_digits.safetensors"
LEARNED_PERCENT = 50.0  # of clips that move as their class says: a model below it has not learned
WARM = "--model.schedule.warmup_epochs 0.1"  # 50 of 1,000 steps: as in the recipe, a twentieth
SHORT = 0.2  # of the steps
LAYERWISE = 0.15  # of these, in distillation
GOES_ON = ("--model.objective.clean_prefix", 0.5, "--model.objective.prefix_class_dropout", 0.5)
KEPT = 0.75  # of a window, where models trained with GOES_ON go on
WHOLE, WINDOWS, FORWARD, STEP = "whole", "windows", "forward", "step"
TIMED_CLIPS = 32  # of a forward pass: 8 clips of 64 frames leave an H200 idle
REAL, TEACHER = "real clips", "softmax"


class Model(NamedTuple):
    """Model of a row.

    `options` are arguments of the network beyond its core's. `budget` is `full`, all steps; `short`, a fifth of them;
    or `distilled`, as many, after the softmax model. `training` are options of training beyond the recipe.
    """

    core: str
    options: dict[str, Any] = {}  # noqa: RUF012  (of a named tuple, which nobody changes)
    budget: str = "full"
    training: tuple[object, ...] = ()


HYBRID = {"softmax_every": 3}
MODELS = {
    "softmax": Model("softmax"),
    "linear": Model("linear"),
    "mhla": Model("mhla"),
    "hybrid": Model("mhla", HYBRID),
    "hih": Model("hih"),
    "mhla-cpe": Model("mhla", {"cpe": True}),
    "mhla-cpe-factorised": Model("mhla", {"cpe": "factorised"}),
    "mhla-rope": Model("mhla", {"positions": "rope"}),
    "mhla-distilled": Model("mhla", budget="distilled"),
    "mhla-short": Model("mhla", budget="short"),
    "hybrid-distilled": Model("mhla", HYBRID, "distilled"),
    "hybrid-short": Model("mhla", HYBRID, "short"),
}
BASE = tuple(MODELS)[:5]
EXTENDS = {row: f"{row}-extends" for row in BASE}
MODELS |= {name: MODELS[row]._replace(training=GOES_ON) for row, name in EXTENDS.items()}


class Case(NamedTuple):
    """One row of the table: clips of so many frames that a model draws in one way, or a time of its network."""

    row: str
    seed: int
    frames: int
    way: str


class Runs(GeneratorRuns):
    """Runs of the comparison: commands and places."""

    def __init__(self, arguments: argparse.Namespace, deadline_s: float) -> None:
        super().__init__(arguments, deadline_s)
        self.config = (REPOSITORY / CONFIG).read_text()

    def drawn(self) -> list[Case]:
        """All that is drawn and scored; clips longer than in training come last."""
        given = self.arguments
        every = [(row, seed) for seed in given.seeds for row in given.rows]
        every.sort(key=lambda run: MODELS[run[0]].budget != "full")  # the others wait for the softmax model
        cases = [Case(REAL, 0, given.frames, WHOLE), *(Case(*run, given.frames, WHOLE) for run in every)]
        ways = dict.fromkeys(BASE, (WHOLE, WINDOWS)) | dict.fromkeys(EXTENDS.values(), (WINDOWS,))
        longer = [Case(row, seed, given.long, way) for row, seed in every for way in ways.get(row, ())]
        return cases + (longer if given.long else [])

    def timed(self) -> list[Case]:
        """All networks that are timed: their training steps, and forward passes on clips of several lengths."""
        given = self.arguments
        if not given.times:
            return []
        rows = [row for row in given.rows if MODELS[row].budget == "full" and not MODELS[row].training]
        steps = [Case(row, 0, given.frames, STEP) for row in rows]
        return steps + [Case(row, 0, frames, FORWARD) for row in rows if row in BASE for frames in given.times]

    def network(self, row: str) -> dict[str, Any]:
        """Arguments of a row's network; all that differs between rows of one budget is in `MODELS`."""
        given = self.arguments
        sizes = {"embed_dim": given.dim, "depth": given.depth, "num_heads": given.heads}
        grids = {"patch_size": given.patch, "block_grid": given.blocks}
        return {**sizes, **grids, "cpe": False, "output_gate": False, **MODELS[row].options}

    def create(self, row: str) -> HeadMixVideoDiT:
        """A new network of a row."""
        network = create_generator(_name(row), None, self._grid(self.arguments.frames), self.network(row))
        assert isinstance(network, HeadMixVideoDiT)
        return network

    def parameters(self, row: str) -> int:
        """Number of parameters of a row's network."""
        return sum(parameter.numel() for parameter in self.create(row).parameters())

    def _grid(self, frames: int) -> list[int]:
        return [frames, self.arguments.size, self.arguments.size]

    def options(self, row: str, seed: int) -> list[object]:
        """Options of a training run but the number of steps and the teacher."""
        given = self.arguments
        options: list[object] = ["--model.name", _name(row), "--model.input_size", json.dumps(self._grid(given.frames))]
        for name, value in self.network(row).items():
            options += [f"--model.model_args.{name}", value if isinstance(value, str) else json.dumps(value)]
        options += ["--seed_everything", seed, "--data.batch_size", given.batch]
        options += ["--trainer.limit_train_batches", given.interval, *MODELS[row].training]
        budget = {"short": given.short, "distilled": given.distilled}.get(MODELS[row].budget, "")
        return [*options, *shlex.split(given.options), *shlex.split(budget)]

    def recipe(self, case: Case) -> str:
        """Hash of everything that a row of the table depends on."""
        given, (row, seed, frames, way) = self.arguments, case
        if way in (STEP, FORWARD):
            return hash_of(self.network(row), given.size, given.batch if way == STEP else TIMED_CLIPS, frames, way)
        sampling = () if row == REAL else (*self._training(row, seed), *self.sampling(case))
        return hash_of(*sampling, self._count(case), frames, given.size)

    def _training(self, row: str, seed: int) -> list[object]:
        """Everything that the weights of a run depend on."""
        given, budget = self.arguments, MODELS[row].budget
        own = [self.config, *self.options(row, seed), given.steps]
        return own if budget == "full" else [*own, budget, SHORT, LAYERWISE, *self.options(TEACHER, seed)]

    def directory(self, row: str, seed: int) -> Path:
        """Run directory."""
        return self.arguments.runs.absolute() / f"{row}-seed_{seed}-{hash_of(*self._training(row, seed))}"

    def train(self, row: str, seed: int) -> Path:
        """Train, and keep the averaged weights alone; a finished run is left as it is.

        Returns:
            The run directory.

        Raises:
            RunFailed: Training failed, now or before in this call.
            TimeOver: It was interrupted.
        """
        distilled = MODELS[row].budget == "distilled"
        steps = self.arguments.steps
        if MODELS[row].budget != "full":
            steps = max(1, int(SHORT * steps))

        def options() -> list[object]:
            given = [*self.options(row, seed), "--trainer.max_steps", steps]
            if not distilled:
                return [*given, "--model.compile", "blocks"] if self.arguments.compile else given
            teacher = os.path.relpath(self.train(TEACHER, seed), REPOSITORY)  # the same on another machine
            own = ["--model.distill_steps", int(LAYERWISE * steps)]  # --distilled may say another number
            return [*own, *given, "--model.teacher", teacher]

        script = "-m headmix_vision.distill" if distilled else "train_gen.py"
        return self.train_once(self.directory(row, seed), script, CONFIG, options)

    def sampling(self, case: Case) -> list[object]:
        """Options of `sample.py videos`."""
        given = self.arguments
        settings = {"num": self._count(case), "frames": case.frames, "seed": case.seed}
        settings |= {"steps": given.sampling_steps, "guidance": given.guidance, "batch-size": given.batch}
        options: list[object] = [part for name, value in settings.items() for part in (f"--{name}", value)]
        if case.way == WINDOWS:
            options += ["--extend", "--extend-guidance", 0]
            if case.row in EXTENDS.values():
                options += ["--overlap", int(KEPT * given.frames) // given.patch[0] * given.patch[0]]
        return options

    def _count(self, case: Case) -> int:
        return self.arguments.samples if case.frames == self.arguments.frames else self.arguments.long_samples

    def samples(self, case: Case) -> Path:
        """The folder of a case's clips."""
        name = f"drawn_{case.frames}_{case.way}-{hash_of(*self.sampling(case))}"
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
            place = self.arguments.runs.absolute() / f"real_clips-{self.recipe(case)}"
            return {"recipe": self.recipe(case), **self._distance("moving_digits:train", place, case)}
        run, folder = self.train(case.row, case.seed), self.samples(case)
        judged = folder.with_name(f"{folder.name}-moving-digits.json")
        if not judged.exists():
            drawing = ["sample.py", "videos", "--model", run, "--out", folder, "--npz", "--format", "png"]
            run_script([*drawing, *self.sampling(case)], **self.how)
            self.evaluate("moving-digits", folder / "samples.npz", judged, "--features", JUDGE)
        found = json.loads(judged.read_text())
        percents = {f"{name}_percent": 100 * value for name, value in found["scores"].items()}
        percents |= {f"{name}_ceiling_percent": 100 * found["ceiling"][name] for name in ("digit", "motion")}
        facts = {"steps": trained_steps(run), "parameters": self.parameters(case.row), "recipe": self.recipe(case)}
        if MODELS[case.row].budget == "full":
            facts["flat"] = flat(run)
        if case.frames == self.arguments.frames:
            facts |= self._distance(str(folder / "samples.npz"), folder, case)
            facts["learned"] = yes(percents["motion_percent"] >= LEARNED_PERCENT)
        return {**facts, **percents}

    def _distance(self, fake: str, place: Path, case: Case) -> dict[str, object]:
        """FVD from validation clips, and its controls."""
        out, given = place.with_name(f"{place.name}-fvd.json"), self.arguments
        options = ["--real", "moving_digits", "--features", f"digits:{JUDGE}", "--image-size", given.size]
        self.evaluate("fvd", fake, out, *options, "--frames", case.frames, "--count", self._count(case))
        found = json.loads(out.read_text())
        controls = found["controls"]["fvd"]
        return {"fvd": found["scores"]["fvd"], **{f"fvd_{name}": value for name, value in controls.items()}}

    def time(self, case: Case) -> float:
        """Time a network alone on its device, bf16 autocast.

        Returns:
            Milliseconds: of forward and backward pass of a training batch, or for each frame of a forward pass.
        """
        device, trains = open_device(default_device()), case.way == STEP
        clips = self.arguments.batch if trains else TIMED_CLIPS
        release_memory()  # of the network before
        torch.manual_seed(0)
        network = self.create(case.row).to(device).train(trains)
        x = torch.randn(clips, 1, *self._grid(case.frames), device=device)
        times, labels = torch.rand(clips, device=device) * 1000, torch.zeros(clips, dtype=torch.int64, device=device)

        def call() -> None:
            with torch.set_grad_enabled(trains), torch.autocast(device.type, dtype=torch.bfloat16):
                output = network(x, times, labels)
            if trains:
                output.float().square().mean().backward()

        timing = time_calls([call], device, budget_s=1.0)
        return timing.ms if trains else timing.ms / (clips * case.frames)


def _name(row: str) -> str:
    return f"dit_video_{MODELS[row].core}_digits"


def parse_arguments(argv: Sequence[str] | None, description: str | None = None) -> argparse.Namespace:
    """Parse the command line of the comparison."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_options(parser, "runs/moving_digits")
    add("--rows", nargs="+", default=list(BASE), help=f"all, or of {', '.join(MODELS)} (the first five)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of training and samples (0 1 2)")
    add("--size", type=int, default=64, help="height and width in pixels (%(default)s)")
    add("--frames", type=int, default=16, help="frames of a clip in training (%(default)s)")
    add("--patch", type=int, nargs=3, default=[2, 8, 8], help="frames, rows and columns of a patch (2 8 8)")
    add("--blocks", type=int, nargs=3, default=[4, 2, 2], help="token blocks of MHLA along the same axes (4 2 2)")
    add("--dim", type=int, default=192, help="width (%(default)s)")
    add("--depth", type=int, default=6, help="blocks of the transformer (%(default)s)")
    add("--heads", type=int, default=3, help="attention heads (%(default)s)")
    add("--batch", type=int, default=64, help="clips of a training step, and drawn at a time (%(default)s)")
    add("--steps", type=int, default=5000, help="training steps (%(default)s)")
    add("--interval", type=int, default=500, help="training steps between validations (%(default)s)")
    add("--samples", type=int, default=1000, help="clips drawn from a model, classes in turn (%(default)s)")
    add("--long", type=int, default=64, help="frames of the longer clips, 0 for none (%(default)s)")
    add("--long-samples", type=int, default=200, help="longer clips drawn from a model in either way (%(default)s)")
    add("--sampling-steps", type=int, default=25, help="steps of the sampler (%(default)s)")
    add("--guidance", type=float, default=3.0, help="scale of classifier-free guidance (%(default)s)")
    add("--compile", action="store_true", help="compile what is trained alone; its rows are the same but for rounding")
    add("--distilled", default=WARM, help="further options of training the rows `-distilled`, in quotes (%(default)s)")
    add("--short", default=WARM, help="further options of training the rows `-short`, in quotes (%(default)s)")
    add("--times", type=int, nargs="*", default=[64, 128, 256], help="frames of the 32 timed clips, nothing for none")
    return parser.parse_args(argv)
