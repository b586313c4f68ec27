"""What the options of `headmix-sample` mean for a model."""

import argparse
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from headmix_vision.diffusion.denoising import Guidance
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.diffusion.schedulers import scheduler_name, set_steps
from headmix_vision.errors import InputError
from headmix_vision.runs.directory import CHECKPOINTS
from headmix_vision.sampling.draw import SamplingPlan

DEFAULT_GUIDANCE = 1.5


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
    with named(f"--guidance {scale:g}"):
        guidance = Guidance(scale)
        pipeline.check_labels(None if classes is None else list(classes), None, guidance)
    interval = _pair(options.guidance_interval, float, "--guidance-interval")
    with named(f"--guidance-interval {options.guidance_interval}"):
        guidance = replace(guidance, interval=interval)
    with named(f"--guidance-channels {options.guidance_channels}"):
        guidance = replace(guidance, channels=options.guidance_channels)
        pipeline.check_labels(None if classes is None else list(classes), None, guidance)
    if guidance.scale == 1 and getattr(options, "extend_guidance", None) in (None, 1):
        for option, given in (
            ("--guidance-interval", interval != (0, 1)),
            ("--guidance-channels", guidance.channels != "all"),
        ):
            if given:
                raise InputError(f"{option} has no effect: the scale of guidance is 1")
    if options.scheduler is not None or options.spacing is not None:
        name = scheduler_name(pipeline.scheduler) if options.scheduler is None else options.scheduler
        pipeline.set_scheduler(name, options.spacing)
    with named(f"--steps {options.steps}"):
        set_steps(pipeline.scheduler, options.steps, "cpu")
    height, width = (None, None) if options.size is None else _pair(options.size, int, "--size")
    with named(f"--size {options.size}"):
        size = pipeline.image_size(height, width)
        if math.prod(size) > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise InputError(f"Pillow reads images of at most {Image.MAX_IMAGE_PIXELS} pixels")
    scheduler = scheduler_name(pipeline.scheduler)
    return SamplingPlan(options.seed, classes, options.steps, scheduler, guidance, size, spacing=options.spacing)


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


def run_name(model: Path) -> str:
    """Names the run of a model: that of its directory, also for a checkpoint in there; else that of its file."""
    path = model.resolve()
    if path.suffix != ".ckpt":
        return path.name
    return path.parent.parent.name if path.parent.name == CHECKPOINTS else path.stem


@contextmanager
def named(option: str) -> Iterator[None]:
    """Names the option in an error that its value causes further down."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
