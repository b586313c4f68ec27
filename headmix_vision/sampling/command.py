"""The command line of `sample.py`."""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import headmix_vision
from headmix_vision.diffusion.denoising import CHANNELS, Guidance
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.diffusion.schedulers import SCHEDULER_NAMES, scheduler_name
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.runs.pipelines import load_pipeline
from headmix_vision.sampling.draw import Processes, SamplingPlan, draw_samples
from headmix_vision.sampling.folder import SampleFolder

DEFAULT_GUIDANCE = 1.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    parser = argparse.ArgumentParser(description="Draw samples from a trained generator.")
    images = parser.add_subparsers(dest="command", required=True).add_parser(
        "images",
        help="images of given classes",
        description="Draw images into a folder. Sample i depends on the seed and on i alone; the same command again"
        " continues a half-finished folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = images.add_argument
    add("--model", type=Path, required=True, help="run directory, .ckpt file or directory of an exported pipeline")
    add("--checkpoint", default="last", help="of a run directory: last, or a file")
    add("--raw", action="store_true", help="the weights being trained, not their moving average")
    add("--num", type=int, default=64, help="number of images")
    add("--classes", help="labels that take turns, such as 0,3,7, or balanced: all of them (default: balanced)")
    add("--steps", type=int, default=50, help="sampling steps")
    add("--scheduler", help=f"{', '.join(SCHEDULER_NAMES)} (default: that of the model)")
    add(
        "--guidance",
        type=float,
        help=f"scale, 1 for none (default: {DEFAULT_GUIDANCE}, or 1 if the model has no choice)",
    )
    add("--guidance-interval", default="0,1", help="noise levels within which guidance acts, 0 is data, 1 noise")
    add("--guidance-channels", choices=CHANNELS, default="all", help="channels that are guided")
    add("--size", help="height,width in pixels, or one number (default: that of training)")
    add("--seed", type=int, default=0, help="seed of all samples")
    add("--batch-size", type=int, default=64, help="images at a time and process")
    add("--out", type=Path, help="folder to write (default: samples/<name of the model>)")
    add("--npz", action="store_true", help="also write samples.npz, as ADM's evaluation takes it")
    add("--vae", help="another autoencoder than the recorded one: directory or hub id")
    add("--device", help="for example cuda:1 (default: a GPU if there is one)")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="type of the network's weights")
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong input ends the process with one line and exit status 2."""
    options = build_parser().parse_args(args)
    try:
        with one_line_errors():
            sample_images(options)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues", file=sys.stderr)
        sys.exit(130)


def sample_images(options: argparse.Namespace) -> None:
    """Draws the images that the options ask for.

    Raises:
        InputError: For wrong input, before anything is written.
    """
    for name in ("num", "steps", "batch_size"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.steps > NUM_TIMESTEPS:
        raise InputError(f"--steps must be at most {NUM_TIMESTEPS}, got {options.steps}")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    pipeline, about = load_pipeline(options.model, checkpoint=options.checkpoint, raw=options.raw, vae=options.vae)
    plan = make_plan(pipeline, options)
    out = options.out or Path("samples") / (
        options.model.parent.name if options.model.suffix == ".ckpt" else options.model.name
    )
    folder = SampleFolder(out)
    settings = {"weights_sha256": about["weights_sha256"], "vae": about.get("vae"), "dtype": options.dtype}
    folder.check({**plan.settings(), **settings}, options.num)

    device = device_of(int(os.environ.get("LOCAL_RANK", rank)), options.device)
    pipeline.to(device)
    if options.dtype != "float32":
        # Not `pipeline.to(dtype)`, which casts the autoencoder too; the model's own `to` warns without need.
        torch.nn.Module.to(pipeline.transformer, DTYPES[options.dtype])
    pipeline.set_progress_bar_config(disable=True)
    processes = Processes(rank, world_size)
    metadata = {
        **about,
        "settings": settings,
        "batch_size": options.batch_size,
        "processes": world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions(),
    }
    done = len(folder.existing())
    with progress_bar(options.num, done, rank, world_size) as progress:
        drawn = draw_samples(
            pipeline, plan, folder, options.num, options.batch_size, processes, metadata, progress, options.npz
        )
    if rank == 0:
        kept = f", {options.num - drawn} were there" if drawn < options.num else ""
        print(f"drew {drawn} images{kept} · {out / 'images'} · grid {out / 'grid.png'}")


def make_plan(pipeline: HeadMixDiTPipeline, options: argparse.Namespace) -> SamplingPlan:
    """Makes the plan that the options describe; sets the pipeline's scheduler.

    Raises:
        InputError: If an option does not fit the model.
    """
    model = pipeline.transformer
    if pipeline.vae is None and model.in_channels not in (1, 3):
        raise InputError(
            f"{options.model} makes latents of {model.in_channels} channels: give their autoencoder by --vae"
        )
    classes = parse_classes(options.classes, model.num_classes)
    scale = options.guidance
    if scale is None:
        scale = DEFAULT_GUIDANCE if model.has_null_class else 1.0
    guidance = Guidance(
        scale, _pair(options.guidance_interval, float, "--guidance-interval"), options.guidance_channels
    )
    if options.scheduler is not None:
        pipeline.set_scheduler(options.scheduler)
    height, width = (None, None) if options.size is None else _pair(options.size, int, "--size")
    size = pipeline.image_size(height, width)
    pipeline.check_labels(None if classes is None else list(classes), 1 if classes is None else None, guidance)
    return SamplingPlan(options.seed, classes, options.steps, scheduler_name(pipeline.scheduler), guidance, size)


def parse_classes(text: str | None, num_classes: int) -> tuple[int, ...] | None:
    """Reads the labels of the option `--classes`: `balanced` (all take turns) or numbers with commas.

    Raises:
        InputError: For anything else, a label out of range, or classes of an unconditional model.
    """
    if num_classes == 0:
        if text is not None:
            raise InputError(f"--classes {text} given, but the model is unconditional")
        return None
    if text is None or text == "balanced":
        return tuple(range(num_classes))
    try:
        labels = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--classes must be 'balanced' or numbers such as 0,3,7, got {text!r}") from None
    bad = [label for label in labels if not 0 <= label < num_classes]
    if bad:
        raise InputError(f"class label {bad[0]} is out of range: the model takes 0 to {num_classes - 1}")
    return labels


def _pair(text: str, kind: type, option: str) -> tuple[Any, Any]:
    parts = text.split(",")
    try:
        values = [kind(part) for part in parts]
    except ValueError:
        values = []
    if option == "--size" and len(values) == 1:
        values *= 2
    if len(values) != 2:
        raise InputError(f"{option} must be two numbers with a comma, got {text!r}")
    return values[0], values[1]


@contextmanager
def progress_bar(num: int, done: int, rank: int, world_size: int) -> Iterator[Callable[[float], None]]:
    """Shows a bar with the time left, on the first process; it counts for all, assuming that they are equally fast."""
    if rank:
        yield lambda samples: None
        return
    columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("sampling", total=num, completed=done)
        total = float(done)

        def advance(samples: float) -> None:
            nonlocal total
            total = min(total + samples * world_size, num)
            bar.update(task, completed=round(total, 6) if total < num else num)

        yield advance


def versions() -> dict[str, str]:
    """Collects the versions of what the pixels may depend on."""
    packages = {name: version(name) for name in ("torch", "diffusers", "timm", "numpy")}
    return {"headmix_vision": headmix_vision.__version__, "python": platform.python_version(), **packages}


def device_of(rank: int, name: str | None) -> torch.device:
    """Chooses the device of a process: the one asked for, else its GPU, else the CPU."""
    if name is not None:
        return torch.device(name)
    return torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
