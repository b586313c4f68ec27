"""Denoising: schedulers of diffusers, chosen by name for an objective, and the loop in which they turn noise into data.

B samples, C channels, *grid 1 to 3 axes (height and width of images; time, height and width of clips).
"""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import diffusers
import numpy as np
import torch
from diffusers import SchedulerMixin
from torch import Tensor

from headmix_vision.diffusion.objectives import NUM_TIMESTEPS, ObjectiveConfig
from headmix_vision.errors import InputError, check_numbers

# Name -> objective -> class of diffusers and its own options.
_MULTISTEP_DDPM = {"timestep_spacing": "linspace"}
_TABLE: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "euler": {"flow": ("FlowMatchEulerDiscreteScheduler", {})},
    "heun": {"flow": ("FlowMatchHeunDiscreteScheduler", {})},
    "dpm++": {
        "flow": ("DPMSolverMultistepScheduler", {}),
        "ddpm": ("DPMSolverMultistepScheduler", _MULTISTEP_DDPM),
    },
    "unipc": {
        "flow": ("UniPCMultistepScheduler", {}),
        "ddpm": ("UniPCMultistepScheduler", _MULTISTEP_DDPM),
    },
    "ddim": {"ddpm": ("DDIMScheduler", {})},
    "ddpm": {"ddpm": ("DDPMScheduler", {})},
}
SCHEDULER_NAMES = tuple(_TABLE)
_DEFAULTS = {"flow": "euler", "ddpm": "ddpm"}
SPACINGS = ("trailing", "linspace", "leading")
_FITTING_SPACINGS = {"ddim": SPACINGS, "ddpm": SPACINGS[1:]}  # the first is the default; DDPM has to end at time 0
_DDIM = (diffusers.DDIMScheduler, diffusers.DDIMParallelScheduler)
_SPACED = (*_DDIM, diffusers.DDPMScheduler, diffusers.DDPMParallelScheduler)
CHANNELS = ("all", "first_three")
MAX_GUIDANCE = 1000.0  # far beyond any picture; sums of larger ones leave float32
_ROUNDING = 1e-6  # of noise levels in float32
Network = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [B, C, *grid], times [B] in [0, 1000] and labels [B] to a prediction [B, C or 2C, *grid], float32.

Of clips with a clean prefix it is given times [B, T], a noise level for each frame."""
StepEnd = Callable[[int, Any, Tensor], Tensor]
"""Called with the step's number, the scheduler's time and the samples after it; the returned samples replace them."""
Generators = torch.Generator | list[torch.Generator] | None


def create_scheduler(
    name: str | None, objective: ObjectiveConfig, *, clip: bool = False, spacing: str | None = None
) -> SchedulerMixin:
    """Make a scheduler that fits the objective of the network.

    Args:
        name: One of `SCHEDULER_NAMES`; when None euler for flow matching, ddpm for DDPM.
        objective: What the network was trained for.
        clip: Keep the estimate of the data in [-1, 1], for pixels; only ddim and ddpm do.
        spacing: Which of the 1,000 times ddim and ddpm take, see `spaced_times`; `trailing` for ddim and `linspace` for
            ddpm when None.

    Raises:
        InputError: If the name is unknown, or the scheduler does not fit the objective or the spacing.
    """
    name = _DEFAULTS[objective.kind] if name is None else name
    fitting = [other for other, entry in _TABLE.items() if objective.kind in entry]
    if name not in _TABLE:
        raise InputError(f"unknown scheduler {name!r}; for this model: {', '.join(fitting)}")
    if objective.kind not in _TABLE[name]:
        raise InputError(
            f"scheduler {name!r} does not fit a model trained with objective.kind={objective.kind};"
            f" for this model: {', '.join(fitting)}"
        )
    spacings = _FITTING_SPACINGS.get(name, ())
    if spacing is not None and spacing not in spacings:
        others = " and ".join(_FITTING_SPACINGS)
        allowed = f"takes {' or '.join(spacings)}" if spacings else f"has none to choose; {others} have"
        raise InputError(f"timestep spacing {spacing!r} given, but scheduler {name!r} {allowed}")
    class_name, options = _TABLE[name][objective.kind]
    cls = getattr(diffusers, class_name)
    if objective.kind == "flow":
        if class_name.startswith("FlowMatch"):
            return cls(num_train_timesteps=NUM_TIMESTEPS, shift=objective.shift)
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": objective.shift}
        return cls(num_train_timesteps=NUM_TIMESTEPS, **flow, **options)
    common: dict[str, Any] = {
        "num_train_timesteps": NUM_TIMESTEPS,
        "beta_schedule": "linear",
        "beta_start": objective.beta_start,
        "beta_end": objective.beta_end,
        "prediction_type": "v_prediction" if objective.prediction == "v" else "epsilon",
    }
    if spacings:
        common["clip_sample"] = clip
        common["timestep_spacing"] = spacing or spacings[0]
    if name == "ddpm" and objective.learned_variance:
        common["variance_type"] = "learned_range"
    return cls(**common, **options)


def scheduler_name(scheduler: SchedulerMixin) -> str:
    """Find the name of a scheduler in `SCHEDULER_NAMES`, or else return the name of its class."""
    for name, entry in _TABLE.items():
        if any(class_name == type(scheduler).__name__ for class_name, _ in entry.values()):
            return name
    return type(scheduler).__name__


def check_scheduler_class(class_name: str, objective: ObjectiveConfig) -> None:
    """Raise `InputError` if a class of diffusers is not a scheduler for the objective of the network."""
    fitting = {entry[objective.kind][0] for entry in _TABLE.values() if objective.kind in entry}
    if class_name not in fitting:
        raise InputError(
            f"{class_name!r} is not a scheduler for objective.kind={objective.kind}; these are:"
            f" {', '.join(sorted(fitting))}"
        )


def check_scheduler_config(scheduler: SchedulerMixin) -> None:
    """Raise `InputError` if nothing can be sampled with the configuration of a scheduler, as read from a file."""
    steps = scheduler.config.get("num_train_timesteps")
    if steps != NUM_TIMESTEPS:
        raise InputError(f"num_train_timesteps of the scheduler must be {NUM_TIMESTEPS}, got {steps!r}")
    spacing = scheduler.config.get("timestep_spacing", SPACINGS[0])
    if spacing not in SPACINGS:
        raise InputError(f"timestep_spacing of the scheduler must be one of {SPACINGS}, got {spacing!r}")
    defaults = inspect.signature(type(scheduler).__init__).parameters  # `lambda_min_clipped` is -inf by default
    for name, value in scheduler.config.items():
        if isinstance(value, float) and not math.isfinite(value) and value != defaults[name].default:
            raise InputError(f"{name} of the scheduler must be finite, got {value}")


def check_scheduler(scheduler: SchedulerMixin, objective: ObjectiveConfig) -> None:
    """Raise `InputError` if a scheduler, of any class, takes the output of the network for something else."""
    wanted = create_scheduler(None, objective)
    told = scheduler.config.get("prediction_type", "epsilon")
    if is_flow(scheduler) != is_flow(wanted) or (not is_flow(wanted) and told != wanted.config.prediction_type):
        takes = "a flow" if is_flow(scheduler) else f"prediction_type={told!r}"
        gives = "a flow" if is_flow(wanted) else f"{wanted.config.prediction_type!r}"
        raise InputError(
            f"{type(scheduler).__name__} takes {takes}, but the model predicts {gives}: pipeline.set_scheduler(name)"
            " makes one that fits"
        )
    betas = None if is_flow(wanted) else getattr(scheduler, "betas", None)
    if betas is not None and (len(betas) != NUM_TIMESTEPS or not torch.allclose(betas.cpu(), wanted.betas, rtol=1e-3)):
        raise InputError(
            f"{type(scheduler).__name__} has another noise schedule than the model was trained with, which has"
            f" {NUM_TIMESTEPS} steps, beta_start={objective.beta_start} and beta_end={objective.beta_end}:"
            " pipeline.set_scheduler(name) makes one that fits"
        )


def takes_variance(scheduler: SchedulerMixin) -> bool:
    """Return whether the scheduler takes the channels of the learned variance as well."""
    return getattr(scheduler.config, "variance_type", None) in ("learned", "learned_range")


def set_steps(scheduler: SchedulerMixin, num_steps: int, device: torch.device | str) -> None:
    """Set the number of sampling steps.

    Steps of flow matching are equal in noise level before the shift, the last one ends at 0; diffusers' default for
    the Euler scheduler ends with a step from 1/1000, which is all but lost.

    Raises:
        InputError: If the scheduler cannot take so many steps.
    """
    if isinstance(scheduler, _SPACED):
        times = torch.tensor(spaced_times(scheduler.config.timestep_spacing, num_steps), device=device)
        scheduler.set_timesteps(num_steps, device=device)
        # diffusers' own times are one too many at some numbers of steps, with a last one of -1
        scheduler.timesteps = times + scheduler.config.steps_offset
    elif isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps).tolist(), device=device)
    else:
        if isinstance(scheduler, diffusers.FlowMatchHeunDiscreteScheduler):
            scheduler.sigma_min = 1 / NUM_TIMESTEPS  # diffusers' own is shifted already, and would be once more
        scheduler.set_timesteps(num_steps, device=device)
    if hasattr(scheduler, "set_begin_index"):
        # diffusers would look up where the first time is, and skip a step where rounded times are equal
        scheduler.set_begin_index(0)
    if not is_flow(scheduler):
        _check_times(scheduler, num_steps)


def spaced_times(spacing: str, num_steps: int) -> list[int]:
    """Choose times among the 1,000 of DDPM, in falling order.

    Args:
        spacing: `trailing`: from 999 down in equal steps, the last of which ends at the data (arXiv 2305.08891).
            `linspace`: from 999 to 0, rounded as by `create_diffusion("N")` of the official DiT. `leading`: every
            k-th from 0 on, as by its `create_diffusion("ddimN")`.
        num_steps: N.

    Raises:
        InputError: If the spacing is unknown, or there are no N such times.
    """
    if spacing == "trailing":
        return [int(time) - 1 for time in np.arange(NUM_TIMESTEPS, 0, -NUM_TIMESTEPS / num_steps).round()[:num_steps]]
    if spacing == "linspace":
        stride = (NUM_TIMESTEPS - 1) / max(1, num_steps - 1)
        # added up one by one: the official DiT's sums round to other times than multiples of the stride
        return [round(time) for time in itertools.accumulate([0.0] + [stride] * (num_steps - 1))][::-1]
    if spacing == "leading":
        counts = {len(range(0, NUM_TIMESTEPS, stride)): stride for stride in range(NUM_TIMESTEPS - 1, 0, -1)}
        if num_steps not in counts:
            nearest = min(counts, key=lambda count: abs(count - num_steps))
            raise InputError(
                f"timestep spacing 'leading' takes every k-th of {NUM_TIMESTEPS} times, which are never {num_steps};"
                f" nearest: {nearest}"
            )
        return [*range(0, NUM_TIMESTEPS, counts[num_steps])][::-1]
    raise InputError(f"timestep spacing must be one of {SPACINGS}, got {spacing!r}")


def _check_times(scheduler: SchedulerMixin, num_steps: int) -> None:
    """Raise `InputError` if the times of DDPM's process do not lead from noise to data."""
    times, highest = scheduler.timesteps.tolist(), NUM_TIMESTEPS - 1
    multistep = isinstance(scheduler, diffusers.DPMSolverMultistepScheduler | diffusers.UniPCMultistepScheduler)
    name = scheduler_name(scheduler)
    if multistep and len(set(times)) < len(times):
        raise InputError(f"{name} has {len(set(times))} different times for {num_steps} steps: take fewer steps")
    if not max(1, highest - NUM_TIMESTEPS / num_steps) <= times[0] <= highest or times[-1] < 0:
        raise InputError(
            f"{name} with {scheduler.config.get('timestep_spacing')} spacing takes times {times[0]:g} to {times[-1]:g}"
            f" in {num_steps} steps; the first must be near {highest}, in noise: take another number of steps"
        )
    if isinstance(scheduler, diffusers.DDPMScheduler) and times[-1] > 0 and takes_variance(scheduler):
        raise InputError(f"{name} must end at time 0, its noise stays in the data otherwise: take linspace or leading")


def take_step(scheduler: SchedulerMixin, i: int, prediction: Tensor, x: Tensor, **options: Any) -> Tensor:
    """Take the i-th sampling step.

    DDIM of diffusers goes back by `1000 // num_inference_steps`, which misses the next time of the schedule unless the
    number divides 1,000. A fraction in its place, 1,000 by the distance of the two times, makes the step exact.

    Args:
        scheduler: The scheduler, after `set_steps`.
        i: Number of the step.
        prediction: Output of the network for the samples at this step.
        x: The samples, of the same shape, or of half the channels where the variance is learned.
        options: Further options of the scheduler's `step`.

    Returns:
        The samples after the step, as `x`.
    """
    times = scheduler.timesteps
    if isinstance(scheduler, _DDIM):
        after = int(times[i + 1]) if i + 1 < len(times) else -1
        scheduler.num_inference_steps = Fraction(NUM_TIMESTEPS, int(times[i]) - after)
    return scheduler.step(prediction, times[i], x, return_dict=False, **options)[0]


def is_flow(scheduler: SchedulerMixin) -> bool:
    """Return whether the scheduler integrates a flow; its noise levels are then its `sigmas`."""
    return type(scheduler).__name__.startswith("FlowMatch") or bool(getattr(scheduler.config, "use_flow_sigmas", False))


class NonFiniteSamplesError(InputError):
    """Samples became infinite or not a number, by too strong a guidance, too narrow a type, or broken weights.

    Args:
        samples: Which ones: their places in the batch, or their numbers.
        when: Where it happened, such as `in step 3 of 50`.
    """

    def __init__(self, samples: Sequence[int], when: str) -> None:
        self.samples = samples
        self.when = when
        super().__init__(
            f"sample {samples[0]} became infinite or not a number {when}: lower the guidance, compute in float32,"
            " or look for broken weights"
        )


def is_number(value: Any) -> bool:
    """Return whether a value is one real number; True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance (arXiv 2207.12598): moves the prediction away from the one without a class.

    Args:
        scale: 1 leaves the prediction as it is, 0 forgets the class, at all noise levels and in all channels, and
            neither costs anything; at most 1000.
        interval: Noise levels, from 0 (data) to 1 (noise), within which guidance acts (arXiv 2404.07724).
        channels: Guide `all` channels, or the `first_three`, as DiT and SiT did for their published figures.

    Raises:
        InputError: For a scale outside [0, 1000], an interval outside [0, 1] or unknown channels.
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    channels: Literal["all", "first_three"] = "all"

    def __post_init__(self) -> None:
        check_numbers(0, MAX_GUIDANCE, **{"guidance scale": self.scale})
        ends = tuple(self.interval) if isinstance(self.interval, Sequence) else ()
        if len(ends) != 2 or not all(map(is_number, ends)) or not 0 <= ends[0] <= ends[1] <= 1:
            given = " and ".join(map(str, ends)) if len(ends) == 2 else repr(self.interval)
            raise InputError(f"guidance interval must be two numbers within 0 and 1, low before high, got {given}")
        object.__setattr__(self, "interval", ends)
        if self.channels not in CHANNELS:
            raise InputError(f"guidance channels must be one of {CHANNELS}, got {self.channels!r}")

    @property
    def enabled(self) -> bool:
        """Whether guidance acts at any noise level."""
        return self.scale != 1

    def acts_at(self, level: float) -> bool:
        """Return whether guidance acts at a noise level; both ends of the interval belong to it."""
        return self.enabled and self.interval[0] - _ROUNDING <= level <= self.interval[1] + _ROUNDING

    def combine(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        """Combine two predictions [B, C, *grid], without the channels of a learned variance, into the guided one."""
        guided = torch.lerp(unconditional, conditional, self.scale)
        if self.channels == "first_three":
            guided = torch.cat([guided[:, :3], conditional[:, 3:]], dim=1)
        return guided


@torch.no_grad()
def denoise(
    network: Network,
    noise: Tensor,
    scheduler: SchedulerMixin,
    num_steps: int,
    *,
    labels: Tensor | None = None,
    null_label: int | None = None,
    guidance: Guidance | None = None,
    generator: Generators = None,
    prefix: Tensor | None = None,
    step_end: StepEnd | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Tensor:
    """Turn noise into data in a number of steps.

    Args:
        network: The network.
        noise: Start of the samples, standard normal float32 [B, C, *grid].
        scheduler: A scheduler that fits what the network was trained for.
        num_steps: Number of sampling steps.
        labels: Condition of each sample, int64 [B]; None for an unconditional network.
        null_label: Label that stands for no condition; guidance needs it.
        guidance: Classifier-free guidance; none when None.
        generator: Random numbers of schedulers that draw some, one generator for all samples or one for each.
        prefix: First frames of clips, [B or 1, C, T0, *grid] with T0 from 1 to T - 1. They stay as they are, without
            noise at every step, which the network is told by times [B, T].
        step_end: Called after each step.
        progress: Wraps the scheduler's times, to show how far the loop is.

    Returns:
        The samples, float32 [B, C, *grid].

    Raises:
        InputError: Guidance without labels or without a null label; a prefix of another shape, or with a scheduler that
            integrates no flow.
        NonFiniteSamplesError: A sample became infinite or not a number.
    """
    channels, guidance = noise.shape[1], guidance or Guidance()
    if guidance.enabled and (labels is None or null_label is None):
        raise InputError(f"guidance scale {guidance.scale} needs labels and a null label")
    if guidance.scale == 0:
        assert labels is not None and null_label is not None
        labels, guidance = torch.full_like(labels, null_label), Guidance()
    if prefix is not None:
        prefix = _check_prefix(prefix, noise, scheduler)

    def predict(x: Tensor, level: float) -> Tensor:
        times = torch.full((len(x),), level * NUM_TIMESTEPS, device=x.device)
        if prefix is not None:
            times = times[:, None].repeat(1, x.shape[2])
            times[:, : prefix.shape[2]] = 0
        if not guidance.acts_at(level):
            output = network(x, times, labels)
        else:
            assert labels is not None and null_label is not None
            both = torch.cat([labels, torch.full_like(labels, null_label)])
            output, unconditional = network(torch.cat([x, x]), torch.cat([times, times]), both).chunk(2)
            guided = guidance.combine(output[:, :channels], unconditional[:, :channels])
            output = torch.cat([guided, output[:, channels:]], dim=1)
        return output if takes_variance(scheduler) else output[:, :channels]

    set_steps(scheduler, num_steps, noise.device)
    draws = "generator" in inspect.signature(scheduler.step).parameters
    options = {"generator": generator} if draws else {}
    x = _with_prefix(noise * float(getattr(scheduler, "init_noise_sigma", 1.0)), prefix)
    count = len(scheduler.timesteps)
    # The first bad step of each sample stays on the device, since looking at it would wait for every step. Predictions
    # are looked at too: a scheduler that clips makes finite samples of infinite predictions.
    first_bad = torch.full((len(x),), count, device=x.device)
    for i, t in enumerate(progress(scheduler.timesteps)):
        scaled = x if is_flow(scheduler) else scheduler.scale_model_input(x, t)
        prediction = predict(scaled, _noise_level(scheduler, i, t))
        x = _with_prefix(take_step(scheduler, i, prediction, x, **options), prefix)
        if step_end is not None:
            x = _with_prefix(step_end(i, t, x), prefix)
        finite = prediction.isfinite().flatten(1).all(1) & x.isfinite().flatten(1).all(1)
        first_bad = torch.where(finite, first_bad, first_bad.clamp(max=i))
    bad_steps = first_bad.tolist()
    if min(bad_steps) < count:
        bad = [position for position, step in enumerate(bad_steps) if step < count]
        raise NonFiniteSamplesError(bad, f"in step {bad_steps[bad[0]] + 1} of {count}")
    return x


def _check_prefix(prefix: Tensor, noise: Tensor, scheduler: SchedulerMixin) -> Tensor:
    """Return the prefix for each sample, where noise is; refuses what `denoise` cannot keep."""
    count, channels, *grid = noise.shape
    allowed = [(n, channels, frames, *grid[1:]) for n in (1, count) for frames in range(1, grid[0])]
    if len(grid) < 3 or tuple(prefix.shape) not in allowed or not prefix.isfinite().all():
        raise InputError(
            f"the prefix must be finite, and the first frames of clips of shape {list(noise.shape)}, fewer than there"
            f" are; got {list(prefix.shape)}"
        )
    if not is_flow(scheduler):
        raise InputError(
            "a prefix needs a model trained by flow matching: with the steps of DDPM frames have no noise level 0"
        )
    return prefix.to(noise).expand(count, *prefix.shape[1:])


def _with_prefix(x: Tensor, prefix: Tensor | None) -> Tensor:
    return x if prefix is None else torch.cat([prefix, x[:, :, prefix.shape[2] :]], dim=2)


def _noise_level(scheduler: SchedulerMixin, i: int, t: Any) -> float:
    """Return the noise level of a step, in [0, 1]: some schedulers round the time of a flow, but never its level."""
    return float(scheduler.sigmas[i]) if is_flow(scheduler) else float(t) / NUM_TIMESTEPS
