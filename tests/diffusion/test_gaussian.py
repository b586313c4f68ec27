"""Every sampler on Gaussian data, whose exact network is known, against its formula in float64.

Samplers work on a path of points from noise to data. A point holds the scales alpha of the data and sigma of the noise,
and the noise level that guidance goes by. B samples, C channels, one place; T frames of clips.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from torch import Tensor

from headmix_vision.diffusion import (
    SCHEDULER_NAMES,
    Guidance,
    HeadMixDiTPipeline,
    HeadMixVideoDiTPipeline,
    ObjectiveConfig,
    create_scheduler,
    denoise,
)
from headmix_vision.diffusion.denoising import set_steps, spaced_times
from headmix_vision.models import HeadMixDiT, HeadMixVideoDiT

MEAN, STD = {0: 0.4, 1: -0.2}, {0: 0.3, 1: 0.5}  # by class, of which 1 is the null class
LEARNED_VARIANCE = 0.3  # output of the network, from -1 (lower bound) to 1 (upper bound)
ALPHAS_CUMPROD = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
COUNTS = (5, 7, 50, 128, 400, 600, 1000)
FLOW, DDPM, V = ObjectiveConfig(), ObjectiveConfig(kind="ddpm"), ObjectiveConfig(kind="ddpm", prediction="v")
FLOW_NAMES, DDPM_NAMES = ("euler", "heun", "dpm++", "unipc"), ("ddim", "ddpm", "dpm++", "unipc")
CASES = [*((FLOW, name) for name in FLOW_NAMES), *((DDPM, name) for name in DDPM_NAMES)]
IDS = [f"{objective.kind}-{name}" for objective, name in CASES]


class Point(NamedTuple):
    alpha: float
    sigma: float
    level: float


Data = Callable[[np.ndarray, Point], np.ndarray]
"""Samples at a point to the expectation of their data."""


def path(name: str, objective: ObjectiveConfig, steps: int, spacing: str | None = None) -> list[Point]:
    """The points that a sampler is documented to visit."""
    if objective.kind == "flow":
        levels = {
            "euler": np.linspace(1, 0, steps + 1),
            "heun": np.append(np.linspace(1, 0.001, steps), 0),
            "dpm++": np.linspace(0.999, 0, steps + 1),
            "unipc": np.append(np.linspace(1, 0.001, steps + 1)[:-1], 0),
        }[name]
        if name == "unipc":
            levels[0] = np.float32(1 - 1e-6)  # log(alpha) has to be finite
        levels = objective.shift * levels / (1 + (objective.shift - 1) * levels)
        return [Point(1 - level, level, round(level, 9)) for level in levels.tolist()]
    if name in ("dpm++", "unipc"):
        times = np.linspace(0, 999, steps + 1).round()[:0:-1]
    elif (spacing or {"ddim": "trailing", "ddpm": "linspace"}[name]) == "trailing":
        times = [round(1000 - 1000 * i / steps) - 1 for i in range(steps)]
    else:
        times = [round(999 - 999 * i / (steps - 1)) for i in range(steps)]
    return [*(ddpm_point(int(time)) for time in times), Point(1.0, 0.0, 0.0)]


def ddpm_point(time: int) -> Point:
    return Point(math.sqrt(ALPHAS_CUMPROD[time]), math.sqrt(1 - ALPHAS_CUMPROD[time]), time / 1000)


def data_of_class(label: int) -> Data:
    mean, variance = MEAN[label], STD[label] ** 2

    def data(x: np.ndarray, at: Point) -> np.ndarray:
        gain = at.alpha * variance / (at.alpha**2 * variance + at.sigma**2)
        return mean + gain * (x - at.alpha * mean)

    return data


def first_order(x: np.ndarray, data: np.ndarray, here: Point, there: Point) -> np.ndarray:
    """Euler's step of a flow and DDIM's step (arXiv 2010.02502, equation 12), which are the same."""
    return there.alpha * data + there.sigma * (x - here.alpha * data) / here.sigma


def sample_first_order(x: np.ndarray, points: list[Point], data: Data, noise: Any) -> np.ndarray:
    for here, there in itertools.pairwise(points):
        x = first_order(x, data(x, here), here, there)
    return x


def sample_heun(x: np.ndarray, points: list[Point], data: Data, noise: Any) -> np.ndarray:
    for here, there in itertools.pairwise(points):
        velocity = (x - data(x, here)) / here.sigma
        after = x + (there.sigma - here.sigma) * velocity
        if there.sigma:
            velocity = (velocity + (after - data(after, there)) / there.sigma) / 2
        x = x + (there.sigma - here.sigma) * velocity
    return x


def log_snr(at: Point) -> float:
    return math.log(at.alpha / at.sigma) if at.sigma else math.inf


def extrapolated(data: list[np.ndarray], points: list[Point], i: int) -> np.ndarray:
    """Data for step i of second order (arXiv 2211.01095, algorithm 2), of first order at both ends."""
    if i == 0 or not points[i + 1].sigma:
        return data[i]
    before, here, there = map(log_snr, points[i - 1 : i + 2])
    return data[i] + (data[i] - data[i - 1]) * (there - here) / (here - before) / 2


def sample_dpm(x: np.ndarray, points: list[Point], data: Data, noise: Any) -> np.ndarray:
    seen: list[np.ndarray] = []
    for i, (here, there) in enumerate(itertools.pairwise(points)):
        seen.append(data(x, here))
        x = first_order(x, extrapolated(seen, points, i), here, there)
    return x


def sample_unipc(x: np.ndarray, points: list[Point], data: Data, noise: Any) -> np.ndarray:
    """As DPM++, but each step is repeated with the data at its end (arXiv 2302.04867, B2(h) = exp(h) - 1)."""
    seen: list[np.ndarray] = []
    before = x
    for i, (here, there) in enumerate(itertools.pairwise(points)):
        seen.append(data(x, here))
        if i == 1:
            x = first_order(before, (seen[0] + seen[1]) / 2, points[0], here)
        elif i > 1:
            h = log_snr(here) - log_snr(points[i - 1])
            ratio = (log_snr(points[i - 2]) - log_snr(points[i - 1])) / h
            base = math.expm1(-h)
            first = base / -h - 1
            moments = [first / base, 2 * (first / -h - 0.5) / base]
            past, now = np.linalg.solve([[1, 1], [ratio, 1]], moments)
            mean = seen[i - 1] + past * (seen[i - 2] - seen[i - 1]) / ratio + now * (seen[i] - seen[i - 1])
            x = first_order(before, mean, points[i - 1], here)
        before = x
        x = first_order(x, extrapolated(seen, points, i), here, there)
    return x


def ancestral(here: Point, there: Point, learned: float | None) -> tuple[float, float, float]:
    """Factors of data and samples, and deviation of the noise, of DDPM's step (arXiv 2006.11239, equation 7)."""
    beta = 1 - (here.alpha / there.alpha) ** 2
    of_data = there.alpha * beta / here.sigma**2
    of_x = here.alpha / there.alpha * there.sigma**2 / here.sigma**2
    variance = beta * there.sigma**2 / here.sigma**2
    if learned is not None and variance:  # arXiv 2102.09672, equation 15
        variance = beta ** ((1 + learned) / 2) * variance ** ((1 - learned) / 2)
    return of_data, of_x, math.sqrt(variance)


def sample_ddpm(
    x: np.ndarray, points: list[Point], data: Data, noise: Callable[[], np.ndarray], learned: float | None = None
) -> np.ndarray:
    for here, there in itertools.pairwise(points):
        of_data, of_x, deviation = ancestral(here, there, learned)
        x = of_data * data(x, here) + of_x * x
        if deviation:
            x = x + deviation * noise()
    return x


FORMULAS: dict[str, Callable[..., np.ndarray]] = {
    "euler": sample_first_order,
    "heun": sample_heun,
    "dpm++": sample_dpm,
    "unipc": sample_unipc,
    "ddim": sample_first_order,
    "ddpm": sample_ddpm,
}


def prediction(objective: ObjectiveConfig, x: Tensor, times: Tensor, data: Data) -> Tensor:
    """The exact output of a network for x [B, ...] and times, all of them equal."""
    time, noisy = times.flatten()[0].item(), x.double().numpy()
    at = Point(1 - time / 1000, time / 1000, 0) if objective.kind == "flow" else ddpm_point(round(time))
    known = data(noisy, at)
    noise = (noisy - at.alpha * known) / at.sigma
    if objective.kind == "flow":
        output = noise - known
    else:
        output = at.alpha * noise - at.sigma * known if objective.prediction == "v" else noise
    return torch.from_numpy(output).float()


def network(objective: ObjectiveConfig) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The exact network, of the first class where there are no labels."""

    def predict(x: Tensor, times: Tensor, labels: Tensor | None) -> Tensor:
        output = prediction(objective, x, times, data_of_class(0))
        if labels is not None:
            other = prediction(objective, x, times, data_of_class(1))
            output = torch.where(labels.view(-1, *[1] * (x.ndim - 1)) == 1, other, output)
        return (
            torch.cat([output, torch.full_like(output, LEARNED_VARIANCE)], 1) if objective.learned_variance else output
        )

    return predict


def draws(shape: torch.Size) -> Callable[[], np.ndarray]:
    """What a sampler draws from a generator of seed 1."""
    generator = torch.Generator().manual_seed(1)
    return lambda: torch.randn(shape, generator=generator).numpy()


def formula(
    name: str,
    objective: ObjectiveConfig,
    start: Tensor,
    steps: int,
    data: Data | None = None,
    spacing: str | None = None,
    **options: Any,
) -> Tensor:
    """The samples that a sampler should draw from a start."""
    points, data = path(name, objective, steps, spacing), data or data_of_class(0)
    return torch.from_numpy(FORMULAS[name](start.double().numpy(), points, data, draws(start.shape), **options)).float()


STARTS = torch.tensor([0.0, 1.0, -2.0]).view(3, 1, 1)
CLOSE = {"rtol": 1e-4, "atol": 3e-5}


def compare(name: str, objective: ObjectiveConfig, steps: int) -> Tensor:
    """Draws samples from `STARTS`, and compares them with the formula's."""
    generator = torch.Generator().manual_seed(1)
    drawn = denoise(network(objective), STARTS, create_scheduler(name, objective), steps, generator=generator)
    torch.testing.assert_close(drawn, formula(name, objective, STARTS, steps), **CLOSE)
    return drawn


@pytest.mark.parametrize(("objective", "name"), CASES, ids=IDS)
def test_samples_are_those_of_the_formula(objective: ObjectiveConfig, name: str) -> None:
    for steps in COUNTS:
        if objective.kind == "ddpm" and name in ("dpm++", "unipc") and steps == 1000:
            with pytest.raises(ValueError, match="999 different times"):
                compare(name, objective, steps)
            continue
        drawn = compare(name, objective, steps)
        if name != "ddpm" and steps >= 50:
            deviation = float(drawn[1] - drawn[0])
            assert deviation / STD[0] == pytest.approx(1, abs=5 / steps + 2e-3)


def test_all_schedulers_are_compared() -> None:
    assert {name for _, name in CASES} == set(SCHEDULER_NAMES) == set(FORMULAS)


@pytest.mark.parametrize("name", DDPM_NAMES)
def test_a_network_may_predict_v(name: str) -> None:
    for steps in (7, 128):
        compare(name, V, steps)


@pytest.mark.parametrize("name", FLOW_NAMES)
@pytest.mark.parametrize("shift", [3.0, 10.0])
def test_noise_levels_may_be_shifted(name: str, shift: float) -> None:
    for steps in (7, 600):  # with 600 the first times of dpm++ and unipc are equal once rounded
        compare(name, ObjectiveConfig(shift=shift), steps)


@pytest.mark.parametrize(
    ("objective", "name", "steps", "order"),
    [
        (FLOW, "euler", 100, 1),
        (FLOW, "heun", 25, 2),
        (FLOW, "dpm++", 250, 2),
        (FLOW, "unipc", 50, 2),
        (DDPM, "ddim", 100, 1),
        (DDPM, "dpm++", 20, 2),  # with more steps the last one, of first order, has the largest error
        (DDPM, "unipc", 20, 2),
    ],
)
def test_order_of_convergence(objective: ObjectiveConfig, name: str, steps: int, order: int) -> None:
    errors = []
    for count in (steps, 2 * steps):
        drawn = denoise(network(objective), STARTS, create_scheduler(name, objective), count)
        start = path(name, objective, count)[0]
        exact = STD[0] / math.hypot(start.alpha * STD[0], start.sigma)
        errors.append(abs(float(drawn[1] - drawn[0]) - exact))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.3)


@pytest.mark.parametrize("learned", [False, True])
def test_ddpm_has_the_variance_of_its_process(learned: bool) -> None:
    objective = ObjectiveConfig(kind="ddpm", learned_variance=learned)
    variance = 1.0
    for here, there in itertools.pairwise(path("ddpm", objective, 128)):
        of_data, of_x, deviation = ancestral(here, there, LEARNED_VARIANCE if learned else None)
        gain = here.alpha * STD[0] ** 2 / (here.alpha**2 * STD[0] ** 2 + here.sigma**2)
        variance = (of_data * gain + of_x) ** 2 * variance + deviation**2
    noise = torch.randn(1, 1, 2**16, generator=torch.Generator().manual_seed(0))
    scheduler = create_scheduler("ddpm", objective)
    drawn = denoise(network(objective), noise, scheduler, 128, generator=torch.Generator().manual_seed(2))
    assert drawn.std().item() == pytest.approx(math.sqrt(variance), rel=0.01)  # standard error 0.3 %
    assert drawn.mean().item() == pytest.approx(MEAN[0], abs=0.006)


@pytest.mark.parametrize("guidance", [Guidance(2.5), Guidance(2.5, (0.2, 0.7)), Guidance(2.5, (0, 0.8), "first_three")])
@pytest.mark.parametrize(
    ("objective", "name"),
    [*CASES, (ObjectiveConfig(kind="ddpm", learned_variance=True), "ddpm")],
    ids=[*IDS, "learned"],
)
def test_guidance(objective: ObjectiveConfig, name: str, guidance: Guidance) -> None:
    """Guided samples of 4 channels: predictions are linear in the data, so that data are guided as they are."""
    guided = np.array([1, 1, 1, guidance.channels == "all"]).reshape(1, 4, 1)

    def data(x: np.ndarray, at: Point) -> np.ndarray:
        conditional, unconditional = data_of_class(0)(x, at), data_of_class(1)(x, at)
        acts = guidance.interval[0] <= at.level <= guidance.interval[1]
        return conditional + acts * guided * (guidance.scale - 1) * (conditional - unconditional)

    noise = torch.randn(2, 4, 1, generator=torch.Generator().manual_seed(0))
    labels, options = torch.zeros(2, dtype=torch.long), {"guidance": guidance, "null_label": 1}
    for steps in (7, 50):
        generator = torch.Generator().manual_seed(1)
        scheduler = create_scheduler(name, objective)
        drawn = denoise(network(objective), noise, scheduler, steps, labels=labels, generator=generator, **options)
        more = {"learned": LEARNED_VARIANCE} if objective.learned_variance else {}
        torch.testing.assert_close(drawn, formula(name, objective, noise, steps, data, **more), rtol=1e-4, atol=1e-4)


CORRELATION = 0.8  # of neighbouring frames


def frames_after(first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [B, 2] and covariance [2, 2] of two frames, given the frame [B] before them."""
    powers = np.array([CORRELATION, CORRELATION**2])
    covariance = np.array([[1, CORRELATION], [CORRELATION, 1]]) - np.outer(powers, powers)
    return MEAN[0] + powers * (first[:, None] - MEAN[0]), STD[0] ** 2 * covariance


def data_after(first: np.ndarray) -> Data:
    mean, covariance = frames_after(first)

    def data(x: np.ndarray, at: Point) -> np.ndarray:
        total = at.alpha**2 * covariance + at.sigma**2 * np.eye(2)
        return mean + at.alpha * (x - at.alpha * mean) @ np.linalg.solve(total, covariance)

    return data


def continue_clips(x: Tensor, times: Tensor) -> Tensor:
    """The exact network of clips [B, 1, 3, ...], at times [B, 3], whose first frame is known."""
    assert not times[:, 0].any() and torch.equal(times[:, 1], times[:, 2])
    first, rest = x.flatten(1)[:, 0], x.flatten(1)[:, 1:]
    known = prediction(FLOW, rest, times[:, 1], data_after(first.double().numpy()))
    return torch.cat([torch.full((len(x), 1), 9.0), known], 1).view_as(x)


@pytest.mark.parametrize("name", FLOW_NAMES)
def test_clips_go_on_from_a_known_frame(name: str) -> None:
    noise = torch.tensor([[7, 0, 0], [7, 1, 0], [7, 0, 1]]).float().view(3, 1, 3, 1, 1)
    first = np.array([0.9])
    mean, covariance = frames_after(first)
    for steps in (7, 128):
        scheduler = create_scheduler(name, FLOW)
        prefix = torch.full((1, 1, 1, 1, 1), 0.9)
        drawn = denoise(lambda x, times, labels: continue_clips(x, times), noise, scheduler, steps, prefix=prefix)
        assert (drawn[:, :, 0] == prefix).all()
        rest = drawn[:, 0, 1:, 0, 0]
        torch.testing.assert_close(rest, formula(name, FLOW, noise[:, 0, 1:, 0, 0], steps, data_after(first)), **CLOSE)
    gain = (rest[1:] - rest[0]).numpy()
    np.testing.assert_allclose(gain.T @ gain, covariance, rtol=0.05)
    np.testing.assert_allclose(rest[:1], mean, rtol=0.02)


class GaussianDiT(HeadMixDiT):
    """A model of images whose output is the exact one."""

    def forward(self, x: Tensor, t: Any, y: Tensor | None = None) -> Tensor:
        return network(self.objective)(x, t, y)


class GaussianVideoDiT(HeadMixVideoDiT):
    """A model of clips whose output is the exact one."""

    def forward(self, x: Tensor, t: Any, y: Tensor | None = None, frame_rate: Any = None) -> Tensor:
        return continue_clips(x, t)


TINY: dict[str, Any] = {"core": "softmax", "in_channels": 1, "embed_dim": 16, "depth": 1, "num_heads": 1}


@pytest.mark.parametrize(("objective", "name"), CASES, ids=IDS)
def test_the_pipeline_draws_the_same_samples(objective: ObjectiveConfig, name: str) -> None:
    model = GaussianDiT(input_size=2, num_classes=1, patch_size=2, **TINY).eval()
    model.objective = objective
    pipeline = HeadMixDiTPipeline(model, create_scheduler(None, objective), objective=asdict(objective))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.set_scheduler(name)
    pipeline.scheduler.register_to_config(**({"clip_sample": False} if name in ("ddim", "ddpm") else {}))
    noise = torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    for steps in (7, 128):
        options = {"latents": noise, "generator": torch.Generator().manual_seed(1), "output_type": "latent"}
        drawn = pipeline([0, 0], num_inference_steps=steps, **options).images
        torch.testing.assert_close(drawn, formula(name, objective, noise, steps), **CLOSE)


def test_the_pipeline_of_videos_goes_on_from_a_known_frame() -> None:
    model = GaussianVideoDiT(input_size=(3, 1, 1), num_classes=0, patch_size=(1, 1, 1), **TINY).eval()
    pipeline = HeadMixVideoDiTPipeline(model, create_scheduler("dpm++", FLOW), objective=asdict(FLOW))
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(2, 1, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    prefix = torch.tensor([0.2, 0.7]).view(2, 1, 1, 1, 1)
    options = {"latents": noise, "prefix": prefix, "output_type": "latent"}
    drawn = pipeline(num_videos=2, num_inference_steps=7, **options).frames
    data = data_after(2 * prefix.flatten().double().numpy() - 1)
    torch.testing.assert_close(
        drawn.flatten(1)[:, 1:], formula("dpm++", FLOW, noise.flatten(1)[:, 1:], 7, data), **CLOSE
    )


def test_times_fall_from_noise_to_data_at_every_number_of_steps() -> None:
    for steps in range(1, 1001):
        times = spaced_times("trailing", steps)
        assert len(times) == steps and times[0] == 999 and times[-1] >= 0
        assert all(before > after for before, after in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("scheduler", "steps", "message"),
    [
        (create_scheduler("ddpm", DDPM), 1, "ddpm with linspace spacing takes times 0 to 0 in 1 steps"),
        (create_scheduler("ddim", DDPM, spacing="leading"), 128, r"never 128; nearest: 125"),
        (DDIMScheduler(timestep_spacing="even"), 5, "timestep spacing must be one of .* got 'even'"),
        (DDPMScheduler(timestep_spacing="trailing", variance_type="learned_range"), 5, "must end at time 0"),
        (DDPMScheduler(timestep_spacing="leading", steps_offset=1, variance_type="learned"), 5, "must end at time 0"),
        (DPMSolverMultistepScheduler(timestep_spacing="leading"), 334, "takes times 668 to 2 in 334 steps"),
    ],
)
def test_steps_that_do_not_lead_from_noise_to_data_are_refused(scheduler: Any, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_steps(scheduler, steps, "cpu")
