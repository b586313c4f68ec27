"""Samples of ddim and ddpm against the sampler of the official DiT, written here in float64 from its description.

`create_diffusion(spec)` keeps some of the 1,000 times, by `N` or `ddimN`, and makes a process of its own of them. Its
loops then walk through this process one time after the other.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headmix_vision.diffusion import Guidance, HeadMixDiTPipeline, ObjectiveConfig, create_scheduler, denoise
from headmix_vision.diffusion.denoising import spaced_times
from headmix_vision.models import HeadMixDiT

OBJECTIVE = ObjectiveConfig(kind="ddpm", learned_variance=True)
SCALE = 1.5
NOISE = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))


def kept_times(spec: str) -> list[int]:
    """The times that a specification keeps, in rising order."""
    if spec.startswith("ddim"):
        count = int(spec.removeprefix("ddim"))
        strides = [stride for stride in range(1, 1000) if len(range(0, 1000, stride)) == count]
        return list(range(0, 1000, strides[0]))
    count, position, times = int(spec), 0.0, []
    for _ in range(count):
        times.append(round(position))
        position += 999 / (count - 1)
    return times


def network(x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
    """Any smooth function of x, time and label, with channels of the variance."""
    phase = (1 + labels + times / 500).view(-1, 1, 1, 1)
    return torch.cat([x + 0.2 * torch.sin(phase + x.roll(1, 1)), torch.cos(phase * x)], 1)


def guided(x: Tensor, time: int) -> tuple[Tensor, Tensor]:
    """The noise and the variance, guided as by `forward_with_cfg`: in the first three channels alone."""
    times = torch.full((len(x),), float(time), dtype=torch.float64)
    conditional, unconditional = (network(x, times, torch.full_like(times, label)) for label in (0, 1))
    first = unconditional[:, :3] + SCALE * (conditional[:, :3] - unconditional[:, :3])
    return torch.cat([first, conditional[:, 3:4]], 1), conditional[:, 4:]


def official_samples(spec: str, loop: str) -> Tensor:
    times = kept_times(spec)
    kept = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))[times]
    before = np.append(1.0, kept[:-1])
    betas = 1 - kept / before
    posterior = betas * (1 - before) / (1 - kept)
    generator, x = torch.Generator().manual_seed(1), NOISE.double()
    for i in reversed(range(len(times))):
        noise, variance = guided(x, times[i])
        data = (x - np.sqrt(1 - kept[i]) * noise) / np.sqrt(kept[i])
        if loop == "ddim":
            x = np.sqrt(before[i]) * data + np.sqrt(1 - before[i]) * noise
            continue
        x = (np.sqrt(before[i]) * betas[i] * data + (1 - before[i]) * np.sqrt(1 - betas[i]) * x) / (1 - kept[i])
        if i:
            share = (variance + 1) / 2
            log_variance = share * np.log(betas[i]) + (1 - share) * np.log(posterior[i])
            x = x + (log_variance / 2).exp() * torch.randn(x.shape, generator=generator).double()
    return x.float()


@pytest.mark.parametrize("loop", ["ddim", "ddpm"])
@pytest.mark.parametrize("spec", ["10", "21", "100", "ddim25", "ddim143"])
def test_samples_are_the_official_dits(spec: str, loop: str) -> None:
    spacing, steps = ("leading", int(spec[4:])) if spec.startswith("ddim") else ("linspace", int(spec))
    drawn = denoise(
        lambda x, times, labels: network(x.double(), times.double(), labels.double()).float(),
        NOISE,
        create_scheduler(loop, OBJECTIVE, spacing=spacing),
        steps,
        labels=torch.zeros(2, dtype=torch.long),
        null_label=1,
        guidance=Guidance(SCALE, channels="first_three"),
        generator=torch.Generator().manual_seed(1),
    )
    expected = official_samples(spec, loop)
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-3 * float(expected.std()))


def test_spacings_keep_the_official_times_at_every_number_of_steps() -> None:
    for steps in range(2, 1001):
        assert spaced_times("linspace", steps) == kept_times(str(steps))[::-1]
    possible = {len(range(0, 1000, stride)) for stride in range(1, 1000)}
    for steps in possible:
        assert spaced_times("leading", steps) == kept_times(f"ddim{steps}")[::-1]
    with pytest.raises(ValueError, match=r"never 144; nearest: 143"):
        spaced_times("leading", 144)


def test_the_spacing_is_an_option_of_the_pipeline_and_kept_by_it(tmp_path: Any) -> None:
    sizes = {"input_size": 4, "in_channels": 4, "embed_dim": 16, "depth": 1, "num_heads": 1, "num_classes": 2}
    model = HeadMixDiT(**sizes, core="softmax", learned_variance=True)
    pipeline = HeadMixDiTPipeline(model, create_scheduler(None, OBJECTIVE), objective=asdict(OBJECTIVE))
    pipeline.set_scheduler("ddim", "linspace")
    pipeline.save_pretrained(tmp_path)
    loaded = HeadMixDiTPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    loaded([1], num_inference_steps=4, output_type="latent")
    assert loaded.scheduler.timesteps.tolist() == [999, 666, 333, 0]
    for name, spacing, message in (
        ("ddpm", "trailing", "scheduler 'ddpm' takes linspace or leading"),
        ("dpm++", "linspace", r"scheduler 'dpm\+\+' has none to choose"),
        ("ddim", "even", "timestep spacing 'even' given, but scheduler 'ddim' takes trailing or linspace or leading"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline.set_scheduler(name, spacing)
