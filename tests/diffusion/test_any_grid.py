"""Objectives, guidance, the denoising loop and the latent scale take [B, C, *grid]: sequences, images and clips."""

import pytest
import torch

from headmix_vision.diffusion import Guidance, ObjectiveConfig, create_objective, create_scheduler, denoise
from headmix_vision.models.autoencoders import LatentScale

OBJECTIVES = [
    ObjectiveConfig(),
    ObjectiveConfig(kind="ddpm"),
    ObjectiveConfig(kind="ddpm", prediction="v"),
    ObjectiveConfig(kind="ddpm", learned_variance=True),
]
GRIDS = [(24,), (6, 4), (3, 2, 4)]


def network(x, t, labels):
    """Any elementwise function of x, time and label, which has no idea of the grid."""
    scale = (1 + t / 1000 + 0.1 * labels).view(-1, *[1] * (x.ndim - 1))
    return (scale * x).tanh()


@pytest.mark.parametrize("config", OBJECTIVES, ids=lambda config: f"{config.kind}-{config.prediction}")
def test_losses_do_not_depend_on_the_shape_of_the_grid(config):
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 5, 4, 24, generator=generator)
    times, labels = torch.tensor([0.0, 1, 300, 700, 999]), torch.arange(5)

    def predict(x, t):
        output = network(x, t, labels)
        return torch.cat([output, output.flip(0)], 1) if config.learned_variance else output

    def losses(grid):
        return create_objective(config).losses(predict, x0.view(5, 4, *grid), times, noise.view(5, 4, *grid))

    expected = losses((6, 4))
    assert torch.equal(losses((1, 6, 4)), expected)  # a clip of one frame is an image
    for grid in GRIDS:
        torch.testing.assert_close(losses(grid), expected)


def test_guidance_of_a_clip_is_that_of_its_frames():
    conditional, unconditional = torch.randn(2, 2, 4, 3, 5, 6).unbind()
    for channels in ("all", "first_three"):
        guidance = Guidance(2.5, channels=channels)
        clip = guidance.combine(conditional, unconditional)
        for frame in range(3):
            expected = guidance.combine(conditional[:, :, frame], unconditional[:, :, frame])
            assert torch.equal(clip[:, :, frame], expected)


@pytest.mark.parametrize(
    ("config", "scheduler"),
    [
        *((OBJECTIVES[0], name) for name in ("euler", "heun", "dpm++", "unipc")),
        *((OBJECTIVES[1], name) for name in ("ddim", "ddpm", "dpm++", "unipc")),
        (OBJECTIVES[3], "ddpm"),
    ],
)
def test_the_loop_does_not_depend_on_the_shape_of_the_grid(config, scheduler):
    noise = torch.randn(2, 4, 24, generator=torch.Generator().manual_seed(0))

    def predict(x, t, labels):
        output = network(x, t, labels)
        return torch.cat([output, 0.1 * output], 1) if config.learned_variance else output

    def samples(grid):
        steps = []
        result = denoise(
            predict,
            noise.view(2, 4, *grid),
            create_scheduler(scheduler, config),
            5,
            labels=torch.tensor([0, 2]),
            null_label=3,
            guidance=Guidance(1.5, (0.1, 0.9), "first_three"),
            generator=[torch.Generator().manual_seed(i) for i in range(2)],
            step_end=lambda i, t, x: steps.append(x.shape) or x,
        )
        assert result.shape == (2, 4, *grid) and set(steps) == {result.shape} and len(steps) >= 5
        return result

    expected = samples((6, 4))
    assert torch.equal(samples((1, 6, 4))[:, :, 0], expected)
    for grid in GRIDS:
        torch.testing.assert_close(samples(grid).flatten(2), expected.flatten(2))


def test_the_loop_goes_on_with_what_a_step_end_returns():
    scheduler = create_scheduler("euler", ObjectiveConfig())
    noise, labels = torch.ones(1, 2, 2, 3, 3), torch.zeros(1)
    result = denoise(network, noise, scheduler, 2, labels=labels, step_end=lambda i, t, x: 0 * x)
    assert not result.any()
    with pytest.raises(ValueError, match=r"guidance scale 2\.0 needs labels and a null label"):
        denoise(network, noise, scheduler, 2, labels=labels, guidance=Guidance(2.0))


@pytest.mark.parametrize("grid", GRIDS)
def test_latents_are_scaled_by_channel(grid):
    latents = torch.randn(3, 2, *grid)
    for scale in (LatentScale([2.0, 4.0], [1.0, -1.0]), LatentScale([2.0, 4.0], 1.0), LatentScale(0.5, 3.0)):
        torch.testing.assert_close(scale.undo(scale.apply(latents)), latents)
    torch.testing.assert_close(LatentScale([2.0, 4.0], [1.0, -1.0]).apply(latents)[:, 1], (latents[:, 1] + 1) * 4)


@pytest.mark.parametrize("scheduler", ["euler", "heun", "dpm++", "unipc"])
def test_a_prefix_stays_without_noise_and_the_rest_does_not_depend_on_its_place(scheduler):
    """A network of single frames draws frame i from its own noise, whatever stands before it."""
    noise, prefix = torch.randn(2, 4, 5, 2, 3), torch.randn(1, 4, 2, 2, 3)
    seen = []

    def predict(x, times, labels):
        if times.ndim == 2:
            assert x.shape[2] == times.shape[1] and torch.equal(x[:, :, :2], prefix.expand(len(x), -1, -1, -1, -1))
            assert not times[:, :2].any() and (times[:, 2:] > 0).all() and (times[:, 2:] == times[:, 2:3]).all()
            seen.append(times)
        level = times.view(len(x), 1, -1, 1, 1) / 1000
        return ((1 + level + 0.1 * labels.view(-1, 1, 1, 1, 1)) * x).tanh()

    options = {"labels": torch.tensor([0, 2]), "null_label": 3, "guidance": Guidance(1.5, (0.1, 0.9))}
    made = create_scheduler(scheduler, ObjectiveConfig())
    clips = denoise(predict, noise, made, 5, prefix=prefix, **options)
    assert torch.equal(clips[:, :, :2], prefix.expand(2, -1, -1, -1, -1)) and len(seen) >= 5
    rest = denoise(predict, noise[:, :, 2:], create_scheduler(scheduler, ObjectiveConfig()), 5, **options)
    torch.testing.assert_close(clips[:, :, 2:], rest)


def test_prefixes_that_cannot_be_kept():
    noise, scheduler = torch.randn(2, 4, 3, 2, 2), create_scheduler("euler", ObjectiveConfig())
    for shape in ((2, 4, 3, 2, 2), (2, 4, 0, 2, 2), (3, 4, 1, 2, 2), (2, 4, 1, 2, 3), (2, 4, 2, 2)):
        with pytest.raises(ValueError, match=r"the prefix must be finite, and the first frames of clips of shape"):
            denoise(network, noise, scheduler, 2, prefix=torch.zeros(shape))
    with pytest.raises(ValueError, match="the prefix must be finite"):
        denoise(network, noise, scheduler, 2, prefix=torch.full((2, 4, 1, 2, 2), float("nan")))
    with pytest.raises(ValueError, match="the prefix must be finite"):
        denoise(network, noise[:, :, 0], scheduler, 2, prefix=torch.zeros(2, 4, 1, 2))
    ddpm = create_scheduler("dpm++", ObjectiveConfig(kind="ddpm"))
    with pytest.raises(ValueError, match="a prefix needs a model trained by flow matching"):
        denoise(network, noise, ddpm, 2, prefix=torch.zeros(2, 4, 1, 2, 2))
