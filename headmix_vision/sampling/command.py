"""The command line of `sample.py`."""

import argparse
import json
import math
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from PIL import Image

import headmix_vision
from headmix_vision.arguments import OneLineParser
from headmix_vision.devices import open_device
from headmix_vision.diffusion.denoising import CHANNELS, Guidance
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.diffusion.schedulers import SCHEDULER_NAMES, scheduler_name
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.progress import progress
from headmix_vision.runs.directory import CHECKPOINTS
from headmix_vision.runs.pipelines import load_pipeline
from headmix_vision.sampling.draw import Processes, SamplingPlan, batches, draw_samples
from headmix_vision.sampling.folder import MAX_SAMPLES, NPZ, SampleFolder

DEFAULT_GUIDANCE = 1.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    parser = OneLineParser(description="Draw samples from a trained generator.")
    images = parser.add_subparsers(dest="command", required=True).add_parser(
        "images",
        help="images of given classes",
        description="Draw images into a folder. Sample i depends on the seed and on i alone; the same command again"
        " continues a half-finished folder.",
    )
    add = images.add_argument
    add("--model", type=Path, required=True, help="run directory, .ckpt file or directory of an exported pipeline")
    add("--checkpoint", help="of a run directory: last, or a file (last)")
    add("--raw", action="store_true", help="the weights being trained, not their moving average")
    add("--num", type=int, default=64, help="number of images (%(default)s)")
    add("--classes", help="labels that take turns, such as 0,3,7, or balanced: all of them (balanced)")
    add("--steps", type=int, default=50, help="sampling steps (%(default)s)")
    add("--scheduler", help=f"{', '.join(SCHEDULER_NAMES)} (that of the model)")
    add("--guidance", type=float, help=f"scale, 1 for none ({DEFAULT_GUIDANCE}, or 1 if the model has no choice)")
    add(
        "--guidance-interval",
        default="0,1",
        help="noise levels within which guidance acts, 0 is data, 1 noise (%(default)s)",
    )
    add("--guidance-channels", choices=CHANNELS, default="all", help="channels that are guided (%(default)s)")
    add("--size", help="height,width in pixels, or one number (that of training)")
    add("--seed", type=int, default=0, help="seed of all samples (%(default)s)")
    add("--batch-size", type=int, default=64, help="images at a time and process (%(default)s)")
    add("--out", type=Path, help="folder to write, or to go on with (samples/<name of the run>)")
    add("--npz", action="store_true", help="also write samples.npz, as ADM's evaluation takes it")
    add("--vae", help="another autoencoder than the recorded one: directory or hub id")
    add("--dry-run", action="store_true", help="open and check everything, say what would be drawn, and write nothing")
    add("--device", help="for example cuda:1 (a GPU if there is one)")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="type of the network's weights (%(default)s)")
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong input ends the process with one line and exit status 2."""
    options = build_parser().parse_args(args)
    try:
        with one_line_errors(), _termination_as_exception():
            sample_images(options)
    except (KeyboardInterrupt, Terminated) as end:
        print("\ninterrupted; the same command continues", file=sys.stderr)
        sys.exit(128 + (signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM))


class Terminated(BaseException):
    """Ends the process on SIGTERM as Ctrl-C does, so that temporary files and the lock go."""


@contextmanager
def _termination_as_exception() -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def sample_images(options: argparse.Namespace) -> None:
    """Draws the images that the options ask for.

    Raises:
        InputError: For wrong input, before anything is written.
    """
    for name, high in (("num", MAX_SAMPLES), ("steps", NUM_TIMESTEPS), ("batch_size", MAX_SAMPLES)):
        value = getattr(options, name)
        if not 1 <= value <= high:
            bound = f"at least 1, got {value}" if value < 1 else f"at most {high}, got {value}"
            raise InputError(f"--{name.replace('_', '-')} must be {bound}")
    processes = Processes()
    device = device_of(processes.local_rank, options.device)
    pipeline, about = load_pipeline(options.model, checkpoint=options.checkpoint, raw=options.raw, vae=options.vae)
    if options.dtype != "float32":
        # Not `pipeline.to(dtype)`, which casts the autoencoder too; the model's own `to` warns without need.
        torch.nn.Module.to(pipeline.transformer, DTYPES[options.dtype])
    plan = make_plan(pipeline, options)
    settings = plan.settings() | _identity(pipeline, about, options.dtype)
    out = options.out or Path("samples") / run_name(options.model)
    folder = SampleFolder(out)
    first = processes.rank == 0
    if first:
        folder.check(settings, options.num)
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    height, width = pipeline.image_size(*plan.size or (None, None))
    with _named(f"--batch-size {options.batch_size}" + (f", --size {options.size}" if options.size else "")):
        pipeline.check_memory(options.batch_size, height, width, plan.guidance)
    shape = (height, width, pipeline.image_channels)
    if options.dry_run:
        if first:
            describe(options, plan, about, folder, find_missing(folder, options, shape)[0], device, processes)
        return

    processes.connect()
    with folder.lock() if first else nullcontext():
        missing: list[int] = []
        if first:
            folder.check(settings, options.num)  # again, now that nobody else writes
            missing, damaged = find_missing(folder, options, shape)
            for index in sorted(damaged):
                print(f"{folder.sample_path(index)} is damaged and is drawn again", file=sys.stderr)
        missing, complete = processes.same(
            (missing, not missing and first and folder.is_complete(options.num, options.npz))
        )
        if not complete:
            metadata = {
                **{name: value for name, value in about.items() if name not in settings},
                "autoencoder": about["vae"] and about["vae"]["source"],
                "settings": settings,
                "batch_size": options.batch_size,
                "processes": processes.world_size,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "versions": versions(),
            }
            done = options.num - len(missing)
            with (
                progress("sampling", options.num, "images", done=done, enabled=first) as advance,
                _memory_errors(options),
            ):
                draw_samples(
                    pipeline,
                    plan,
                    folder,
                    options.num,
                    missing,
                    options.batch_size,
                    processes,
                    metadata,
                    lambda count: advance(count * processes.world_size),  # assuming that all are equally fast
                    # one of fewer samples must not stay beside them
                    options.npz or (out / NPZ).is_file(),
                )
    if first:
        kept = f", {options.num - len(missing)} were there" if len(missing) < options.num else ""
        print(f"drew {len(missing)} images{kept} · {out / 'images'} · grid {out / 'grid.png'}")


def find_missing(
    folder: SampleFolder, options: argparse.Namespace, shape: tuple[int, int, int]
) -> tuple[list[int], set[int]]:
    """Lists the samples to draw, and which of them are there but damaged.

    Raises:
        InputError: If the disk cannot take them.
    """
    existing = folder.existing()
    damaged = folder.damaged(existing, shape)
    missing = sorted(set(range(options.num)) - (existing - damaged))
    folder.check_space(len(missing), options.num * math.prod(shape) if options.npz else 0)
    return missing, damaged


def describe(
    options: argparse.Namespace,
    plan: SamplingPlan,
    about: dict[str, Any],
    folder: SampleFolder,
    missing: list[int],
    device: torch.device,
    processes: Processes,
) -> None:
    """Says what would be drawn."""
    there = options.num - len(missing)
    rounds = len(batches(missing, options.batch_size, 0, processes.world_size))
    interval = "" if plan.guidance.interval == (0.0, 1.0) else f" within {plan.guidance.interval}"
    classes = "no classes" if plan.classes is None else f"{len(set(plan.classes))} classes"
    size = "x".join(map(str, plan.size or ()))
    print(
        f"would draw {len(missing)} images of {size} pixels, {classes}, into {folder.path}"
        + (f" ({there} are there)" if there else "")
        + f"\nby {about.get('name', about['model'])}, {about['weights']} weights, {plan.scheduler}, {plan.steps} steps,"
        f" guidance {plan.guidance.scale:g}{interval}, seed {plan.seed}, {options.dtype}"
        f"\nin batches of {options.batch_size}, {rounds} for each of the {processes.world_size} processes, on {device}"
    )


def run_name(model: Path) -> str:
    """Names the run of a model: that of its directory, also for a checkpoint in there; else that of its file."""
    path = model.resolve()
    if path.suffix != ".ckpt":
        return path.name
    return path.parent.parent.name if path.parent.name == CHECKPOINTS else path.stem


def _identity(pipeline: HeadMixDiTPipeline, about: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Collects what pixels depend on besides the plan; a folder holds samples of one such set."""
    scheduler = json.loads(pipeline.scheduler.to_json_string())
    autoencoder = about["vae"] and {name: value for name, value in about["vae"].items() if name != "source"}
    return {
        **{name: about[name] for name in ("weights_sha256", "architecture", "objective")},
        "vae": autoencoder,
        "scheduler_config": {name: value for name, value in scheduler.items() if not name.startswith("_")},
        "dtype": dtype,
    }


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Names the option in an error that its value causes further down."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


@contextmanager
def _memory_errors(options: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch has a class for it on GPUs alone
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise InputError(f"the memory does not suffice for --batch-size {options.batch_size}: lower it") from None


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
    with _named(f"--guidance {scale:g}"):
        guidance = Guidance(scale)
        pipeline.check_labels(None if classes is None else list(classes), None, guidance)
    with _named(f"--guidance-interval {options.guidance_interval}"):
        guidance = replace(guidance, interval=_pair(options.guidance_interval, float, "--guidance-interval"))
    with _named(f"--guidance-channels {options.guidance_channels}"):
        guidance = replace(guidance, channels=options.guidance_channels)
        pipeline.check_labels(None if classes is None else list(classes), None, guidance)
    if options.scheduler is not None:
        pipeline.set_scheduler(options.scheduler)
    height, width = (None, None) if options.size is None else _pair(options.size, int, "--size")
    with _named(f"--size {options.size}"):
        size = pipeline.image_size(height, width)
        if math.prod(size) > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise InputError(f"Pillow reads images of at most {Image.MAX_IMAGE_PIXELS} pixels")
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
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"-?[0-9]+", part) for part in parts):
        raise InputError(f"--classes must be 'balanced' or numbers such as 0,3,7, got {text!r}")
    labels = tuple(map(int, parts))
    bad = [label for label in labels if not 0 <= label < num_classes]
    if bad:
        raise InputError(
            f"--classes {text}: class label {bad[0]} is out of range: the model takes 0 to {num_classes - 1}"
        )
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


def versions() -> dict[str, str]:
    """Collects the versions of what the pixels may depend on."""
    packages = {name: version(name) for name in ("torch", "diffusers", "timm", "numpy")}
    return {"headmix_vision": headmix_vision.__version__, "python": platform.python_version(), **packages}


def device_of(local_rank: int, name: str | None) -> torch.device:
    """Chooses the device of a process: the one asked for, else its GPU, else the CPU.

    Raises:
        InputError: If the device is not there.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        name = f"cuda:{local_rank % torch.cuda.device_count()}"
    return open_device(name)
