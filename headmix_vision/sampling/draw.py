"""Plans of images and clips, and drawing them: one batch, or all of them into a folder; shared, resumable.

N samples, T frames, H x W pixels, C channels; uint8, channels last.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from headmix_vision.console.processes import Processes
from headmix_vision.data.batches import deal_batches
from headmix_vision.data.seeding import derive_seed
from headmix_vision.diffusion.denoising import Guidance, NonFiniteSamplesError
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.sampling.contact_sheet import draw_grid, draw_strips
from headmix_vision.sampling.folder import SampleFolder

GRID_IMAGES, GRID_PIXELS = 100, 2**26  # at most, in the picture of many samples
GRID_STRIPS = 12  # clips at most, in the picture of their frames
_WRITERS = 8  # threads: PNGs are encoded beside each other, and each file waits for the disk


@dataclass(frozen=True)
class ClipPlan:
    """Length, frame rate and start of clips.

    With `window`, clips are drawn in pieces of that length; each piece begins with the last frames of the piece before,
    as clean frames. A causal network draws a clip as one piece, block by block.

    Args:
        num_frames: Frames of a clip, those of the start included.
        frame_rate: Frames a second; that of training when None.
        start: Known first frames of all clips, uint8 [T0, H, W, C]; they are frames of the samples.
        window: Frames of a piece; None for clips in one piece.
        overlap: Frames that a piece shares with those before it.
        guidance: Guidance scale of pieces that go on from known frames, and of the blocks of a causal network after as
            many frames as in training; that of the others when None.
        block: Latent frames that a causal network draws at a time; None for others.
    """

    num_frames: int
    frame_rate: float | None = None
    start: np.ndarray | None = None
    window: int | None = None
    overlap: int = 0
    guidance: float | None = None
    block: int | None = None

    def known_frames(self, pipeline: Any) -> list[int]:
        """List the number of known first frames of each piece."""
        there = 0 if self.start is None else len(self.start)
        if self.window is None:
            return [there]
        pieces = []
        while there < self.num_frames:
            known = pipeline.most_frames(min(self.overlap, there)) if there else 0
            pieces.append(known)
            there += self.window - known
        return pieces

    def count_passes(self, pipeline: Any) -> int:
        """Count the denoising passes of a clip."""
        return sum(pipeline.count_blocks(self.window or self.num_frames, n) for n in self.known_frames(pipeline))

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values for a JSON file."""
        start = self.start
        return {
            "num_frames": self.num_frames,
            "frame_rate": self.frame_rate,
            "start": None
            if start is None
            else {"frames": len(start), "sha256": hashlib.sha256(start.tobytes()).hexdigest()},
            "window": self.window,
            "overlap": self.overlap,
            "guidance": self.guidance,
            **({} if self.block is None else {"block": self.block}),
        }


@dataclass(frozen=True)
class SamplingPlan:
    """Samples 0, 1, 2, ...; sample i depends on these settings and on i alone.

    Args:
        seed: Base seed.
        classes: Labels, which take turns; None for an unconditional model.
        steps: Sampling steps.
        scheduler: Name of the scheduler; that of the model when None.
        guidance: Classifier-free guidance.
        size: Height and width of an image in pixels; those of training when None.
        clips: What clips are like; those of training when None, and nothing for images.
        spacing: Timestep spacing of ddim or ddpm; that of the scheduler when None.
    """

    seed: int
    classes: tuple[int, ...] | None
    steps: int
    scheduler: str | None
    guidance: Guidance
    size: tuple[int, int] | None
    clips: ClipPlan | None = None
    spacing: str | None = None

    def labels(self, indices: Iterable[int]) -> list[int] | None:
        """Return the labels of samples."""
        return None if self.classes is None else [self.classes[index % len(self.classes)] for index in indices]

    def generator(self, index: int) -> torch.Generator:
        """Make the random numbers of a sample; on the CPU, so that every device starts from the same noise."""
        return torch.Generator().manual_seed(derive_seed(self.seed, index))

    def guidances(self) -> list[Guidance]:
        """List the guidance of samples, and that of pieces of clips that go on from known frames, if it is another."""
        scale = None if self.clips is None else self.clips.guidance
        return [self.guidance, *([] if scale is None else [replace(self.guidance, scale=scale)])]

    def describe(self) -> str:
        """Describe in words how samples are drawn."""
        first, *known = self.guidances()
        guidance = f"guidance {first.scale:g}" + ("" if first.interval == (0.0, 1.0) else f" within {first.interval}")
        guidance += "".join(f" and {other.scale:g} where frames are known" for other in known)
        spacing = "" if self.spacing is None else f" ({self.spacing} spacing)"
        return f"{self.scheduler}{spacing}, {self.steps} steps, {guidance}, seed {self.seed}"

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values for a JSON file."""
        values = asdict(replace(self, clips=None))
        values["guidance"]["interval"] = list(self.guidance.interval)
        del values["clips"]
        clips = {} if self.clips is None else {"clips": self.clips.settings()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()} | clips


def sample_batch(
    pipeline: HeadMixDiTPipeline, plan: SamplingPlan, indices: Sequence[int], **options: Any
) -> np.ndarray:
    """Draw samples by their indices: images, uint8 [N, H, W, channels], or clips, uint8 [N, T, H, W, channels].

    Options are those of the pipeline's call.

    Raises:
        NonFiniteSamplesError: If a sample became infinite or not a number; it names the sample and the step.
    """
    guidance = plan.guidance
    height, width = plan.size or (None, None)
    options |= {
        "class_labels": plan.labels(indices),
        f"num_{pipeline.samples_are}": len(indices),
        "guidance_scale": guidance.scale,
        "guidance_interval": guidance.interval,
        "guidance_channels": guidance.channels,
        "num_inference_steps": plan.steps,
        "height": height,
        "width": width,
        "generator": [plan.generator(index) for index in indices],
    }
    try:
        if pipeline.draws_videos:
            return draw_clips(pipeline, plan.clips or ClipPlan(pipeline.clip_size()[0]), len(indices), options)
        (images,) = pipeline(output_type="np", return_dict=False, **options)
    except NonFiniteSamplesError as error:
        raise NonFiniteSamplesError([indices[place] for place in error.samples], error.when) from None
    return np.rint(images * 255).astype(np.uint8)


def draw_clips(pipeline: HeadMixDiTPipeline, clips: ClipPlan, count: int, options: dict[str, Any]) -> np.ndarray:
    """Draw clips: uint8 [N, T, H, W, C].

    Args:
        pipeline: The generator.
        clips: What they are.
        count: N.
        options: Further arguments of the pipeline's call; random numbers go on from piece to piece.
    """
    frames = None if clips.start is None else np.repeat(clips.start[None], count, axis=0)
    for known in clips.known_frames(pipeline):
        own = {}
        if clips.guidance is not None and (known or clips.block):
            own = {"guidance_scale" if known else "later_guidance_scale": clips.guidance}
        (drawn,) = pipeline(
            num_frames=clips.window or clips.num_frames,
            frame_rate=clips.frame_rate,
            prefix=None if frames is None else frames[:, -known:].astype(np.float32) / 255,
            output_type="np",
            return_dict=False,
            **(options | own),
        )
        piece = np.rint(drawn[:, known:] * 255).astype(np.uint8)
        frames = piece if frames is None else np.concatenate([frames, piece], axis=1)
    assert frames is not None
    return frames[:, : clips.num_frames]


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
