"""Sampling into a folder: batch after batch, on any number of processes, resumable."""

import platform
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import headmix_vision
from headmix_vision.diffusion.contact_sheet import draw_grid, to_uint8
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.sampling.folder import SampleFolder
from headmix_vision.sampling.plan import SamplingPlan, batches

GRID_IMAGES = 100
_LONG = timedelta(days=7)  # a process may have much less to do than another


class Processes:
    """The processes of torchrun, or the only one."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        if world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_LONG)

    def wait(self) -> None:
        """Wait for the others."""
        if self.world_size > 1:
            dist.barrier()

    def same(self, value: Any) -> Any:
        """The value of the first process, on all."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values)
        return values[0]


def sample_batch(pipeline: HeadMixDiTPipeline, plan: SamplingPlan, indices: list[int], **options: Any) -> np.ndarray:
    """Draw samples by their indices: uint8 [N, H, W, channels]."""
    guidance = plan.guidance
    (images,) = pipeline(
        plan.labels(indices),
        len(indices),
        guidance_scale=guidance.scale,
        guidance_interval=guidance.interval,
        guidance_channels=guidance.channels,
        num_inference_steps=plan.steps,
        height=plan.size[0],
        width=plan.size[1],
        generator=[plan.generator(index) for index in indices],
        output_type="np",
        return_dict=False,
        **options,
    )
    return to_uint8(images)


def draw_samples(
    pipeline: HeadMixDiTPipeline,
    plan: SamplingPlan,
    folder: SampleFolder,
    num: int,
    batch_size: int,
    processes: Processes,
    metadata: dict[str, Any],
    progress: Callable[[float], None],
    npz: bool = False,
) -> int:
    """Draw the samples 0 to `num` - 1 that are not there yet, then grid, metadata and npz.

    Every batch the network sees has `batch_size` samples, the last one filled up: with the same batch size a sample is
    equal bit for bit however many are missing and however many processes share them. With another batch size float32
    sums may run in another order, which moves values by some 1e-6 before they are rounded to 256 levels.

    Args:
        pipeline: The generator, with its scheduler set.
        plan: What to draw.
        folder: Where to, already checked.
        num: Number of samples.
        batch_size: Samples at a time and process.
        processes: Who shares the work.
        metadata: What `metadata.json` says beside the settings of the plan.
        progress: Told the number of samples done since the last call, fractions included.
        npz: Also write `samples.npz`.

    Returns:
        Number of samples drawn by all processes.
    """
    missing = processes.same(sorted(set(range(num)) - folder.existing()))
    metadata = {**metadata, "num": num, "settings": plan.settings() | metadata["settings"]}
    if processes.rank == 0:
        folder.remove_leftovers()
        folder.write_metadata({**metadata, "complete": False})
    processes.wait()
    total_steps = 0

    def count_step(pipe: Any, step: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        progress(len(indices) / total_steps)
        return tensors

    for indices in batches(missing, batch_size, processes.rank, processes.world_size):
        filled = indices + [indices[-1]] * (batch_size - len(indices))
        total_steps = evaluations(pipeline, plan.steps)
        images = sample_batch(pipeline, plan, filled, callback_on_step_end=count_step)
        for index, pixels in zip(indices, images[: len(indices)], strict=True):
            folder.write_image(index, pixels)
    processes.wait()
    if processes.rank == 0:
        finish(pipeline, plan, folder, num, metadata, npz)
    processes.wait()
    return len(missing)


def evaluations(pipeline: HeadMixDiTPipeline, steps: int) -> int:
    """How often the scheduler calls back in so many steps; Heun's method takes two evaluations for a step."""
    return 2 * steps - 1 if type(pipeline.scheduler).__name__ == "FlowMatchHeunDiscreteScheduler" else steps


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
    count = min(num, GRID_IMAGES)
    names = pipeline.config.class_names
    captions = None if labels is None else [names[label] if names else str(label) for label in labels[:count]]
    columns = len(plan.classes) if plan.classes is not None and 4 <= len(plan.classes) <= 10 else None
    interval = "" if plan.guidance.interval == (0.0, 1.0) else f" within {plan.guidance.interval}"
    title = (
        f"{metadata.get('name', metadata['model'])}, {metadata['weights']} weights\n"
        f"{plan.scheduler}, {plan.steps} steps, guidance {plan.guidance.scale:g}{interval}, seed {plan.seed}"
    )
    folder.write_grid(draw_grid(np.stack([folder.read_image(i) for i in range(count)]), captions, title, columns))
    if npz:
        folder.write_npz(num, labels)
    folder.write_metadata({**metadata, "complete": True})


def versions() -> dict[str, str]:
    """Versions of what the pixels may depend on."""
    packages = {name: version(name) for name in ("torch", "diffusers", "timm", "numpy")}
    return {"headmix_vision": headmix_vision.__version__, "python": platform.python_version(), **packages}


def device_of(rank: int, name: str | None) -> torch.device:
    """The device of a process: the one asked for, else its GPU, else the CPU."""
    if name is not None:
        return torch.device(name)
    return torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
