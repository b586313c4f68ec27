"""The command line of `headmix-sample`."""

import argparse
import json
import math
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

import headmix_vision
from headmix_vision.checks import check_counts
from headmix_vision.console.arguments import OneLineParser
from headmix_vision.console.devices import default_device, open_device
from headmix_vision.console.processes import Processes, process_numbers
from headmix_vision.console.progress import progress
from headmix_vision.data.batches import deal_batches
from headmix_vision.diffusion.denoising import CHANNELS
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.diffusion.schedulers import SCHEDULER_NAMES, SPACINGS
from headmix_vision.errors import InputError, let_signals_end, one_line_errors
from headmix_vision.files.limits import check_memory
from headmix_vision.runs.directory import trainer_of
from headmix_vision.runs.pipelines import load_pipeline
from headmix_vision.sampling.clip_folder import FORMATS, ClipFolder
from headmix_vision.sampling.clip_options import EXTEND_SAMPLES, make_clip_plan, warn_of_unlearned
from headmix_vision.sampling.draw import SamplingPlan, draw_samples
from headmix_vision.sampling.folder import GRID, IMAGES, MAX_SAMPLES, NPZ, SampleFolder
from headmix_vision.sampling.options import DEFAULT_GUIDANCE, make_plan, named, run_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    parser = OneLineParser(prog="headmix-sample", description="Draw samples from a trained generator.")
    commands = parser.add_subparsers(dest="command", required=True)
    for kind in ("images", "videos"):
        command = commands.add_parser(
            kind,
            help=f"{kind} of given classes",
            description=f"Draw {kind} into a folder. Sample i depends on the seed and on i alone; the same command"
            " again continues a half-finished folder.",
        )
        _add_options(command, kind)
        if kind == "videos":
            _add_clip_options(command)
    return parser


def _add_options(parser: argparse.ArgumentParser, kind: str) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, help="run directory, .ckpt file or directory of an exported pipeline")
    add("--checkpoint", help="of a run directory: last, or a file (last)")
    add("--raw", action="store_true", help="the weights being trained, not their moving average")
    add("--num", type=int, default=64, help=f"number of {kind} (%(default)s)")
    add("--classes", help="labels that take turns, such as 0,3,7, or balanced: all of them (balanced)")
    add("--steps", type=int, default=50, help="sampling steps (%(default)s)")
    add("--scheduler", help=f"{', '.join(SCHEDULER_NAMES)} (that of the model)")
    add("--spacing", choices=SPACINGS, help="timesteps of ddim and ddpm (ddim: trailing; ddpm: linspace, as DiT's)")
    add("--guidance", type=float, help=f"scale, 1 for none ({DEFAULT_GUIDANCE}, or 1 if the model has no choice)")
    add(
        "--guidance-interval",
        default="0,1",
        help="noise levels within which guidance acts, 0 is data, 1 noise (%(default)s)",
    )
    add("--guidance-channels", choices=CHANNELS, default="all", help="channels that are guided (%(default)s)")
    add("--size", help="height,width in pixels, or one number (that of training)")
    add("--seed", type=int, default=0, help="seed of all samples (%(default)s)")
    add(
        "--batch-size",
        type=int,
        default=64 if kind == "images" else 8,
        help=f"{kind} at a time and process (%(default)s)",
    )
    add("--out", type=Path, help="folder to write, or to go on with (samples/<name of the run>)")
    add("--npz", action="store_true", help="also write samples.npz, as ADM's evaluation takes it")
    add("--vae", help="another autoencoder than the recorded one: directory or hub id")
    add("--dry-run", action="store_true", help="open and check everything, say what would be drawn, and write nothing")
    add("--device", default=default_device(), help="for example cuda:1 (a GPU if there is one)")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="type of the network's weights (%(default)s)")


def _add_clip_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--frames", type=int, help="frames of a video (those of training); with more of them the positions go on")
    add("--fps", type=float, help="frames a second (those of training)")
    add("--first-frame", metavar="IMAGE", help="the first frame of all videos")
    add(
        "--extend",
        nargs="?",
        const=EXTEND_SAMPLES,
        metavar="CLIP",
        help="draw window by window until --frames, each going on from the last frames before it; of a clip, if given",
    )
    add("--overlap", type=int, help="frames of a window that are those before it (half of the window)")
    add(
        "--extend-guidance",
        type=float,
        help="guidance of windows that go on from frames, 0 to leave out the class (that of --guidance)",
    )
    add("--format", choices=FORMATS, default="mp4", help="files to watch, besides the lossless ones (%(default)s)")


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong input ends the process with one line and exit status 2."""
    options = build_parser().parse_args(args)
    with one_line_errors():
        try:
            with _termination_as_exception():
                sample(options)
        except (KeyboardInterrupt, Terminated) as end:
            let_signals_end()
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


def sample(options: argparse.Namespace) -> None:
    """Draws the images or videos that the options ask for.

    Raises:
        InputError: For wrong input, before anything is written.
    """
    processes = process_numbers()
    leads = processes.rank == 0
    processes.connect()
    with processes.agreed():
        for name, high in (("num", MAX_SAMPLES), ("steps", NUM_TIMESTEPS), ("batch_size", MAX_SAMPLES)):
            check_counts(1, high, **{f"--{name.replace('_', '-')}": getattr(options, name)})
        device = open_device(options.device, processes.local_rank)
        pipeline, about = load_pipeline(options.model, checkpoint=options.checkpoint, raw=options.raw, vae=options.vae)
        if pipeline.samples_are != options.command:
            other = pipeline.samples_are
            raise InputError(f"{options.model} makes {other}, no {options.command}: use `headmix-sample {other}`")
        if options.dtype != "float32":
            # Not `pipeline.to(dtype)`, which casts the autoencoder too; the model's own `to` warns without need.
            torch.nn.Module.to(pipeline.transformer, DTYPES[options.dtype])
        plan = make_plan(pipeline, options)
        if pipeline.draws_videos:
            plan = replace(plan, clips=make_clip_plan(pipeline, options, plan))
        settings = plan.settings() | _identity(pipeline, about, options.dtype)
        folder = _open_folder(plan, options)
        if leads:
            folder.check(settings, options.num)
            warn_of_unlearned(pipeline, plan.clips)
            if "checkpoint" in about and (trainer := trainer_of(Path(about["checkpoint"]))):
                note = f"note: {trainer} is still training {options.model}, the samples are of step {about['step']}"
                print(note, file=sys.stderr)
        pipeline.to(device)
        pipeline.set_progress_bar_config(disable=True)
        shape = _check_memory(pipeline, plan, options)
        if options.dry_run:
            if leads:
                describe(options, plan, about, folder, find_missing(folder, options, shape)[0], device, processes)
            return

    metadata = {
        **{name: value for name, value in about.items() if name not in settings},
        "autoencoder": about["vae"] and about["vae"]["source"],
        "settings": settings,
        "batch_size": options.batch_size,
        "processes": processes.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions(),
    }
    with ExitStack() as stack:
        with processes.agreed():
            if leads:
                stack.enter_context(folder.lock())
            state = _take_over(folder, settings, options, shape) if leads else None
        missing, complete = processes.same(state)
        if not complete:
            _draw(pipeline, plan, folder, missing, processes, metadata, options)
    if leads:
        kept = f", {options.num - len(missing)} were there" if len(missing) < options.num else ""
        print(f"drew {len(missing)} {options.command}{kept} · {folder.path / IMAGES} · grid {folder.path / GRID}")


def _open_folder(plan: SamplingPlan, options: argparse.Namespace) -> SampleFolder:
    path = options.out or Path("samples") / run_name(options.model)
    if plan.clips is None:
        return SampleFolder(path)
    assert plan.clips.frame_rate is not None
    return ClipFolder(path, plan.clips.frame_rate, options.format)


def _check_memory(pipeline: Any, plan: SamplingPlan, options: argparse.Namespace) -> tuple[int, ...]:
    """Returns the shape of a sample, channels last; refuses batches that are too large for the memory."""
    size = pipeline.image_size(*plan.size or (None, None))
    clips = plan.clips
    given = [f"--{name} {value}" for name in ("size", "frames") if (value := getattr(options, name, None)) is not None]
    with named(", ".join([f"--batch-size {options.batch_size}", *given])):
        frames = None if clips is None else clips.window or clips.num_frames
        for guidance in plan.guidances():
            pipeline.check_memory(options.batch_size, guidance, *size, frames)
    shape = (*(() if clips is None else (clips.num_frames,)), *size, pipeline.image_channels)
    check_memory(2 * options.batch_size * math.prod(shape), f"--batch-size {options.batch_size}")
    return shape


def _take_over(
    folder: SampleFolder, settings: dict[str, Any], options: argparse.Namespace, shape: tuple[int, ...]
) -> tuple[list[int], bool]:
    """Looks into the folder when nobody else writes there: which samples are missing, and is nothing to be done?"""
    folder.check(settings, options.num)
    missing, damaged = find_missing(folder, options, shape)
    for index in sorted(damaged):
        print(f"{folder.sample_path(index)} is damaged and is drawn again", file=sys.stderr)
    return missing, not missing and folder.is_complete(options.num, options.npz)


def _draw(
    pipeline: HeadMixDiTPipeline,
    plan: SamplingPlan,
    folder: SampleFolder,
    missing: list[int],
    processes: Processes,
    metadata: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    done = options.num - len(missing)
    # one of fewer samples must not stay beside them
    npz = options.npz or (folder.path / NPZ).is_file()
    with (
        progress("sampling", options.num, options.command, done=done, enabled=processes.rank == 0) as advance,
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
            npz,
        )


def find_missing(
    folder: SampleFolder, options: argparse.Namespace, shape: tuple[int, ...]
) -> tuple[list[int], set[int]]:
    """Lists the samples to draw, and which of them are there but damaged.

    Raises:
        InputError: If the disk cannot take them.
    """
    existing = folder.existing()
    damaged = folder.damaged(existing, shape)
    missing = sorted(set(range(options.num)) - (existing - damaged))
    folder.check_space(
        folder.count_files(missing, options.num, shape), options.num * math.prod(shape) if options.npz else 0
    )
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
    rounds = len(deal_batches(missing, options.batch_size, 0, processes.world_size))
    classes = "no classes" if plan.classes is None else f"{len(set(plan.classes))} classes"
    size = "x".join(map(str, plan.size or ()))
    frames = "" if plan.clips is None else f"{plan.clips.num_frames} frames of "
    print(
        f"would draw {len(missing)} {options.command} of {frames}{size} pixels, {classes}, into {folder.path}"
        + (f" ({there} are there)" if there else "")
        + f"\nby {about.get('name', about['model'])}, {about['weights']} weights, {plan.describe()}, {options.dtype}"
        f"\nin batches of {options.batch_size}, {rounds} for each of the {processes.world_size} processes, on {device}"
    )


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
def _memory_errors(options: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch has a class for it on GPUs alone
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise InputError(f"the memory does not suffice for --batch-size {options.batch_size}: lower it") from None


def versions() -> dict[str, str]:
    """Collects the versions of what the pixels may depend on."""
    packages = {name: version(name) for name in ("torch", "diffusers", "timm", "numpy")}
    return {"headmix_vision": headmix_vision.__version__, "python": platform.python_version(), **packages}
