"""DINOv2 ViT-S/14 made linear: another attention in a trained backbone, distilled for minutes, judged by its features.

    python -m experiments.swap.run --teacher models/dinov2_s14 --sizes 224 --out experiments/swap/fashion_mnist.csv

A row is the teacher, or a student at one of three stages: swapped and not trained, after its attention layers have
learned the teacher's (`headmix distill classifier`, first stage), after it has learned the teacher's last features
(second stage). Students see the training pictures without labels. `headmix evaluate probe` scores all rows on the test
split: nearest neighbours and a linear probe of frozen features, tuned on training pictures, and the cosine to the
teacher's features. README.md has rules and commands. `python -m experiments.tables` writes the tables of documents.

The same command leaves out finished rows, and resumes trainings whose directories (--runs) are still there. After
--minutes it interrupts what is running and ends with status 75. With the CSV alone only whole students stay.

On a CPU, to try it: --teacher FOLDER (a small ViT of timm) --task digits --sizes 32 --attention-steps 4
--feature-steps 2 --batch 8 --every 8 --options "--trainer.precision 32-true --data.num_workers 0"
"""

import argparse
import json
import shlex
import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from experiments.swap.report import COLUMNS, STAGES, TEACHER, open_table, task_table
from headmix_lab.photographs import write_photographs
from headmix_lab.script_runs import (
    Outcome,
    add_options,
    check_options,
    compare,
    complete,
    hash_of,
    run_script,
    trained_steps,
)
from headmix_lab.tables import ResultTable
from headmix_lab.training_runs import train
from headmix_vision.files.tensors import file_sha256
from headmix_vision.files.writing import atomic_folder
from headmix_vision.models import from_pretrained, save_pretrained, swap_attention
from headmix_vision.runs.directory import CONFIG, FINISHED, read_curve
from headmix_vision.runs.networks import LOCAL, open_network

ROWS: dict[str, dict[str, Any]] = {
    "linear": {"core": "linear"},
    "mhla": {"core": "mhla"},
    "hih": {"core": "hih"},
    "hybrid": {"core": "mhla", "softmax_every": 3},
}
SWAPPED, ATTENTION, FEATURES = STAGES
DISTILL = ("-m", "headmix_vision", "distill", "classifier")
TOKENS = (0.3, 0.7)  # places of query tokens of maps, along both axes


class Task(NamedTuple):
    """Pictures that students learn from, and labelled ones that judge them, as `headmix evaluate` writes them."""

    learned: str
    train: str
    test: str
    options: tuple[str, ...] = ()


TASKS = {
    "fashion_mnist": Task("fashion_mnist", "fashion_mnist:train", "fashion_mnist:test"),
    "emoji": Task("table/group", "table/subgroup:train", "table/subgroup:test", ("--skip-unlabelled",)),
    "digits": Task("digits", "digits:train", "digits:validation"),
}


class Case(NamedTuple):
    """One row of the table."""

    row: str
    size: int
    stage: str


class Runs:
    """Students and their scores.

    Args:
        arguments: The parsed command line.
        deadline_s: When the last command has to end, on the clock of `time.monotonic`.
    """

    def __init__(self, arguments: argparse.Namespace, deadline_s: float) -> None:
        self.given, self.task = arguments, TASKS[arguments.task]
        self.how = {"side_by_side": arguments.jobs > 1, "deadline_s": deadline_s}
        self.teacher = arguments.teacher.absolute()
        self.root = [] if arguments.root is None else ["--root", arguments.root.absolute()]
        self._weights = file_sha256(self.teacher / "model.safetensors")
        self._locks: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)

    def cases(self) -> list[Case]:
        """All rows, the teacher first."""
        given = self.given
        students = [Case(row, size, stage) for size in given.sizes for stage in STAGES for row in given.rows]
        return [*(Case(TEACHER, size, "") for size in given.sizes), *students]

    def options(self, case: Case) -> list[object]:
        """Return the options of a student's first training, without its folders; stages after it are off."""
        given, swap = self.given, ROWS[case.row]
        options: list[object] = ["-c", "folder", "--model.img_size", case.size, "--model.features.steps", 0]
        options += [part for name, value in swap.items() for part in (f"--model.{name}", value)]
        options += ["--model.attention.steps", given.attention_steps, "--data.batch_size", given.batch]
        options += ["--data.dataset", self.task.learned]
        options += ["--data.train_split", "train", "--data.val_split", "validation"]
        options += ["--data.holdout_every", "null", "--trainer.limit_val_batches", given.val_batches]
        options += ["--trainer.devices", 1, "--trainer.enable_progress_bar", "false"]
        return [*options, "--trainer.enable_model_summary", "false", *shlex.split(given.options)]

    def recipe(self, case: Case) -> str:
        """Hash of everything that a row depends on but the pictures."""
        trained = [] if case.stage in ("", SWAPPED) else self.options(case)
        second = [self.given.feature_steps] if case.stage == FEATURES else []
        swap = ROWS.get(case.row, {})
        return hash_of(self._weights, case.size, json.dumps(swap), self.given.every, *trained, *second)

    def place(self, case: Case) -> Path:
        """Folder of a student."""
        name = f"{self.given.task}-{case.row}-{case.size}-{case.stage}-{self.recipe(case)}"
        return self.given.runs.absolute() / name

    def student(self, case: Case) -> Path:
        """Make a student, or the teacher; what is there already is left as it is."""
        if case.row == TEACHER:
            return self.teacher
        place = self.place(case)
        if case.stage == SWAPPED:
            if not place.exists():
                model = from_pretrained(self.teacher)
                torch.manual_seed(0)  # new weights of Head-in-Head are random
                swap_attention(model, **ROWS[case.row])
                with atomic_folder(place) as temporary:
                    save_pretrained(model, temporary)
            return place
        first = case._replace(stage=ATTENTION)
        with self._locks[case.row, case.size]:
            data = ["--model.teacher", f"{LOCAL}{self.teacher}"]
            data += ["--data.root", self.root[-1] if self.root else "null"]
            train(DISTILL, self.place(first), [*self.options(first), *data], **self.how)
            if case.stage == FEATURES:
                if not place.exists():
                    self._add_stage(self.place(first), place)
                train(DISTILL, place, [], **self.how)  # goes on
        return place

    def _add_stage(self, first: Path, place: Path) -> None:
        """Copy a run, and let it go on with the second stage."""
        with atomic_folder(place) as temporary:
            shutil.copytree(first, temporary, dirs_exist_ok=True)
            (temporary / FINISHED).unlink()
            config = yaml.safe_load((temporary / CONFIG).read_text())
            config["model"]["features"]["steps"] = self.given.feature_steps
            (temporary / CONFIG).write_text(yaml.safe_dump(config))

    def score(self, case: Case) -> dict[str, object]:
        """Make a student and score it; return the columns of the table."""
        place = self.student(case)
        is_run = case.stage in (ATTENTION, FEATURES)
        out = self.place(case).with_suffix(".json")
        if not out.exists():
            every = f"[::{self.given.every}]"
            sides = ["--train", f"{self.task.train}{every}", "--test", self.task.test, *self.task.options, *self.root]
            models = ["--model", place if is_run else f"{LOCAL}{place}", "--teacher", f"{LOCAL}{self.teacher}"]
            numbers = ["--input-size", case.size, "--batch-size", self.given.probe_batch, "--out", out]
            out.parent.mkdir(parents=True, exist_ok=True)
            run_script(["-m", "headmix_vision", "evaluate", "probe", *models, *sides, *numbers], **self.how)
        scores = json.loads(out.read_text())["scores"]
        found: dict[str, object] = {
            name: f"{scores[name]:.4f}" if name.startswith("cosine") else 100 * scores[name]
            for name in COLUMNS
            if name in scores
        }
        return found | {"recipe": self.recipe(case), **(self._cost(place) if is_run else {})}

    def _cost(self, run: Path) -> dict[str, object]:
        """Steps, and minutes at the run's median speed, where it was long enough to be measured."""
        speeds, steps = read_curve(run, "train/images_per_s").values(), trained_steps(run)
        minutes = {"minutes": steps * self.given.batch / statistics.median(speeds) / 60} if speeds else {}
        return {"steps": steps, **minutes}

    def draw_maps(self, folder: Path, photographs: Path) -> None:
        """Draw attention maps of the teacher and of finished students of the first size."""
        size = self.given.sizes[0]
        write_photographs(photographs / "validation" / "photograph")
        models, maps = photographs.parent / "models", photographs.parent / "maps"
        for row in (TEACHER, *self.given.rows):
            case = Case(row, size, "" if row == TEACHER else FEATURES)
            if row == TEACHER or (self.place(case) / FINISHED).exists():
                network: Any = from_pretrained(self.teacher) if row == TEACHER else open_network(self.place(case))[0]
                network.set_input_size((size, size))
                network._model_args["img_size"] = size
                save_pretrained(network, models / row)
        sources = [f"{LOCAL}{models / row}" for row in (TEACHER, *self.given.rows) if (models / row).exists()]
        side = size // network.patch_embed.patch_size[0]
        tokens = [f"{int(at * side)},{int(at * side)}" for at in TOKENS]
        pictures = ["--data", "folder", "--root", photographs, "--images", 2, "--tokens", *tokens]
        shutil.rmtree(maps, ignore_errors=True)
        run_script(["-m", "headmix_vision", "analyze", "maps", "--model", *sources, *pictures, "--out", maps])
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(maps / "maps.png", folder)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_options(parser, "runs/swap")
    add("--teacher", type=Path, required=True, help="folder of timm with the teacher")
    add("--task", choices=TASKS, default="fashion_mnist", help="the pictures (%(default)s)")
    add("--root", type=Path, help="place of the pictures, of emoji what headmix_lab.emoji wrote")
    add("--rows", nargs="+", default=list(ROWS), help=f"of {', '.join(ROWS)} (all)")
    add("--sizes", type=int, nargs="+", default=[224, 518], help="image sizes in pixels (224 518)")
    add("--attention-steps", type=int, default=1500, help="steps of the first stage (%(default)s)")
    add("--feature-steps", type=int, default=300, help="steps of the second stage (%(default)s)")
    add("--batch", type=int, default=128, help="pictures of a training step (%(default)s)")
    add("--val-batches", type=int, default=4, help="batches of a validation (%(default)s)")
    add("--probe-batch", type=int, default=256, help="pictures at a time when scoring (%(default)s)")
    add("--every", type=int, default=4, help="neighbours and probes come from each so-manieth picture (%(default)s)")
    return parser.parse_args(argv)


class Report:
    """The table of the rows so far, and attention maps."""

    def __init__(self, table: ResultTable, runs: Runs) -> None:
        self.table, self.runs = table, runs

    def text(self) -> str:
        return task_table(self.table.rows.values())

    def draw(self, folder: Path) -> None:
        self.runs.draw_maps(folder, self.runs.given.runs.absolute() / "photographs")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    check_options(arguments, list(ROWS), ("rows", "sizes"))

    def run(deadline_s: float) -> tuple[Outcome, Report]:
        runs, table = Runs(arguments, deadline_s), open_table(arguments.out)
        lacking = table.lacking(runs.cases(), runs.recipe)
        shown = {"k-NN, %": "knn_class_token", "probe, %": "linear_class_token", "cosine": "cosine_patches"}
        outcome = complete(table, lacking, runs.score, shown, arguments.jobs, time.monotonic())
        return outcome, Report(table, runs)

    compare(arguments, run)


if __name__ == "__main__":
    main()
