"""Images per second of the commands of training, from end to end, against the bare step of the same network.

    python -m benchmarks.bench_training                             # dit_mhla_s_2 and deit_mhla_small, batch 256
    python -m benchmarks.bench_training --models dit_mhla_xl_2:cpe=True --size 64 --batch 32
    python -m benchmarks.bench_training --device cpu --tiny         # tries the script itself where there is no GPU

The bare step is bench_models.py's: forward, loss, backward and a fused AdamW step on tensors that lie on the
device, under bf16 autocast. The commands are `headmix train-gen fit -c imagenet256` and `headmix train-cls fit -c
imagenet` with all that they do between two steps (noise and labels or mixup, logging, checks, interrupts), without and
with averaged weights. Their data cost nothing to read: one batch of `fake`, in pinned memory, comes again and again.
The clock starts after the first steps, which compile and open the loggers, and waits for the device at both ends;
neither validations nor checkpoints come in between.

Bare steps are timed before and after the commands of each model. What a step takes beyond the bare one is given in ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.bench_models import Contestant
from benchmarks.model_table import Setting
from headmix_lab.measuring import add_options, environment, fill, open_device, release_memory, results_path, write_csv
from headmix_lab.model_families import Size, check_spellings, family_of, read_size, read_spelling
from headmix_lab.tables import print_table
from headmix_vision.cli.training import run_command_line
from headmix_vision.data.batches import as_it_is
from headmix_vision.data.classification import ClassificationData
from headmix_vision.data.generation import GenerationData
from headmix_vision.training.base_cli import RunCLI
from headmix_vision.training.classification_cli import ClassificationCLI
from headmix_vision.training.generation_cli import GenerationCLI

SHOWN = dict.fromkeys(("model", "size", "batch", "what"), "")
SHOWN |= {"imgs_per_s": ".0f", "ratio_to_bare": ".3f", "beyond_bare_ms": ".2f"}
LATENTS = [
    "--model.vae", "null", "--data.val_split", "null", "--samples.every_n_steps", "null",
    "--checkpoint_every_n_steps", "null",
]  # fmt: skip
IMAGES = ["--model.schedule.warmup_epochs", "0", "--trainer.limit_val_batches", "0"]
COMPILE = {"none": "false", "default": "true", "blocks": "blocks", "reduce-overhead": "graphs"}
WHAT = {"no averaging": ["--ema.decay", "null"], "averaging": []}
DEFAULTS: dict[str, Any] = {
    "models": ["dit_mhla_s_2", "deit_mhla_small:drop_path_rate=0.1"],
    "sizes": {"input_size": 32, "img_size": 224},
    "batch": 256,
    "compile": "default",
    "steps": 320,
    "warmup_steps": 110,
}
TINY_DEFAULTS: dict[str, Any] = {
    "models": ["dit_mhla_s_2:depth=1,embed_dim=16,num_heads=2", "deit_mhla_tiny:depth=1,embed_dim=24"],
    "sizes": {"input_size": 8, "img_size": 64},
    "batch": 2,
    "compile": "none",
    "steps": 40,
    "warmup_steps": 10,
}

Row = dict[str, Any]


class SameBatches(Dataset[Any]):
    """The same batches again and again, so many in all."""

    def __init__(self, batches: Sequence[tuple[Tensor, ...]], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.batches[index % len(self.batches)]


class FreeReading:
    """Data module that repeats its first batch, split where a step accumulates several."""

    def train_dataloader(self: Any) -> DataLoader[Any]:
        batch, parts = next(iter(super().train_dataloader())), self.trainer.accumulate_grad_batches  # type: ignore[misc]
        batches = [tuple(x[part::parts].contiguous() for x in batch) for part in range(parts)]
        count = parts * self.trainer.max_steps
        return DataLoader(SameBatches(batches, count), batch_size=None, collate_fn=as_it_is)


class FreeGeneration(FreeReading, GenerationData):
    pass


class FreeClassification(FreeReading, ClassificationData):
    pass


class Clock(Callback):
    """Clock of a run's steps after the first ones; it waits for the device at both ends."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.step_s = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.warmup_steps:
            self._start_s = self._now(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == trainer.max_steps - 1:  # the last step ends the epoch and writes a checkpoint
            self.step_s = (self._now(pl_module) - self._start_s) / (trainer.global_step - self.warmup_steps)

    def _now(self, module: LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        return time.perf_counter()


def command_line(base: type[RunCLI], data: type[Any], clock: Clock) -> type[RunCLI]:
    """The command line `base` with data that cost nothing, a clock, and no checkpoint at the end."""

    class Timed(base):  # type: ignore[valid-type, misc]
        data_class = data

        def _fit_callbacks(self, *args: Any) -> list[Callback]:
            callbacks = super()._fit_callbacks(*args)
            self.last.save = lambda trainer: None  # a checkpoint of DiT-XL/2 has 11 GB
            return [*callbacks, clock]

    return Timed


def train(
    spelling: str, what: str, folder: Path, arguments: argparse.Namespace, clock: Clock, further: Sequence[object] = ()
) -> None:
    """Run the command with a clock, and with further options, which win."""
    name, options = read_spelling(spelling)
    kind = family_of(name)
    common = [
        "--run_dir", folder, "--trainer.accelerator", "cpu" if arguments.device.type == "cpu" else "gpu",
        "--trainer.devices", 1, "--trainer.max_epochs", "null", "--trainer.max_steps", arguments.steps,
        "--trainer.accumulate_grad_batches", 1, "--trainer.enable_progress_bar", "false",
        "--model.name", name, "--model.model_args", json.dumps(options),
        f"--model.{kind.size}", json.dumps(size_of(name, arguments)), "--model.compile", COMPILE[arguments.compile],
        "--data.dataset", "fake", "--data.root", "null", "--data.batch_size", arguments.batch, "--data.num_workers", 0,
        *WHAT[what], *further,
    ]  # fmt: skip
    if kind.size == "input_size":
        cli, own = command_line(GenerationCLI, FreeGeneration, clock), ["-c", "imagenet256", *LATENTS]
    else:
        cli, own = command_line(ClassificationCLI, FreeClassification, clock), ["-c", "imagenet", *IMAGES]
    run_command_line(cli, [str(word) for word in ["fit", *own, *common]])


def size_of(name: str, arguments: argparse.Namespace) -> Size:
    return arguments.size or arguments.sizes[family_of(name).size]


def measure(spelling: str, arguments: argparse.Namespace) -> list[Row]:
    """A row for the bare step and for each command."""
    name, _ = read_spelling(spelling)
    size = size_of(name, arguments)
    timed_steps = arguments.steps - arguments.warmup_steps - 1
    inputs = family_of(name).inputs(arguments.batch, size, torch.Generator(arguments.device).manual_seed(0))

    def bare() -> float:
        forget()
        setting = Setting((), size, arguments.batch, "train", arguments.compile)
        step = Contestant(spelling, setting, inputs, window_s=0.01, check=False)
        step.steps = arguments.warmup_steps
        step.window()
        step.steps = timed_steps
        seconds = step.window() / step.steps
        step.check_finite()
        return seconds

    times_s = {"bare step": [bare()]}
    for what in WHAT:
        forget()
        clock = Clock(arguments.warmup_steps)
        with tempfile.TemporaryDirectory() as folder:
            train(spelling, what, Path(folder) / "run", arguments, clock)
        times_s[what] = [clock.step_s]
    times_s["bare step"].append(bare())
    bare_s = statistics.mean(times_s["bare step"])
    return [
        {
            "model": spelling,
            "size": size,
            "batch": arguments.batch,
            "what": what,
            "imgs_per_s": arguments.batch / (step_s := statistics.mean(own)),
            "ratio_to_bare": bare_s / step_s,
            "step_ms": 1e3 * step_s,
            "beyond_bare_ms": 1e3 * (step_s - bare_s),
            "bare_before_ms": 1e3 * times_s["bare step"][0],
            "bare_after_ms": 1e3 * times_s["bare step"][1],
            "steps": timed_steps,
            "compile": arguments.compile,
            "autocast": "bfloat16",
        }
        for what, own in times_s.items()
    ]


def forget() -> None:
    torch.compiler.reset()
    release_memory()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="names and options as for bench_models.py, `dit_*` or classifiers")
    parser.add_argument("--size", type=read_size, help="latents, by default 32, or pixels, by default 224; 16x32x32")
    parser.add_argument("--batch", type=int, help="by default 256")
    parser.add_argument("--compile", choices=list(COMPILE), help="mode of bare step and commands, by default 'default'")
    parser.add_argument("--steps", type=int, help="of each command, by default 320")
    parser.add_argument("--warmup_steps", type=int, help="the first ones, which are not timed, by default 110")
    add_options(parser, tiny="other defaults: tiny models, batch 2, not compiled")
    arguments = parser.parse_args(argv)
    fill(arguments, TINY_DEFAULTS if arguments.tiny else DEFAULTS)
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """One line and exit code 1 for what cannot run."""
    check_spellings(arguments.models)
    mixed = any(family_of(read_spelling(spelling)[0]).size == "img_size" for spelling in arguments.models)
    if arguments.batch < 1 or (mixed and arguments.batch % 2):
        raise SystemExit(f"error: --batch must be even for classifiers, whose images are mixed, got {arguments.batch}.")
    if not 0 < arguments.warmup_steps < arguments.steps - 1:
        raise SystemExit("error: --warmup_steps must be positive and less than --steps - 1.")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    check_arguments(arguments)
    arguments.device = open_device(arguments.device)
    facts = environment(arguments.device) | {"timm": timm.__version__}
    path = results_path(arguments, "training")
    rows = []
    for spelling in arguments.models:
        found = measure(spelling, arguments)
        print_table(found, SHOWN)
        rows += [row | facts for row in found]
        write_csv(path, rows)


if __name__ == "__main__":
    main()
