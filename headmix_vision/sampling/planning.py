"""Plan of samples: what a request means for a model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from PIL import Image

from headmix_vision.diffusion.denoising import Guidance
from headmix_vision.diffusion.generator_pipeline import GeneratorPipeline
from headmix_vision.diffusion.schedulers import scheduler_name, set_steps
from headmix_vision.errors import InputError
from headmix_vision.runs.directory import CHECKPOINTS
from headmix_vision.sampling.draw import SamplingPlan
from headmix_vision.sampling.request import DEFAULT_GUIDANCE, SampleRequest


def make_plan(pipeline: GeneratorPipeline, request: SampleRequest) -> SamplingPlan:
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
    return SamplingPlan(request.seed, classes, request.steps, scheduler, guidance, size, spacing=request.spacing)


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
