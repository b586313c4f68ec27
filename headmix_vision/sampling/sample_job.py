"""The job of sampling, from a request to a folder of samples; it can be shared by processes, and goes on."""

import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headmix_vision
from headmix_vision.console.processes import Processes, default_device, open_device, process_numbers
from headmix_vision.console.terminal import progress, say
from headmix_vision.data.batches import deal_batches
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.reading import check_memory
from headmix_vision.runs.checkpoints import trainer_of
from headmix_vision.runs.pipelines import load_pipeline
from headmix_vision.sampling.folder import GRID, IMAGES, MAX_SAMPLES, NPZ, SampleFolder, draw_grid, draw_strips
from headmix_vision.sampling.planning import (
    SamplingPlan,
    make_plan,
    named,
    run_name,
    sample_batch,
    size_text,
    warn_of_unlearned,
)
from headmix_vision.sampling.sample_request import SampleRequest

GRID_IMAGES, GRID_PIXELS = 100, 2**26  # at most, in the picture of many samples
GRID_STRIPS = 12  # clips at most, in the picture of their frames
_WRITERS = 8  # threads: PNGs are encoded beside each other, and each file waits for the disk
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Sampled:
    """Result of `sample`.

    Args:
        folder: The folder of samples.
        kind: What they are: `images` or `videos`.
        drawn: Number of samples that were drawn, or would be in a dry run.
        kept: Number of samples that were there.
        plan: Description of what would be drawn; None after a job that is done.
    """

    folder: Path
    kind: str
    drawn: int
    kept: int
    plan: str | None = None

    def __str__(self) -> str:
        if self.plan is not None:
            return self.plan
        kept = f", {self.kept} were there" if self.kept else ""
        return f"drew {self.drawn} {self.kind}{kept} · {self.folder / IMAGES} · grid {self.folder / GRID}"


def sample(request: SampleRequest) -> Sampled | None:
    """Draw images or videos into a folder; the same request again continues a half-finished folder.

    Returns:
        What was drawn; None in processes other than the first.

    Raises:
        InputError: Wrong input, before anything is written.
    """
    processes = process_numbers()
    leads = processes.rank == 0
    processes.connect()
    with processes.agreed():
        check_counts(1, MAX_SAMPLES, **{"--num": request.num, "--batch-size": request.samples_at_once})
        check_counts(1, NUM_TIMESTEPS, **{"--steps": request.steps})
        device = open_device(request.device or default_device(), processes.local_rank)
        pipeline, about = load_pipeline(request.model, checkpoint=request.checkpoint, raw=request.raw, vae=request.vae)
        if pipeline.samples_are != request.kind:
            other = pipeline.samples_are
            raise InputError(f"{request.model} makes {other}, not {request.kind}: use `headmix sample {other}`")
        if request.dtype != "float32":
            # Not `pipeline.to(dtype)`, which casts the autoencoder too; the model's own `to` warns without need.
            torch.nn.Module.to(pipeline.transformer, DTYPES[request.dtype])
        plan = make_plan(pipeline, request)
        settings = plan.settings() | _identity(pipeline, about, request.dtype)
        folder = _open_folder(plan, request)
        if leads:
            folder.check(settings, request.num)
            warn_of_unlearned(pipeline, plan.clips)
            if "checkpoint" in about and (trainer := trainer_of(Path(about["checkpoint"]))):
                note = f"note: {trainer} is still training {request.model}, the samples are of step {about['step']}"
                say(note)
        pipeline.to(device)
        pipeline.set_progress_bar_config(disable=True)
        shape = _check_memory(pipeline, plan, request)
        if request.dry_run:
            missing, _ = find_missing(folder, request, shape)
            plan_text = describe(request, plan, about, folder, missing, device, processes)
            return (
                Sampled(folder.path, request.kind, len(missing), request.num - len(missing), plan_text)
                if leads
                else None
            )

    metadata = {
        **{name: value for name, value in about.items() if name not in settings},
        "autoencoder": about["vae"] and about["vae"]["source"],
        "settings": settings,
        "batch_size": request.samples_at_once,
        "processes": processes.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions(),
    }
    with ExitStack() as stack:
        with processes.agreed():
            if leads:
                stack.enter_context(folder.lock())
            state = _take_over(folder, settings, request, shape) if leads else None
        missing, complete = processes.same(state)
        if not complete:
            _draw(pipeline, plan, folder, missing, processes, metadata, request)
    return Sampled(folder.path, request.kind, len(missing), request.num - len(missing)) if leads else None


def _open_folder(plan: SamplingPlan, request: SampleRequest) -> SampleFolder:
    path = request.out or Path("samples") / run_name(request.model)
    return SampleFolder(path) if plan.clips is None else SampleFolder(path, plan.clips.frame_rate, request.format)


def _check_memory(pipeline: Any, plan: SamplingPlan, request: SampleRequest) -> tuple[int, ...]:
    """Return the shape of a sample, channels last; refuse batches that are too large for the memory."""
    batch = f"--batch-size {request.samples_at_once}"
    size = pipeline.image_size(*plan.size or (None, None))
    clips = plan.clips
    given = {"size": size_text(request.size), "frames": request.frames}
    with named(", ".join([batch, *(f"--{name} {value}" for name, value in given.items() if value)])):
        frames = None if clips is None else clips.window or clips.num_frames
        for guidance in plan.guidances():
            pipeline.check_memory(request.samples_at_once, guidance, *size, frames)
    shape = (*(() if clips is None else (clips.num_frames,)), *size, pipeline.image_channels)
    check_memory(2 * request.samples_at_once * math.prod(shape), batch)
    return shape


def _take_over(
    folder: SampleFolder, settings: dict[str, Any], request: SampleRequest, shape: tuple[int, ...]
) -> tuple[list[int], bool]:
    """Look into the folder when nobody else writes there: which samples are missing, and is nothing to be done?"""
    folder.check(settings, request.num)
    missing, damaged = find_missing(folder, request, shape)
    for index in sorted(damaged):
        say(f"{folder.sample_path(index)} is damaged and is drawn again")
    return missing, not missing and folder.is_complete(request.num, request.npz)


def _draw(
    pipeline: HeadMixDiTPipeline,
    plan: SamplingPlan,
    folder: SampleFolder,
    missing: list[int],
    processes: Processes,
    metadata: dict[str, Any],
    request: SampleRequest,
) -> None:
    done = request.num - len(missing)
    # one of fewer samples must not stay beside them
    npz = request.npz or (folder.path / NPZ).is_file()
    with (
        progress("sampling", request.num, request.kind, done=done, enabled=processes.rank == 0) as advance,
        _memory_errors(request),
    ):
        draw_samples(
            pipeline,
            plan,
            folder,
            request.num,
            missing,
            request.samples_at_once,
            processes,
            metadata,
            lambda count: advance(count * processes.world_size),  # assuming that all are equally fast
            npz,
        )


def draw_samples(
    pipeline: HeadMixDiTPipeline,
    plan: SamplingPlan,
    folder: SampleFolder,
    num: int,
    missing: Sequence[int],
    batch_size: int,
    processes: Processes,
    metadata: dict[str, Any],
    progress: Callable[[float], None],
    npz: bool = False,
) -> None:
    """Draw the missing ones of the samples 0 to `num` - 1, then grid, metadata and npz.

    Every batch the network sees has `batch_size` samples, the last one filled up: with the same batch size a sample is
    equal bit for bit however many are missing and however many processes share them. With another batch size float32
    sums may run in another order, which moves values by some 1e-6 before they are rounded to 256 levels.

    Nothing is written before every process has drawn its first batch: settings that fail leave no folder behind.

    Args:
        pipeline: The generator, with its scheduler set.
        plan: What to draw.
        folder: Where to, already checked, and locked by the first process.
        num: Number of samples.
        missing: Samples to draw, on all processes the same.
        batch_size: Samples at a time and process.
        processes: Who shares the work.
        metadata: What `metadata.json` says, settings included.
        progress: Told the number of samples done since the last call, fractions included.
        npz: Also write `samples.npz`.

    Raises:
        NonFiniteSamplesError: If a sample became infinite or not a number; those before it are kept.
    """
    metadata = {**metadata, "num": num}

    passes = 1 if plan.clips is None else plan.clips.count_passes(pipeline)

    def draw(indices: list[int]) -> tuple[list[int], np.ndarray]:
        def count_step(pipe: Any, step: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            progress(len(indices) / len(pipe.scheduler.timesteps) / passes)
            return tensors

        filled = indices + [indices[-1]] * (batch_size - len(indices))
        return indices, sample_batch(pipeline, plan, filled, callback_on_step_end=count_step)[: len(indices)]

    drawn = map(draw, deal_batches(missing, batch_size, processes.rank, processes.world_size))
    first = list(islice(drawn, 1))
    processes.wait()
    if processes.rank == 0:
        folder.remove_leftovers()
        folder.write_metadata({**metadata, "complete": False})
    processes.wait()
    with ThreadPoolExecutor(_WRITERS) as pool:
        written: Iterable[None] = ()
        for indices, images in chain(first, drawn):
            list(written)  # of the batch before, while this one was drawn
            written = pool.map(folder.write_sample, indices, images)
        list(written)
    processes.wait()
    if processes.rank == 0:
        finish(pipeline, plan, folder, num, metadata, npz)
    processes.wait()


def finish(
    pipeline: HeadMixDiTPipeline,
    plan: SamplingPlan,
    folder: SampleFolder,
    num: int,
    metadata: dict[str, Any],
    npz: bool,
) -> None:
    """Write the grid, the npz file if asked for, and at last the metadata of a complete folder."""
    labels = plan.labels(range(num))
    folder.complete_samples(num)
    count = min(num, GRID_IMAGES, max(1, GRID_PIXELS // math.prod(folder.read_sample(0).shape[:-1])))
    names = pipeline.config.class_names
    captions = None if labels is None else [_caption(names, label) for label in labels[:count]]
    columns = len(plan.classes) if plan.classes is not None and 4 <= len(plan.classes) <= 10 else None
    title = f"{metadata.get('name', metadata['model'])}, {metadata['weights']} weights\n{plan.describe()}"
    shown = np.stack([folder.read_sample(i) for i in range(count)])
    if folder.frame_rate is not None:
        title += f", {shown.shape[1]} frames, {folder.frame_rate:g} a second"
        folder.write_moving_grid(draw_grid(shown, captions, title, columns))
        folder.write_grid(draw_strips(shown[:GRID_STRIPS], captions, title, folder.frame_rate))
    else:
        folder.write_grid(draw_grid(shown, captions, title, columns))
    if npz:
        folder.write_npz(num, labels)
    folder.write_metadata({**metadata, "complete": True})


def _caption(names: list[str] | None, label: int) -> str:
    return names[label] if names and label < len(names) else str(label)


def find_missing(folder: SampleFolder, request: SampleRequest, shape: tuple[int, ...]) -> tuple[list[int], set[int]]:
    """List the samples to draw, and which of them are there but damaged.

    Raises:
        InputError: If the disk cannot take them.
    """
    existing = folder.existing()
    damaged = folder.damaged(existing, shape)
    missing = sorted(set(range(request.num)) - (existing - damaged))
    folder.check_space(
        folder.count_files(missing, request.num, shape), request.num * math.prod(shape) if request.npz else 0
    )
    return missing, damaged


def describe(
    request: SampleRequest,
    plan: SamplingPlan,
    about: dict[str, Any],
    folder: SampleFolder,
    missing: list[int],
    device: torch.device,
    processes: Processes,
) -> str:
    """Return what would be drawn, in three lines."""
    there = request.num - len(missing)
    rounds = len(deal_batches(missing, request.samples_at_once, 0, processes.world_size))
    classes = "no classes" if plan.classes is None else f"{len(set(plan.classes))} classes"
    size = "x".join(map(str, plan.size or ()))
    frames = "" if plan.clips is None else f"{plan.clips.num_frames} frames of "
    return (
        f"would draw {len(missing)} {request.kind} of {frames}{size} pixels, {classes}, into {folder.path}"
        + (f" ({there} are there)" if there else "")
        + f"\nby {about.get('name', about['model'])}, {about['weights']} weights, {plan.describe()}, {request.dtype}"
        f"\nin batches of {request.samples_at_once}, {rounds} for each of {processes.world_size} processes, on {device}"
    )


def _identity(pipeline: HeadMixDiTPipeline, about: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Collect what pixels depend on besides the plan; a folder holds samples of one such set."""
    scheduler = json.loads(pipeline.scheduler.to_json_string())
    autoencoder = about["vae"] and {name: value for name, value in about["vae"].items() if name != "source"}
    return {
        **{name: about[name] for name in ("weights_sha256", "architecture", "objective")},
        "vae": autoencoder,
        "scheduler_config": {name: value for name, value in scheduler.items() if not name.startswith("_")},
        "dtype": dtype,
    }


@contextmanager
def _memory_errors(request: SampleRequest) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch has a class for it on GPUs alone
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise InputError(f"the memory does not suffice for --batch-size {request.samples_at_once}: lower it") from None


def versions() -> dict[str, str]:
    """Collect the versions of what the pixels may depend on."""
    packages = {name: version(name) for name in ("torch", "diffusers", "timm", "numpy")}
    return {"headmix_vision": headmix_vision.__version__, "python": platform.python_version(), **packages}
