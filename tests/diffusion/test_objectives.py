"""Losses against closed forms, and what they are minimised by."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from headmix_vision.diffusion import ObjectiveConfig, create_objective
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS, Ddpm, discretized_log_likelihood, shifted


def draw(count=4000, shape=(1, 2, 2), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=generator), torch.randn(count, *shape, generator=generator)


def test_flow_target_is_the_velocity_of_the_straight_path():
    x0, noise = draw(8)
    objective = create_objective(ObjectiveConfig())
    times = torch.linspace(0, 1000, 8)
    seen = {}

    def predict(x, t):
        seen["x"], seen["t"] = x, t
        return noise - x0

    assert not objective.losses(predict, x0, times, noise).any()
    level = (times / 1000).view(-1, 1, 1, 1)
    torch.testing.assert_close(seen["x"], (1 - level) * x0 + level * noise)
    assert torch.equal(seen["t"], times)
    assert objective.losses(lambda x, t: noise - x0 + 2, x0, times, noise).allclose(torch.tensor(4.0))


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_flow_loss_of_the_best_predictor_is_the_conditional_variance(level):
    """For x0 ~ N(0, s²) the velocity given x is normal, with mean and variance in closed form."""
    s = 0.5
    x0, noise = draw()
    x0 = s * x0
    variance_x = (1 - level) ** 2 * s**2 + level**2
    slope = (level - (1 - level) * s**2) / variance_x
    expected = 1 + s**2 - slope**2 * variance_x
    objective = create_objective(ObjectiveConfig())
    times = torch.full((len(x0),), 1000 * level)
    loss = objective.losses(lambda x, t: slope * x, x0, times, noise).mean().item()
    assert loss == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_ddpm_targets(prediction):
    x0, noise = draw(6)
    objective = create_objective(ObjectiveConfig(kind="ddpm", prediction=prediction))
    times = torch.tensor([0.0, 1, 10, 100, 500, 999])

    def predict(x, t):
        angle = torch.acos(objective.alphas_cumprod.sqrt()[t.long()]).float().view(-1, 1, 1, 1)
        torch.testing.assert_close(x, angle.cos() * x0 + angle.sin() * noise)
        return noise if prediction == "epsilon" else angle.cos() * noise - angle.sin() * x0

    assert objective.losses(predict, x0, times, noise).abs().max() < 1e-10


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("step", [1, 2, 300, 999])
def test_variational_term_is_the_divergence_of_two_gaussians(prediction, step):
    """Against torch's KL between the true and the model's step, for a prediction and a variance that are off."""
    x0, noise = draw(5)
    generator = torch.Generator().manual_seed(3)
    error, fraction = 0.3 * torch.randn(x0.shape, generator=generator), torch.rand(x0.shape, generator=generator)
    objective = create_objective(ObjectiveConfig(kind="ddpm", prediction=prediction, learned_variance=True))
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    bar = torch.cumprod(1 - betas, 0)
    signal, sigma = bar[step].sqrt(), (1 - bar[step]).sqrt()
    x = signal * x0.double() + sigma * noise.double()
    target = noise if prediction == "epsilon" else (signal * noise - sigma * x0).float()
    times = torch.full((5,), float(step))
    total = objective.losses(lambda x, t: torch.cat([target + error, 2 * fraction - 1], 1), x0, times, noise)

    wrong = (target + error).double()
    x0_hat = (x - sigma * wrong) / signal if prediction == "epsilon" else signal * x - sigma * wrong
    before = bar[step - 1]
    posterior = betas[step] * (1 - before) / (1 - bar[step])

    def mean(start):
        return (before.sqrt() * betas[step] * start + (1 - betas[step]).sqrt() * (1 - before) * x) / (1 - bar[step])

    variance = torch.exp(fraction * betas[step].log() + (1 - fraction) * posterior.log())
    divergence = kl_divergence(Normal(mean(x0.double()), posterior.sqrt()), Normal(mean(x0_hat), variance.sqrt()))
    expected = error.square().flatten(1).mean(1) + divergence.flatten(1).mean(1) / math.log(2)
    torch.testing.assert_close(total.double(), expected.double(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_variational_term_of_the_first_step_is_the_likelihood_of_the_bins(prediction):
    """At step 0 the model's step ends in data, whose 256 levels are bins of a normal distribution."""
    x0, noise = draw(5)
    x0 = ((x0.clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1
    assert (x0 == -1).any() and (x0 == 1).any()
    generator = torch.Generator().manual_seed(3)
    error, fraction = 0.3 * torch.randn(x0.shape, generator=generator), torch.rand(x0.shape, generator=generator)
    objective = create_objective(ObjectiveConfig(kind="ddpm", prediction=prediction, learned_variance=True))
    first, second = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)[:2]
    signal, sigma = (1 - first).sqrt(), first.sqrt()
    x = signal * x0.double() + sigma * noise.double()
    target = noise.double() if prediction == "epsilon" else signal * noise.double() - sigma * x0.double()
    output = torch.cat([(target + error).float(), 2 * fraction - 1], 1)
    total = objective.losses(lambda x, t: output, x0, torch.zeros(5), noise)

    wrong = output[:, :1].double()
    mean = (x - sigma * wrong) / signal if prediction == "epsilon" else signal * x - sigma * wrong
    # the posterior's variance, zero at step 0, is replaced by the variance of step 1
    lower = second * first / (1 - (1 - first) * (1 - second))
    std = torch.exp((fraction * first.log() + (1 - fraction) * lower.log()) / 2)
    normal, bins = Normal(mean, std), x0.double()
    above = torch.where(x0 > 0.999, 1.0, normal.cdf(bins + 1 / 255))
    below = torch.where(x0 < -0.999, 0.0, normal.cdf(bins - 1 / 255))
    bits = -(above - below).clamp(min=1e-12).log() / math.log(2)
    expected = error.double().square().flatten(1).mean(1) + bits.flatten(1).mean(1)
    assert total.isfinite().all() and (bits > 0.1).any()
    torch.testing.assert_close(total.double(), expected, rtol=2e-3, atol=2e-4)


def test_variational_term_leaves_the_mean_alone():
    x0, noise = draw(4)
    objective = create_objective(ObjectiveConfig(kind="ddpm", learned_variance=True))
    mean, variance = noise.clone().requires_grad_(), torch.zeros_like(noise, requires_grad=True)
    times = torch.tensor([0.0, 1, 500, 999])
    objective.losses(lambda x, t: torch.cat([mean, variance], 1), x0, times, noise).sum().backward()
    assert not mean.grad.any()  # the mean square is at its minimum there
    assert variance.grad.isfinite().all() and variance.grad.flatten(1).any(1).all()


def test_bins_of_the_likelihood_are_a_distribution():
    levels = torch.linspace(-1, 1, 256, dtype=torch.float64)
    for mean, std in ((0.0, 0.1), (0.9, 0.5), (-1.2, 0.01)):
        log = discretized_log_likelihood(levels, torch.tensor(mean).double(), torch.tensor(std).log().double())
        assert log.isfinite().all()
        assert log.exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_times():
    torch.manual_seed(0)
    uniform = create_objective(ObjectiveConfig()).draw_times(20000) / NUM_TIMESTEPS
    assert uniform.min() >= 0 and uniform.max() <= 1 and abs(uniform.mean() - 0.5) < 0.01
    normal = create_objective(ObjectiveConfig(times="logit_normal", logit_mean=-0.5, logit_std=0.7)).draw_times(20000)
    logits = (normal / NUM_TIMESTEPS).logit()
    assert abs(logits.mean() + 0.5) < 0.02 and abs(logits.std() - 0.7) < 0.02
    moved = create_objective(ObjectiveConfig(shift=3.0)).draw_times(20000) / NUM_TIMESTEPS
    assert abs(moved.median() - 0.75) < 0.02 and shifted(torch.tensor(1.0), 3.0) == 1
    discrete = create_objective(ObjectiveConfig(kind="ddpm")).draw_times(20000)
    assert set(discrete.tolist()) <= set(map(float, range(1000))) and len(discrete.unique()) > 990


def test_prefixes_of_clips_stay_clean():
    torch.manual_seed(0)
    times = create_objective(ObjectiveConfig(clean_prefix=0.6)).draw_times(20000, frames=6, tubelet=2)
    assert times.shape == (20000, 6)
    lengths = (times == 0).sum(1)
    assert torch.equal(times, times.amax(1, keepdim=True) * (torch.arange(6) >= lengths[:, None]))
    assert set(lengths.tolist()) == {0, 2, 4}  # multiples of the tubelet, never all frames
    assert [(lengths == n).float().mean().item() for n in (0, 2, 4)] == pytest.approx([0.4, 0.3, 0.3], abs=0.02)
    objective = create_objective(ObjectiveConfig(clean_prefix=1.0))
    assert objective.draw_times(5, frames=1).count_nonzero() == 5  # a still has nothing to go on from
    assert (objective.draw_times(999, frames=2) == 0).sum(1).eq(1).all()
    assert objective.draw_times(5).shape == create_objective(ObjectiveConfig()).draw_times(5, frames=6).shape == (5,)


def test_known_frames_may_be_noisy():
    torch.manual_seed(0)
    objective = create_objective(ObjectiveConfig(clean_prefix=1.0, prefix_noise=0.3))
    times = objective.draw_times(20000, frames=4)
    level, known = times[:, -1], times[:, 0]
    assert torch.equal(times, times.sort(1).values) and all(len(clip.unique()) <= 2 for clip in times[:100])
    assert (known <= level).all() and known.max() <= 300
    assert (known[level > 300] / 300).mean() == pytest.approx(0.5, abs=0.01)

    x0, noise = draw(2, (3, 4, 2, 2))
    times = torch.tensor([[100.0, 100, 400, 400], [300, 500, 500, 500]])
    error = torch.tensor([[9.0, 9, 1, 2], [9, 1, 2, 3]])[:, None, :, None, None]
    losses = objective.losses(lambda x, t: noise - x0 + error, x0, times, noise)
    torch.testing.assert_close(losses, torch.tensor([2.5, 14 / 3]))


def test_clean_frames_count_nothing():
    x0, noise = draw(2, (3, 4, 2, 2))
    times = torch.tensor([[0.0, 0, 0, 400], [0, 500, 500, 500]])
    objective = create_objective(ObjectiveConfig(clean_prefix=0.5))
    seen = {}

    def predict(x, t):
        seen["x"], seen["t"] = x, t
        error = torch.tensor([[9.0, 9, 9, 2], [9, 1, 2, 3]])
        return noise - x0 + error[:, None, :, None, None]

    torch.testing.assert_close(objective.losses(predict, x0, times, noise), torch.tensor([4.0, 14 / 3]))
    assert torch.equal(seen["t"], times) and torch.equal(seen["x"][0, :, :3], x0[0, :, :3])
    torch.testing.assert_close(seen["x"][0, :, 3], 0.6 * x0[0, :, 3] + 0.4 * noise[0, :, 3])
    assert torch.equal(objective.losses(predict, x0, 0 * times, noise), torch.zeros(2))


def test_one_noise_level_may_be_said_of_each_frame():
    x0, noise = draw(3, (2, 4, 3, 3))
    times, objective = torch.tensor([100.0, 500, 900]), create_objective(ObjectiveConfig())
    expected = objective.losses(lambda x, t: x.sin(), x0, times, noise)
    by_frame = objective.losses(lambda x, t: x.sin(), x0, times[:, None].expand(3, 4), noise)
    torch.testing.assert_close(by_frame, expected)


def test_ddpm_is_the_process_of_the_scheduler():
    from diffusers import DDPMScheduler

    objective = create_objective(ObjectiveConfig(kind="ddpm"))
    assert isinstance(objective, Ddpm)
    scheduler = DDPMScheduler(beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
    torch.testing.assert_close(objective.alphas_cumprod.float(), scheduler.alphas_cumprod, rtol=1e-4, atol=0)
    x0, noise = torch.randn(2, 3, 1, 4, 4).unbind()
    times = torch.tensor([0.0, 500, 999])
    expected = scheduler.add_noise(x0, noise, times.long())
    torch.testing.assert_close(objective.add_noise(x0, times, noise), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "edm"}, "objective.kind must be one of"),
        ({"times": "cosine"}, "objective.times"),
        ({"prediction": "x0"}, "objective.prediction"),
        ({"shift": 0.0}, "must be positive"),
        ({"learned_variance": True}, "needs objective.kind=ddpm"),
        ({"beta_start": 0.5}, "beta_start <= beta_end"),
        ({"clean_prefix": 1.5}, r"clean_prefix must be in \[0, 1\], got 1.5"),
        ({"clean_prefix": -0.5}, r"clean_prefix must be in \[0, 1\], got -0.5"),
        ({"clean_prefix": 0.5, "prefix_noise": 2.0}, r"prefix_noise must be in \[0, 1\], got 2.0"),
        ({"prefix_noise": 0.5}, "prefix_noise is of known first frames: it needs objective.clean_prefix"),
        ({"kind": "ddpm", "clean_prefix": 0.5}, "clean_prefix needs objective.kind=flow"),
    ],
)
def test_wrong_options_are_refused_and_their_bounds_are_not(options, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**options)
    ObjectiveConfig(kind="ddpm", beta_start=0.01, beta_end=0.01)
    ObjectiveConfig(clean_prefix=1.0, prefix_noise=1.0, prefix_class_dropout=1.0)
