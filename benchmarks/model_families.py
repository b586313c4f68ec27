"""The kinds of models that bench_models.py knows: what they are made from, called with and trained by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headmix_vision  # noqa: F401  (registers the models)

CLASSES = 1000


@dataclass(frozen=True)
class Family:
    """What differs between kinds of models: how one is made for a size, what it is called with, its loss."""

    make: Callable[[str, int], nn.Module]
    inputs: Callable[[int, int, torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[Tensor, tuple[Tensor, ...]], Tensor]


def _image_inputs(batch: int, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, size, size, generator=generator, device=generator.device),)


def _image_loss(logits: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    labels = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return F.cross_entropy(logits, labels)


def _latent_inputs(batch: int, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Noisy latents [B, 4, size, size], times in [0, 1) and class labels."""
    device = generator.device
    x = torch.randn(batch, 4, size, size, generator=generator, device=device)
    t = torch.rand(batch, generator=generator, device=device)
    return x, t, torch.randint(0, CLASSES, (batch,), generator=generator, device=device)


def _latent_loss(prediction: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Regression onto the latents; a model that predicts variances as well has them in its further channels."""
    prediction = prediction.float()
    return F.mse_loss(prediction[:, : inputs[0].shape[1]], inputs[0]) + 1e-3 * prediction.square().mean()


FAMILIES = {
    "dit": Family(lambda name, size: timm.create_model(name, input_size=size), _latent_inputs, _latent_loss),
    "image": Family(lambda name, size: timm.create_model(name, img_size=size), _image_inputs, _image_loss),
}


def family_of(name: str) -> Family:
    """``dit_*`` are called with latents, times and labels, everything else with images."""
    return FAMILIES["dit" if name.startswith("dit_") else "image"]
