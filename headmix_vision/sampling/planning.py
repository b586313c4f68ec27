"""Plans of images and clips, what a request means for a model, and one batch of samples.

N samples, T frames, H x W pixels, C channels; uint8, channels last.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from headmix_vision.console import say
from headmix_vision.data.seeding import derive_seed
from headmix_vision.diffusion.denoising import Guidance, NonFiniteSamplesError, scheduler_name, set_steps
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.pictures import Decoding, is_picture, is_video, readable
from headmix_vision.files.video import read_video
from headmix_vision.runs.directory import CHECKPOINTS
from headmix_vision.sampling.sample_request import DEFAULT_GUIDANCE, SampleRequest

MAX_FRAMES = 100_000
_RATE_TOLERANCE = 0.05  # the times of GIF are in hundredths of a second


@dataclass(frozen=True)
class ClipPlan:
    """Length, frame rate and start of clips.

    With `window`, clips are drawn in pieces of that length; each piece begins with the last frames of the piece before,
    as clean frames. A causal network draws a clip as one piece, block by block.

    Args:
        num_frames: Frames of a clip, including the start frames.
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
        size: Height and width of an image in pixels; as in training when None.
        clips: Length and rate of clips; as in training when None, and nothing for images.
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

    Options are the arguments of the pipeline's call.

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


def make_plan(pipeline: HeadMixDiTPipeline, request: SampleRequest) -> SamplingPlan:
    """Make the plan of a request, and set the scheduler of the pipeline.

    Raises:
        InputError: A setting does not fit the model.
    """
    model = pipeline.transformer
    if pipeline.vae is None and model.in_channels not in (1, 3):
        raise InputError(
            f"{request.model} makes latents of {model.in_channels} channels: give their autoencoder by --vae"
        )
    classes = check_classes(request.classes, model.num_classes)
    scale = request.guidance
    if scale is None:
        scale = DEFAULT_GUIDANCE if model.has_null_class else 1.0
    with named(f"--guidance {scale:g}"):
        guidance = Guidance(scale)
        pipeline.check_labels(None if classes is None else list(classes), None, guidance)
    interval = request.guidance_interval
    with named(f"--guidance-interval {interval[0]:g},{interval[1]:g}"):
        guidance = replace(guidance, interval=interval)
    with named(f"--guidance-channels {request.guidance_channels}"):
        guidance = replace(guidance, channels=request.guidance_channels)
        pipeline.check_labels(None if classes is None else list(classes), None, guidance)
    if guidance.scale == 1 and request.extend_guidance in (None, 1):
        for option, given in (
            ("--guidance-interval", interval != (0, 1)),
            ("--guidance-channels", guidance.channels != "all"),
        ):
            if given:
                raise InputError(f"{option} has no effect: the scale of guidance is 1")
    if request.scheduler is not None or request.spacing is not None:
        name = scheduler_name(pipeline.scheduler) if request.scheduler is None else request.scheduler
        pipeline.set_scheduler(name, request.spacing)
    with named(f"--steps {request.steps}"):
        set_steps(pipeline.scheduler, request.steps, "cpu")
    with named(f"--size {size_text(request.size)}"):
        size = pipeline.image_size(*request.size or (None, None))
        if math.prod(size) > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise InputError(f"Pillow reads images of at most {Image.MAX_IMAGE_PIXELS} pixels")
    scheduler = scheduler_name(pipeline.scheduler)
    plan = SamplingPlan(request.seed, classes, request.steps, scheduler, guidance, size, spacing=request.spacing)
    return replace(plan, clips=_plan_clips(pipeline, request, plan)) if pipeline.draws_videos else plan


def check_classes(classes: tuple[int, ...] | str | None, num_classes: int) -> tuple[int, ...] | None:
    """Return the labels that take turns, all of them unless some are named; None for an unconditional model.

    Raises:
        InputError: A label out of range, or classes of an unconditional model.
    """
    given = classes if classes is None or isinstance(classes, str) else ",".join(map(str, classes))
    if num_classes == 0:
        if given is not None:
            raise InputError(f"--classes {given} given, but the model is unconditional")
        return None
    if classes is None or isinstance(classes, str):
        return tuple(range(num_classes))
    bad = [label for label in classes if not 0 <= label < num_classes]
    if bad:
        raise InputError(
            f"--classes {given}: class label {bad[0]} is out of range: the model takes 0 to {num_classes - 1}"
        )
    return classes


def size_text(size: tuple[int, int] | None) -> str:
    """Return a size as the command line takes it: `16` for a square, else `16,8`."""
    return "" if size is None else str(size[0]) if size[0] == size[1] else f"{size[0]},{size[1]}"


def run_name(model: Path) -> str:
    """Name the run of a model: that of its directory, also for a checkpoint in there; else that of its file."""
    path = model.resolve()
    if path.suffix != ".ckpt":
        return path.name
    return path.parent.parent.name if path.parent.name == CHECKPOINTS else path.stem


@contextmanager
def named(option: str) -> Iterator[None]:
    """Name the option in an error that its value causes further down."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def _plan_clips(pipeline: HeadMixDiTPipeline, request: SampleRequest, plan: SamplingPlan) -> ClipPlan:
    """Make the plan of the clips of a request, with the size and guidance of a plan of samples.

    Raises:
        InputError: If an option does not fit the model, or a file cannot be read or is of another size.
    """
    with named(f"--frame-rate {request.frame_rate}"):
        frame_rate = pipeline.check_frame_rate(request.frame_rate)
    window = pipeline.clip_size()[0]
    frames = window if request.frames is None else request.frames
    check_counts(1, MAX_FRAMES, **{"--frames": frames})
    if request.extend is None:
        for name, given in (("overlap", request.overlap), ("extend-guidance", request.extend_guidance)):
            if given is not None:
                raise InputError(f"--{name} {given} needs --extend")
        pipeline.check_frames("--frames", frames)
    elif request.frames is None:
        raise InputError("--extend needs --frames, the length to which clips are drawn")
    assert plan.size is not None
    start = _read_start(pipeline, request, plan.size, frame_rate)
    if (start is not None or request.extend is not None) and pipeline.objective.kind != "flow":
        option = "--first-frame" if request.extend is None else "--extend"
        kind = pipeline.objective.kind
        raise InputError(f"{option} needs a model trained with objective.kind=flow, this one was with {kind}")
    if start is not None and len(start) >= frames:
        source = f"--extend {request.extend}" if request.extend else f"--first-frame {request.first_frame}"
        raise InputError(f"--frames is {frames}, {source} alone has {len(start)}")
    block = pipeline.transformer.block_frames
    if request.extend is None:
        if start is not None:
            pipeline.check_frames("the frames of --first-frame", len(start))
        return ClipPlan(frames, frame_rate, start, block=block)
    if block is not None:
        return _extend_by_blocks(pipeline, request, plan, ClipPlan(frames, frame_rate, start, block=block))
    overlap = pipeline.most_frames(window // 2) if request.overlap is None else request.overlap
    with named(f"--overlap {overlap}"):
        pipeline.check_frames("the overlap", overlap)
        if overlap >= window:
            raise InputError(f"it must be below {window}, the frames of training")
        if start is not None and not pipeline.most_frames(min(overlap, len(start))):
            raise InputError(f"the {len(start)} frames that are given are fewer than the model can go on from")
    return ClipPlan(frames, frame_rate, start, window, overlap, _extend_scale(pipeline, request, plan))


def _extend_by_blocks(
    pipeline: HeadMixDiTPipeline, request: SampleRequest, plan: SamplingPlan, clips: ClipPlan
) -> ClipPlan:
    """Plan one piece that begins with all known frames that fill whole blocks."""
    if request.overlap is not None:
        raise InputError(
            "--overlap applies only to models that sample in windows; this model is causal and conditions on all"
            " previous frames. Remove --overlap"
        )
    there = 0 if clips.start is None else len(clips.start)
    known = pipeline.most_frames(there)
    if there and not known:
        raise InputError(f"the {there} frames that are given are fewer than the model can go on from")
    missing = clips.num_frames - there
    window = next(n for n in itertools.count(known + missing) if pipeline.most_frames(n) == n)
    return replace(clips, window=window, overlap=known, guidance=_extend_scale(pipeline, request, plan))


def _extend_scale(pipeline: HeadMixDiTPipeline, request: SampleRequest, plan: SamplingPlan) -> float | None:
    """Return the guidance of what goes on from known frames; None where it is that of the rest."""
    scale = None if request.extend_guidance == plan.guidance.scale else request.extend_guidance
    if scale is not None:
        with named(f"--extend-guidance {scale:g}"):
            labels = None if plan.classes is None else list(plan.classes)
            pipeline.check_labels(labels, None, replace(plan.guidance, scale=scale))
    return scale


def warn_of_unlearned(pipeline: HeadMixDiTPipeline, clips: ClipPlan | None) -> None:
    """Warn where clips continue known frames, but the model has not learned to."""
    goes_on = clips is not None and (any(clips.known_frames(pipeline)) or clips.count_passes(pipeline) > 1)
    if goes_on and not pipeline.objective.clean_prefix:
        say(
            "warning: the videos go on from known frames, but the model was trained with objective.clean_prefix=0: it"
            " has never seen clean frames beside noise"
        )


def _read_start(
    pipeline: HeadMixDiTPipeline, request: SampleRequest, size: tuple[int, int], frame_rate: float
) -> np.ndarray | None:
    """Read the known first frames, uint8 [T0, H, W, C]; None where there are none."""
    if request.first_frame is not None:
        if request.extend:
            raise InputError(f"--first-frame {request.first_frame} and --extend {request.extend}: give one of them")
        return _fitting(_read_image(request.first_frame), f"--first-frame {request.first_frame}", pipeline, size)
    if not request.extend:
        return None
    path = Path(request.extend)
    if not path.is_file():
        raise InputError(f"--extend {request.extend!r} is not a file")
    if is_picture(path) and not is_video(path):  # a sample of ours, or another that states no frame rate
        with readable(f"--extend {path}"):
            frames = Decoding().frames(path)
        if len(frames) == 1:
            raise InputError(f"--extend {path} is an image: give it as --first-frame")
        clip, rate = np.stack([*map(np.asarray, frames)]), frame_rate
    else:
        clip, rate = read_video(path, frame_rate)
    if abs(rate / frame_rate - 1) > _RATE_TOLERANCE:
        raise InputError(
            f"--extend {path} has {rate:g} frames a second, the videos {frame_rate:g}: give --frame-rate {rate:g}"
        )
    return _fitting(clip, f"--extend {path}", pipeline, size)


def _read_image(path: str) -> np.ndarray:
    if not Path(path).is_file():
        raise InputError(f"--first-frame {path!r} is not a file")
    with readable(f"--first-frame {path}"):
        return np.asarray(Decoding().first_frame(path))[None]


def _fitting(frames: np.ndarray, name: str, pipeline: HeadMixDiTPipeline, size: tuple[int, int]) -> np.ndarray:
    """Convert frames to the channels of the videos; refuse frames of another size."""
    height, width = frames.shape[1:3]
    if (height, width) != size:
        raise InputError(
            f"{name} is {height}x{width} pixels, the videos are {size[0]}x{size[1]}: resize or crop it, or give --size"
        )
    channels = pipeline.image_channels
    if frames.shape[-1] == channels:
        return frames
    if channels == 3:
        return np.repeat(frames, 3, axis=-1)
    return np.stack([np.asarray(Image.fromarray(frame).convert("L"))[..., None] for frame in frames])
