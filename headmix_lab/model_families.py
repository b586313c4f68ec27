"""Models as benchmarks and experiments spell them: options after the name, construction, inputs and loss."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headmix_vision  # noqa: F401  (registers the models)

CLASSES = 100  # labels are drawn below; the video models know 101
Size = int | tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """A kind of model: name of its size argument, its inputs, its loss, and options that take randomness out of it."""

    size: str
    inputs: Callable[[int, Size, torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[Tensor, tuple[Tensor, ...]], Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def _places(size: Size) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else size


def _image_inputs(batch: int, size: Size, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, *_places(size), generator=generator, device=generator.device),)


def _image_loss(logits: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy of labels that each image tells, so that a part of a batch has its own."""
    labels = inputs[0].flatten(1)[:, 0].abs().mul(1e3).long() % logits.shape[1]
    return F.cross_entropy(logits, labels)


def _latent_inputs(batch: int, size: Size, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Noisy latents [B, 4, size, size] or [B, 4, *size], times in [0, 1) and class labels."""
    device = generator.device
    x = torch.randn(batch, 4, *_places(size), generator=generator, device=device)
    t = torch.rand(batch, generator=generator, device=device)
    return x, t, torch.randint(0, CLASSES, (batch,), generator=generator, device=device)


def _latent_loss(prediction: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Regression onto the latents; a model that predicts variances as well has them in its further channels."""
    prediction = prediction.float()
    return F.mse_loss(prediction[:, : inputs[0].shape[1]], inputs[0]) + 1e-3 * prediction.square().mean()


FAMILIES = {
    "dit": Family("input_size", _latent_inputs, _latent_loss, {"class_dropout": 0.0}),
    "image": Family("img_size", _image_inputs, _image_loss),
}


def family_of(name: str) -> Family:
    """``dit_*`` are called with latents, times and labels, everything else with images."""
    return FAMILIES["dit" if name.startswith("dit_") else "image"]


def split_spelling(spelling: str) -> tuple[str, list[str]]:
    """Part a spelling into the name and its options, which hold commas within brackets."""
    name, _, given = spelling.partition(":")
    return name, re.split(r",(?![^\[(]*[\])])", given) if given else []


def read_spelling(spelling: str) -> tuple[str, dict[str, Any]]:
    """Read a name and options: ``deit_mhla_iha_small:head_mix_args.pseudo_heads=4,global_every=5``.

    A dot stands for a mapping inside an option. Values are Python's, or texts.

    Raises:
        ValueError: for an option without a value.
    """
    name, given = split_spelling(spelling)
    options: dict[str, Any] = {}
    for option in given:
        path, equals, value = option.partition("=")
        if not (path and equals and value):
            raise ValueError(f"an option of {name} must be name=value, got {option!r}.")
        *outer, last = path.split(".")
        inside = options
        for key in outer:
            inside = inside.setdefault(key, {})
        inside[last] = _value(value)
    return name, options


def check_spellings(spellings: Sequence[str]) -> None:
    """End with one line for a spelling that cannot be read, or a model that timm does not know."""
    for spelling in spellings:
        try:
            name, _ = read_spelling(spelling)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
        if not timm.is_model(name):
            raise SystemExit(f"error: timm knows no model {name!r}.")


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def make_model(spelling: str, size: Size, **further: Any) -> nn.Module:
    """Make a model for a size of images or latents; its spelling wins over further options."""
    name, options = read_spelling(spelling)
    return timm.create_model(name, **(further | options | {family_of(name).size: size}))


def read_size(text: str) -> Size:
    """Read ``"224"`` or ``"16x32x32"``.

    Raises:
        ValueError: for others.
    """
    places = tuple(map(int, text.split("x")))
    if min(places) < 1:
        raise ValueError(f"a size must be positive, got {text}.")
    return places if len(places) > 1 else places[0]
