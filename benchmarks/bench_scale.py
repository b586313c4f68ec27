"""Training on several GPUs of a host: images per second, peak memory and losses, by how the weights are kept.

    python -m benchmarks.bench_scale                        # deit_mhla_base and dit_mhla_xl_2 on 1 and 2 GPUs
    python -m benchmarks.bench_scale --runs runs/scale      # keeps what each run found: a second call goes on
    python -m benchmarks.bench_scale --ways one ddp         # some of the ways that are below
    python -m benchmarks.bench_scale --losses               # 200 steps of each at one global batch, against one GPU
    python -m benchmarks.bench_scale --checkpointing --models dit_mhla_xl_2 --batch 16 --ways ddp fsdp2    # memory
    python -m benchmarks.bench_scale --models 'dit_video_mhla_b_2:block_grid=[3,5,2],cpe=True,depth=8' --batch 1 \
        --size 21x60x100 --ways one tokens                  # generators: the tokens of each sample on both
    python -m benchmarks.bench_scale --device cpu --tiny    # tries the script itself where there is no GPU

Each line is a run of the command of its own, timed as in bench_training.py: data that cost nothing, averaged weights,
no validation, each block compiled by itself. The batch of a GPU is the same in all of them, so that the ideal ratio is
the number of GPUs.

`one`: all on each GPU, no other. `ddp`: all on each GPU (DistributedDataParallel). `fsdp2`: one copy of weights,
gradients, averages and optimizer state for all GPUs. `kept`: the same, but blocks that were gathered for the forward
pass are kept for the backward pass. `hybrid`: as fsdp2 with two copies, each spread over half of the GPUs. `tokens`:
as ddp, but all GPUs share the tokens of each sample.

Losses are means over the GPUs, in float32 without anything random. One GPU computes the parts of the batch one by one,
so that all round alike: a rounded bit becomes a difference of 1 in a loss of 4 within 70 steps (notes/scale.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks import bench_training
from benchmarks.bench_training import Clock
from headmix_lab.measuring import REPOSITORY, add_options, environment, fill, open_device, results_path, write_csv
from headmix_lab.model_families import family_of, read_size, read_spelling
from headmix_lab.scripts import run_python
from headmix_lab.tables import print_table
from headmix_vision.files.writing import atomic_path

SHOWN = dict.fromkeys(("model", "batch", "what", "gpus"), "")
SHOWN_LOSSES = SHOWN | dict.fromkeys(("first_loss", "last_loss", "largest_difference"), ".5g")
SHOWN |= {"imgs_per_s": ".0f", "ratio": ".2f", "peak_gib": ".1f"}
DEFAULTS: dict[str, Any] = {
    "models": ["deit_mhla_base", "dit_mhla_xl_2"],
    "sizes": {"input_size": 32, "img_size": 224},
    "batches": {"input_size": 64, "img_size": 256},
    "loss_batch": 64,
    "compile": "blocks",  # the graph of all of DiT-XL/2 takes minutes, and fsdp2 compiles blocks anyway
    "steps": 70,
    "warmup_steps": 30,
    "loss_steps": 200,
}
TINY_DEFAULTS: dict[str, Any] = {
    "models": ["deit_mhla_tiny:depth=1,embed_dim=24"],
    "sizes": {"input_size": 8, "img_size": 64},
    "batches": {"input_size": 4, "img_size": 4},
    "loss_batch": 4,
    "compile": "none",
    "steps": 5,
    "warmup_steps": 2,
    "loss_steps": 4,
}
STRATEGIES = {
    "one": "auto",
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "kept": "headmix_vision.training.sharding.ShardedStrategy",
    "hybrid": "headmix_vision.training.sharding.ShardedStrategy",
    "tokens": "ddp",
}
WAYS = [what for what in STRATEGIES if what != "tokens"]
# The noise of generators is drawn for each process, so that their losses cannot be compared: classifiers alone.
NOTHING_RANDOM = ["--model.mixup.mixup_alpha", 0, "--model.mixup.cutmix_alpha", 0, "--trainer.precision", "32-true"]
Row = dict[str, Any]


class Recorder(Clock):
    """A clock that also keeps the mean loss of each step over the processes."""

    def __init__(self, warmup_steps: int, *, losses: bool) -> None:
        super().__init__(warmup_steps)
        self.losses: list[float] | None = [] if losses else None
        self._parts: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.losses is not None:
            self._parts.append(trainer.strategy.reduce(pl_module.step_loss.clone()))
            if len(self._parts) == trainer.accumulate_grad_batches:
                self.losses.append(float(torch.stack(self._parts).mean()))
                self._parts.clear()


def run_case(case: Row, arguments: argparse.Namespace) -> None:
    """Train once, in all processes of a case; the first one writes what it found."""
    recorder = Recorder(arguments.warmup_steps, losses=case["losses"])
    strategy: list[object] = ["--trainer.devices", case["gpus"], "--trainer.strategy", STRATEGIES[case["what"]]]
    strategy += ["--model.grad_checkpointing", str(arguments.checkpointing).lower()]
    if case["what"] == "kept":
        strategy += ["--trainer.strategy.reshard_after_forward", "false"]
    if case["what"] == "hybrid":
        strategy += ["--trainer.strategy.shard_size", max(1, case["gpus"] // 2)]
    if case["what"] == "tokens":
        strategy += ["--model.context_parallel", case["gpus"]]
    if case["losses"]:
        strategy += [*NOTHING_RANDOM, "--trainer.max_steps", arguments.loss_steps]
        strategy += ["--data.batch_size", arguments.batch // case["gpus"]]
        strategy += ["--trainer.accumulate_grad_batches", arguments.gpus if case["what"] == "one" else 1]
    bench_training.train(case["model"], "averaging", Path(case["folder"]), arguments, recorder, strategy)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        peak = torch.cuda.max_memory_allocated() / 2**30 if arguments.device.type == "cuda" else None
        found = {"step_s": recorder.step_s, "peak_gib": peak, "losses": recorder.losses}
        (Path(case["folder"]) / "found.json").write_text(json.dumps(found))


def measure(model: str, what: str, gpus: int, arguments: argparse.Namespace, argv: Sequence[str]) -> Row:
    """Start a case in processes of its own and read what it found, now or in an earlier call."""
    case = {"model": model, "what": what, "gpus": gpus, "losses": arguments.losses, "batch": arguments.batch}
    names = ("gpus", "size", "compile", "checkpointing", "steps", "warmup_steps", "loss_steps")
    settings = [getattr(arguments, name) for name in names]
    name = f"{what}-{gpus}-{hashlib.sha256(repr((case, settings)).encode()).hexdigest()[:8]}.json"
    with tempfile.TemporaryDirectory() as folder:
        kept = (arguments.runs or Path(folder)) / name
        if not kept.exists():
            given = json.dumps(case | {"folder": f"{folder}/run"})
            run_python(["-m", "benchmarks.bench_scale", *argv, "--case", given], cwd=REPOSITORY)
            with atomic_path(kept) as path:
                path.write_text((Path(folder) / "run" / "found.json").read_text())
        found = json.loads(kept.read_text())
    return {"model": model, "size": arguments.size or "", "batch": arguments.batch, "what": what, "gpus": gpus, **found}


def cases_on(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """The ways that are asked for, and on how many GPUs; on one there is but one."""
    counts = {what: 1 if what == "one" else arguments.gpus for what in STRATEGIES}
    return [(what, n) for what, n in counts.items() if what in arguments.ways and (n > 1 or what == "one")]


def speed_rows(model: str, arguments: argparse.Namespace, argv: Sequence[str]) -> Iterator[Row]:
    """Images per second on one GPU and on all, and the memory of the first one."""
    alone = 0.0
    for what, gpus in cases_on(arguments):
        row = measure(model, what, gpus, arguments, argv)
        row["imgs_per_s"] = arguments.batch * (1 if what == "tokens" else gpus) / row["step_s"]
        alone = alone or row["imgs_per_s"]
        del row["losses"]
        yield row | {"ratio": row["imgs_per_s"] / alone}


def loss_rows(model: str, arguments: argparse.Namespace, argv: Sequence[str]) -> Iterator[Row]:
    """Losses at one global batch, compared with one GPU's losses step by step."""
    expected: list[float] = []
    for what, gpus in cases_on(arguments):
        row = measure(model, what, gpus, arguments, argv)
        losses = row.pop("losses")
        expected = expected or losses
        difference = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
        ends = {"first_loss": losses[0], "last_loss": losses[-1]}
        yield row | ends | {"largest_difference": difference, "steps": len(losses)}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="names and options as for bench_models.py")
    parser.add_argument("--gpus", type=int, default=2, help="processes of the larger runs")
    parser.add_argument("--ways", nargs="+", choices=STRATEGIES, default=WAYS, help="by default all but tokens")
    parser.add_argument("--size", type=read_size, help="latents, by default 32, or pixels, by default 224; 16x32x32")
    parser.add_argument("--batch", type=int, help="of a GPU, by default 64 latents or 256 images; in all with --losses")
    parser.add_argument("--compile", choices=bench_training.COMPILE, help="by default 'blocks'")
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks anew instead of keeping them")
    parser.add_argument("--steps", type=int, help="of each run, by default 70")
    parser.add_argument("--warmup_steps", type=int, help="the first ones, which are not timed, by default 30")
    parser.add_argument("--losses", action="store_true", help="compare losses, of classifiers")
    parser.add_argument("--loss_steps", type=int, help="by default 200")
    parser.add_argument("--runs", type=Path, help="folder that keeps what each run found, for the next call")
    add_options(parser, tiny="other defaults: a tiny model, batch 4, not compiled")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    fill(arguments, TINY_DEFAULTS if arguments.tiny else DEFAULTS)
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if arguments.case is not None:
        arguments.device, arguments.batch = open_device(arguments.device), arguments.case["batch"]
        run_case(arguments.case, arguments)
        return
    batch = arguments.batch
    arguments.batch = batch or arguments.loss_batch
    bench_training.check_arguments(arguments)
    arguments.device = open_device(arguments.device)
    if arguments.device.type == "cuda" and torch.cuda.device_count() < arguments.gpus:
        raise SystemExit(f"error: --gpus {arguments.gpus}, but there are {torch.cuda.device_count()}.")
    facts = environment(arguments.device)
    models = [m for m in arguments.models if not (arguments.losses and m.startswith("dit_"))]
    if not models or not cases_on(arguments):
        raise SystemExit(
            "error: nothing to run: --losses takes classifiers, and all --ways but one take --gpus 2 or more."
        )
    shown, rows_of = (SHOWN_LOSSES, loss_rows) if arguments.losses else (SHOWN, speed_rows)
    kinds = [option for option in ("losses", "checkpointing") if getattr(arguments, option)]
    path = results_path(arguments, "_".join(["scale", *kinds]))
    rows = []
    for model in models:
        if not arguments.losses:
            arguments.batch = batch or arguments.batches[family_of(read_spelling(model)[0]).size]
        for row in rows_of(model, arguments, list(argv if argv is not None else sys.argv[1:])):
            rows.append(row | facts)
            print_table(rows, shown)
            write_csv(path, rows)  # after each run: the next may take longer than there is time


if __name__ == "__main__":
    main()
