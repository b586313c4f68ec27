"""The job of sampling, from a request to a folder of samples; it can be shared by processes, and goes on."""

import json
import math
import platform
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headmix_vision
from headmix_vision.console import default_device, open_device, progress, say
from headmix_vision.data.batches import deal_batches
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.reading import check_memory
from headmix_vision.processes import Processes, process_numbers
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


@dataclass(frozen=True)
class _Job:
    """A request with what it needs, opened and checked; nothing is written yet."""

    request: SampleRequest
    processes: Processes
    device: torch.device
    pipeline: HeadMixDiTPipeline
    about: dict[str, Any]
    plan: SamplingPlan
    folder: SampleFolder

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings that pixels depend on; a folder holds samples of one set of them."""
        about, scheduler = self.about, json.loads(self.pipeline.scheduler.to_json_string())
        autoencoder = about["vae"] and {name: value for name, value in about["vae"].items() if name != "source"}
        return {
            **self.plan.settings(),
            **{name: about[name] for name in ("weights_sha256", "architecture", "objective")},
            "vae": autoencoder,
            "scheduler_config": {name: value for name, value in scheduler.items() if not name.startswith("_")},
            "dtype": self.request.dtype,
        }

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample, channels last."""
        clips = self.plan.clips
        frames = () if clips is None else (clips.num_frames,)
        return (*frames, *self.pipeline.image_size(*self.plan.size or (None, None)), self.pipeline.image_channels)

    def metadata(self) -> dict[str, Any]:
        """Collect what `metadata.json` says of all samples."""
        versions = {name: version(name) for name in ("torch", "diffusers", "timm", "numpy")}
        return {
            **{name: value for name, value in self.about.items() if name not in self.settings},
            "autoencoder": self.about["vae"] and self.about["vae"]["source"],
            "settings": self.settings,
            "batch_size": self.request.samples_at_once,
            "processes": self.processes.world_size,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "versions": {
                "headmix_vision": headmix_vision.__version__,
                "python": platform.python_version(),
                **versions,
            },
            "num": self.request.num,
        }

    def result(self, missing: Sequence[int], plan: str | None = None) -> Sampled | None:
        """Say what was drawn, on the first process alone."""
        drawn = len(missing)
        sampled = Sampled(self.folder.path, self.request.kind, drawn, self.request.num - drawn, plan)
        return sampled if self.processes.rank == 0 else None


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
        job = _open(request, processes)
        if request.dry_run:
            missing, _ = _find_missing(job)
            return job.result(missing, _describe(job, missing))
    with ExitStack() as stack:
        with processes.agreed():
            if leads:
                stack.enter_context(job.folder.lock())
            state = _take_over(job) if leads else None
        missing, complete = processes.same(state)
        if not complete:
            _draw(job, missing)
    return job.result(missing)


def _open(request: SampleRequest, processes: Processes) -> _Job:
    """Open what a request names, and check that it fits together and into the memory."""
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
    watched = () if plan.clips is None else (plan.clips.frame_rate, request.format)
    folder = SampleFolder(request.out or Path("samples") / run_name(request.model), *watched)
    job = _Job(request, processes, device, pipeline, about, plan, folder)
    if processes.rank == 0:
        folder.check(job.settings, request.num)
        warn_of_unlearned(pipeline, plan.clips)
        if "checkpoint" in about and (trainer := trainer_of(Path(about["checkpoint"]))):
            say(f"note: {trainer} is still training {request.model}, the samples are of step {about['step']}")
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    _check_memory(job)
    return job


def _check_memory(job: _Job) -> None:
    """Refuse batches that are too large for the memory."""
    request, clips = job.request, job.plan.clips
    batch = f"--batch-size {request.samples_at_once}"
    given = {"size": size_text(request.size), "frames": request.frames}
    *_, height, width, _ = job.shape
    with named(", ".join([batch, *(f"--{name} {value}" for name, value in given.items() if value)])):
        frames = None if clips is None else clips.window or clips.num_frames
        for guidance in job.plan.guidances():
            job.pipeline.check_memory(request.samples_at_once, guidance, height, width, frames)
    check_memory(2 * request.samples_at_once * math.prod(job.shape), batch)


def _take_over(job: _Job) -> tuple[list[int], bool]:
    """Look into the folder when nobody else writes there: which samples are missing, and is nothing to be done?"""
    job.folder.check(job.settings, job.request.num)
    missing, damaged = _find_missing(job)
    for index in sorted(damaged):
        say(f"{job.folder.sample_path(index)} is damaged and is drawn again")
    return missing, not missing and job.folder.is_complete(job.request.num, job.request.npz)


def _find_missing(job: _Job) -> tuple[list[int], set[int]]:
    """List the samples to draw, and which of them are there but damaged.

    Raises:
        InputError: If the disk cannot take them.
    """
    num, folder = job.request.num, job.folder
    existing = folder.existing()
    damaged = folder.damaged(existing, job.shape)
    missing = sorted(set(range(num)) - (existing - damaged))
    folder.check_space(
        folder.count_files(missing, num, job.shape), num * math.prod(job.shape) if job.request.npz else 0
    )
    return missing, damaged


def _describe(job: _Job, missing: Sequence[int]) -> str:
    """Return what would be drawn, in three lines."""
    request, plan, about, processes = job.request, job.plan, job.about, job.processes
    there = request.num - len(missing)
    rounds = len(deal_batches(missing, request.samples_at_once, 0, processes.world_size))
    classes = "no classes" if plan.classes is None else f"{len(set(plan.classes))} classes"
    size = "x".join(map(str, plan.size or ()))
    frames = "" if plan.clips is None else f"{plan.clips.num_frames} frames of "
    return (
        f"would draw {len(missing)} {request.kind} of {frames}{size} pixels, {classes}, into {job.folder.path}"
        + (f" ({there} are there)" if there else "")
        + f"\nby {about.get('name', about['model'])}, {about['weights']} weights, {plan.describe()}, {request.dtype}"
        f"\nin batches of {request.samples_at_once}, {rounds} for each of {processes.world_size} processes, on"
        f" {job.device}"
    )


def _draw(job: _Job, missing: Sequence[int]) -> None:
    """Draw the missing samples, then grid, metadata and npz.

    Every batch the network sees has as many samples as was asked for, the last one filled up: with the same batch size
    a sample is equal bit for bit however many are missing and however many processes share them. With another batch
    size float32 sums may run in another order, which moves values by some 1e-6 before they are rounded to 256 levels.

    Nothing is written before every process has drawn its first batch: settings that fail leave no folder behind.

    Args:
        job: What to draw; the first process holds the lock of its folder.
        missing: Samples to draw, on all processes the same.

    Raises:
        NonFiniteSamplesError: If a sample became infinite or not a number; those before it are kept.
    """
    request, processes, plan, folder = job.request, job.processes, job.plan, job.folder
    batch_size, metadata = request.samples_at_once, job.metadata()
    passes = 1 if plan.clips is None else plan.clips.count_passes(job.pipeline)
    done = request.num - len(missing)
    with (
        progress("sampling", request.num, request.kind, done=done, enabled=processes.rank == 0) as advance,
        _memory_errors(request),
    ):

        def draw(indices: list[int]) -> tuple[list[int], np.ndarray]:
            def count_step(pipe: Any, step: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                steps = len(pipe.scheduler.timesteps) * passes
                advance(len(indices) * processes.world_size / steps)  # assuming that all are equally fast
                return tensors

            filled = indices + [indices[-1]] * (batch_size - len(indices))
            return indices, sample_batch(job.pipeline, plan, filled, callback_on_step_end=count_step)[: len(indices)]

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
            _finish(job, metadata)
        processes.wait()


def _finish(job: _Job, metadata: dict[str, Any]) -> None:
    """Write the grid, the npz file if asked for, and at last the metadata of a complete folder."""
    num, plan, folder = job.request.num, job.plan, job.folder
    labels = plan.labels(range(num))
    folder.complete_samples(num)
    count = min(num, GRID_IMAGES, max(1, GRID_PIXELS // math.prod(job.shape[:-1])))
    names = job.pipeline.config.class_names or []
    texts = [names[label] if label < len(names) else str(label) for label in (labels or [])[:count]]
    captions = None if labels is None else texts
    columns = len(plan.classes) if plan.classes is not None and 4 <= len(plan.classes) <= 10 else None
    title = f"{metadata.get('name', metadata['model'])}, {metadata['weights']} weights\n{plan.describe()}"
    shown = np.stack([folder.read_sample(i) for i in range(count)])
    if folder.frame_rate is not None:
        title += f", {shown.shape[1]} frames, {folder.frame_rate:g} a second"
        folder.write_moving_grid(draw_grid(shown, captions, title, columns))
        folder.write_grid(draw_strips(shown[:GRID_STRIPS], captions, title, folder.frame_rate))
    else:
        folder.write_grid(draw_grid(shown, captions, title, columns))
    if job.request.npz or (folder.path / NPZ).is_file():  # one of fewer samples must not stay beside them
        folder.write_npz(num, labels)
    folder.write_metadata({**metadata, "complete": True})


@contextmanager
def _memory_errors(request: SampleRequest) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch has a class for it on GPUs alone
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise InputError(f"the memory does not suffice for --batch-size {request.samples_at_once}: lower it") from None
