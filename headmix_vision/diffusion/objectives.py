"""Training objectives of diffusion models: they add noise to data, ask the network, and compute the loss.

B samples, C channels, *grid 1 to 3 axes (height and width of images; time, height and width of clips); x0 data
[B, C, *grid], ε noise, x noisy data. The network's time runs from 0 (data) to 1000 (noise), its *noise level* is a
thousandth of that. The T frames of a clip have the time of their sample, [B], or one of their own each, [B, T]
(arXiv 2407.01392); the time of clean frames is 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from headmix_vision.errors import InputError

NUM_TIMESTEPS = 1000
Predict = Callable[[Tensor, Tensor], Tensor]
"""The network as a function of x [B, C, *grid] and its time [B] or [B, T], with the labels bound."""


@dataclass
class ObjectiveConfig:
    """Options of the training objective; checkpoints and pipelines store them, since the scheduler has to match.

    Args:
        kind: `flow`: flow matching on the straight path, velocity; `ddpm`: the discrete process of DDPM.
        times: Flow matching: noise levels in training, `uniform` or `logit_normal` (arXiv 2403.03206).
        logit_mean: Mean of the logit-normal distribution.
        logit_std: Its standard deviation.
        shift: Flow matching: moves noise levels t to s·t / (1 + (s - 1)·t), in training and in sampling.
        prediction: DDPM: the network says `epsilon`, the noise, or `v` (arXiv 2202.00512).
        learned_variance: DDPM: learn the variance within its range, with the variational bound as a second term
            (arXiv 2102.09672); the network needs `learned_variance` as well.
        beta_start: DDPM: variance of the first step; in between they grow linearly.
        beta_end: DDPM: variance of the last step.
        clean_prefix: Flow matching of clips: share of training clips whose first frames, from one to all but one, stay
            clean, so that the model learns to continue a clip.
        prefix_noise: Their noise level is drawn from 0 to this one, at most that of the other frames, instead of being
            0, so that the model learns to continue frames that are not quite right, as those it has drawn itself
            (arXiv 2408.14837).
        prefix_class_dropout: Share of them that are trained without their class, besides what the network leaves out: a
            class that tells how a clip starts is wrong in its middle.
    """

    kind: Literal["flow", "ddpm"] = "flow"
    times: Literal["uniform", "logit_normal"] = "uniform"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    shift: float = 1.0
    prediction: Literal["epsilon", "v"] = "epsilon"
    learned_variance: bool = False
    beta_start: float = 1e-4
    beta_end: float = 0.02
    clean_prefix: float = 0.0
    prefix_noise: float = 0.0
    prefix_class_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", ("flow", "ddpm")),
            ("times", ("uniform", "logit_normal")),
            ("prediction", ("epsilon", "v")),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(f"objective.{name} must be one of {allowed}, got {getattr(self, name)!r}")
        shares = ("clean_prefix", "prefix_noise", "prefix_class_dropout")
        for name in ("logit_mean", "logit_std", "shift", "beta_start", "beta_end", *shares):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(f"objective.{name} must be a finite number, got {value!r}")
        if not self.shift > 0 or not self.logit_std > 0:
            raise InputError(
                f"objective.shift and logit_std must be positive, got shift={self.shift}, logit_std={self.logit_std}"
            )
        if self.kind == "flow" and self.learned_variance:
            raise InputError("objective.learned_variance needs objective.kind=ddpm: flow matching has no variance")
        for name in shares:
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"objective.{name} must be in [0, 1], got {getattr(self, name)}")
            if getattr(self, name) and not self.clean_prefix:
                raise InputError(f"objective.{name} is of known first frames: it needs objective.clean_prefix")
        if self.kind == "ddpm" and self.clean_prefix:
            raise InputError("objective.clean_prefix needs objective.kind=flow: DDPM has no noise level of zero")
        if not 0 < self.beta_start <= self.beta_end < 1:
            raise InputError(f"0 < beta_start <= beta_end < 1 must hold, got {self.beta_start} and {self.beta_end}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ObjectiveConfig:
        """Make the options that `dataclasses.asdict` wrote.

        Raises:
            InputError: If an option is unknown or has a wrong value.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"objective has no option {name!r}; it has {', '.join(known)}")
        return cls(**values)


class Objective(ABC):
    """A training objective.

    Args:
        config: Its options.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    @abstractmethod
    def draw_times(
        self, count: int, device: torch.device | str = "cpu", frames: int | None = None, tubelet: int = 1
    ) -> Tensor:
        """Draw the times of a training batch from the global random numbers.

        Args:
            count: B.
            device: Where to.
            frames: T of clips; None for other data.
            tubelet: Frames that the network takes, or draws, as one: prefixes of clean frames are multiples of it.

        Returns:
            float32 in [0, 1000]: [B], or [B, T] for clips where `clean_prefix` is positive.
        """

    @abstractmethod
    def add_noise(self, x0: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """Return the noisy data that the network gets; arguments as of `losses`, the result as `x0`."""

    @abstractmethod
    def losses(self, predict: Predict, x0: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """Compute the loss of each sample.

        Args:
            predict: The network.
            x0: Data [B, C, *grid], float32.
            times: [B] or, for flow matching of clips, [B, T], as from `draw_times`. Of the latter, the frames at
                the highest time of a clip count; those below it belong to the prefix.
            noise: ε, standard normal, as `x0`.

        Returns:
            [B], float32; 0 for a clip whose frames are all clean.
        """


def create_objective(config: ObjectiveConfig) -> Objective:
    """Make the objective that a configuration describes."""
    return FlowMatching(config) if config.kind == "flow" else Ddpm(config)


class FlowMatching(Objective):
    """Flow matching on the path x = (1 - t)·x0 + t·ε, whose velocity is ε - x0 (arXiv 2209.03003, 2210.02747)."""

    def draw_times(
        self, count: int, device: torch.device | str = "cpu", frames: int | None = None, tubelet: int = 1
    ) -> Tensor:
        if self.config.times == "logit_normal":
            logits = torch.randn(count, device=device) * self.config.logit_std + self.config.logit_mean
            levels = logits.sigmoid()
        else:
            levels = torch.rand(count, device=device)
        times = NUM_TIMESTEPS * shifted(levels, self.config.shift)
        if frames is None or not self.config.clean_prefix:
            return times
        prefix = self._draw_prefixes(count, frames // tubelet, device) * tubelet
        in_prefix = torch.arange(frames, device=device) < prefix[:, None]
        noise = torch.zeros_like(times)
        if self.config.prefix_noise:
            noise = torch.minimum(NUM_TIMESTEPS * self.config.prefix_noise * torch.rand_like(times), times)
        return torch.where(in_prefix, noise[:, None], times[:, None])

    def _draw_prefixes(self, count: int, places: int, device: torch.device | str) -> Tensor:
        """Draw how many first places of each clip stay clean, of `places` in all: int64 [B]."""
        chosen, share = torch.rand(2, count, device=device)
        lengths = 1 + (share * (places - 1)).long().clamp(max=places - 2)  # their product may be rounded up
        return torch.where(chosen < self.config.clean_prefix, lengths, 0) * (places > 1)

    def add_noise(self, x0: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        return torch.lerp(x0, noise, _like_data(times / NUM_TIMESTEPS, x0))

    def losses(self, predict: Predict, x0: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        error = predict(self.add_noise(x0, times, noise), times).float() - (noise - x0)
        if times.ndim == 1:
            return _mean_square(error)
        noisy = (times > 0) & (times == times.amax(1, keepdim=True))
        by_frame = error.square().mean(dim=(1, 3, 4))
        return (by_frame * noisy).sum(1) / noisy.sum(1).clamp(min=1)


def shifted(levels: Tensor, shift: float) -> Tensor:
    """Move noise levels in [0, 1] towards noise, for a shift above 1 (arXiv 2403.03206, equation 23)."""
    return shift * levels / (1 + (shift - 1) * levels)


class Ddpm(Objective):
    """DDPM with a linear variance schedule of 1,000 steps (arXiv 2006.11239), as DiT is trained."""

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        betas = torch.linspace(config.beta_start, config.beta_end, NUM_TIMESTEPS, dtype=torch.float64)
        self.betas = betas
        self.alphas_cumprod = torch.cumprod(1 - betas, 0)

    def draw_times(
        self, count: int, device: torch.device | str = "cpu", frames: int | None = None, tubelet: int = 1
    ) -> Tensor:
        return torch.randint(NUM_TIMESTEPS, (count,), device=device).float()

    def add_noise(self, x0: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        signal, sigma = self._scales(_like_data(times.long(), x0))
        return signal * x0 + sigma * noise

    def _scales(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Read the scales of data and noise at some steps."""
        return _at(self.alphas_cumprod.sqrt(), steps), _at((1 - self.alphas_cumprod).sqrt(), steps)

    def losses(self, predict: Predict, x0: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        steps = _like_data(times.long(), x0)
        signal, sigma = self._scales(steps)
        x = signal * x0 + sigma * noise
        output = predict(x, times).float()
        prediction, variance = output, None
        if self.config.learned_variance:
            prediction, variance = output.chunk(2, dim=1)
        if self.config.prediction == "v":
            target, x0_hat = signal * noise - sigma * x0, signal * x - sigma * prediction
        else:
            target, x0_hat = noise, (x - sigma * prediction) / signal
        loss = _mean_square(prediction - target)
        if variance is not None:
            # The bound shapes the variance alone: the mean is left to the first term.
            loss = loss + self._variational_bound(x0, x, x0_hat.detach(), variance, steps)
        return loss

    def _variational_bound(self, x0: Tensor, x: Tensor, x0_hat: Tensor, variance: Tensor, steps: Tensor) -> Tensor:
        """Compute the bound's term of each sample's step: bits per dimension, [B] (arXiv 2102.09672, eq. 15 and 4)."""
        before = torch.cat([torch.ones(1, dtype=torch.float64), self.alphas_cumprod[:-1]])
        posterior = self.betas * (1 - before) / (1 - self.alphas_cumprod)
        posterior[0] = posterior[1]  # zero at the first step, where the logarithm needs a number
        weight_x0 = _at(self.betas * before.sqrt() / (1 - self.alphas_cumprod), steps)
        weight_x = _at((1 - before) * (1 - self.betas).sqrt() / (1 - self.alphas_cumprod), steps)
        lower, upper = _at(posterior.log(), steps), _at(self.betas.log(), steps)

        mean = weight_x0 * x0_hat + weight_x * x
        log_variance = lower + (variance + 1) / 2 * (upper - lower)
        true_mean = weight_x0 * x0 + weight_x * x
        divergence = 0.5 * (
            log_variance - lower + (lower - log_variance).exp() + (true_mean - mean) ** 2 * (-log_variance).exp() - 1
        )
        likelihood = discretized_log_likelihood(x0, mean, 0.5 * log_variance)
        return torch.where(steps == 0, -likelihood, divergence).flatten(1).mean(1) / math.log(2)


def discretized_log_likelihood(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Compute the logarithm of a normal distribution's mass in the bin of each value.

    Args:
        x: Values, meant to be of 256 levels in [-1, 1]; the outermost bins extend to infinity.
        mean: Means, as `x`.
        log_std: Logarithms of the standard deviations.

    Returns:
        As `x`, elementwise.
    """
    half_bin = 1 / 255
    inverse_std = (-log_std).exp()
    upper, lower = inverse_std * (x - mean + half_bin), inverse_std * (x - mean - half_bin)
    inside = (torch.special.ndtr(upper) - torch.special.ndtr(lower)).clamp(min=1e-12).log()
    log_below, log_above = torch.special.log_ndtr(upper), torch.special.log_ndtr(-lower)
    return torch.where(x < -0.999, log_below, torch.where(x > 0.999, log_above, inside))


def _like_data(values: Tensor, data: Tensor) -> Tensor:
    """Reshape values of each sample [B], or frame [B, T], so that they broadcast over data [B, C, *grid]."""
    if values.ndim == 2:
        return values[:, None, :, None, None]
    return values.view(-1, *[1] * (data.ndim - 1))


def _at(table: Tensor, steps: Tensor) -> Tensor:
    """Read a table [1000] at steps of any shape, float32."""
    return table.to(steps.device, non_blocking=True)[steps].float()  # else each table waits for the device


def _mean_square(error: Tensor) -> Tensor:
    return error.square().flatten(1).mean(1)
