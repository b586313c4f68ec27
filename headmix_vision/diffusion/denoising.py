"""The denoising loop: a network, guidance and a scheduler of diffusers turn noise into data, whatever the data are.

B samples, C channels, *grid 1 to 3 axes (height and width of images; time, height and width of clips).
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import SchedulerMixin
from torch import Tensor

from headmix_vision.checks import check_numbers
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS
from headmix_vision.diffusion.schedulers import is_flow, set_steps, take_step, takes_variance
from headmix_vision.errors import InputError

CHANNELS = ("all", "first_three")
MAX_GUIDANCE = 1000.0  # far beyond any picture; sums of larger ones leave float32
_ROUNDING = 1e-6  # of noise levels in float32
Network = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [B, C, *grid], times [B] in [0, 1000] and labels [B] to a prediction [B, C or 2C, *grid], float32.

Of clips with a clean prefix it is given times [B, T], a noise level for each frame."""
StepEnd = Callable[[int, Any, Tensor], Tensor]
"""Called with the step's number, the scheduler's time and the samples after it; the returned samples replace them."""
Generators = torch.Generator | list[torch.Generator] | None


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
    """Classifier-free guidance (arXiv 2207.12598): moves the prediction away from that without a class.

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
        prefix: First frames of clips, [B or 1, C, T0, *] with T0 from 1 to T - 1. They stay as they are, without
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
