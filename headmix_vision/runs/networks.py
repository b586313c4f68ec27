"""Making networks by their timm names, from start weights if asked for, and reading them back from checkpoints."""

from __future__ import annotations

import difflib
import inspect
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import timm
from safetensors import SafetensorError
from timm.models import get_pretrained_cfg_value, load_state_dict
from torch import Tensor, nn

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.errors import InputError
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY, check_state, is_generator, model_state, read_checkpoint

if TYPE_CHECKING:
    from headmix_vision.models import HeadMixDiT


def create_network(
    name: str,
    num_classes: int | None = None,
    img_size: int | list[int] | None = None,
    model_args: dict[str, Any] | None = None,
    checkpoint: str | None = None,
) -> nn.Module:
    """Creates a timm model, with a short error for a misspelt name or weights that do not belong to it.

    Args:
        name: Name of the model in timm.
        num_classes: Number of classes; the model's default when None.
        img_size: Image size in pixels, one number or [height, width]; the model's default when None.
        model_args: Further arguments of `timm.create_model`.
        checkpoint: Start weights: an exported `.safetensors`, a `.pth` of timm, or a `.ckpt` of this package. They
            may be of another resolution, which the model resamples.

    Returns:
        The model.

    Raises:
        InputError: If the name is unknown, or the start weights are unreadable, of another number of classes, or do
            not fit the model.
    """
    _check_name(name)
    arguments = {"num_classes": num_classes, "img_size": img_size, **(model_args or {})}
    if checkpoint is None:
        return timm.create_model(name, **arguments)

    state = _start_weights(checkpoint)
    classes = num_classes if num_classes is not None else get_pretrained_cfg_value(name, "num_classes")
    classifier = get_pretrained_cfg_value(name, "classifier")
    head = state.get(f"{classifier}.weight")
    if head is not None and head.shape[0] != classes:
        raise InputError(f"{checkpoint} has {head.shape[0]} classes, the model {classes} (option model.num_classes)")
    overlay = {"state_dict": state, "num_classes": classes}
    try:
        network = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{checkpoint} does not fit model {name}: {reason}") from None
    cast("dict[str, Any]", network.pretrained_cfg).pop("state_dict", None)
    return network


def create_generator(
    name: str,
    num_classes: int | None = None,
    input_size: int | list[int] | None = None,
    model_args: dict[str, Any] | None = None,
    checkpoint: str | None = None,
) -> HeadMixDiT:
    """Creates a diffusion transformer by its timm name, optionally from start weights.

    Args:
        name: Name of the model in timm.
        num_classes: Number of classes; the model's default when None.
        input_size: Size of images or latents; the model's default when None.
        model_args: Further arguments of `timm.create_model`.
        checkpoint: Start weights: a `.ckpt` of this package, a `.safetensors`, or an official DiT's `.pt`; what they
            lack keeps its initial values.

    Raises:
        InputError: If the name is unknown or that of a classifier, or the start weights do not fit.
    """
    _check_name(name)
    if not name.startswith("dit_"):
        raise InputError(f"{name} is a classifier; generators are {', '.join(timm.list_models('dit_*'))}")
    from headmix_vision.models import HeadMixDiT  # loads diffusers, which classifiers do without

    size = tuple(input_size) if isinstance(input_size, list) else input_size
    known = set(inspect.signature(HeadMixDiT.__init__).parameters) - {"self"}
    for argument in sorted(set(model_args or {}) - known):
        raise InputError(f"model {name} has no argument {argument!r} (option model.model_args)")
    model = timm.create_model(name, num_classes=num_classes, input_size=size, **(model_args or {}))
    assert isinstance(model, HeadMixDiT)
    if checkpoint is not None:
        from headmix_vision.models.convert_dit import convert_dit_state_dict, read_dit_weights

        ours = Path(checkpoint).suffix == ".ckpt"
        state = model_state(read_checkpoint(checkpoint)) if ours else read_dit_weights(checkpoint)
        model.load_state_dict(convert_dit_state_dict(state, model).state_dict)
    return model


def load_network(checkpoint: dict[str, Any], *, raw: bool = False) -> nn.Module:
    """Makes the trained network of a checkpoint, a classifier or a generator, on the CPU.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        raw: Load the weights being trained instead of their moving average.

    Raises:
        InputError: If the weights do not fit the network that the checkpoint describes.
    """
    about = checkpoint[DESCRIPTION_KEY]
    if is_generator(checkpoint):
        from headmix_vision.models import HeadMixDiT

        network: nn.Module = HeadMixDiT(**about["architecture"])
    else:
        network = create_network(about["name"], about["num_classes"], about["img_size"], about["model_args"])
    state = model_state(checkpoint, raw=raw)
    check_state(state, network.state_dict())
    network.load_state_dict(state)
    return network


def _check_name(name: str) -> None:
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else "; timm.list_models() lists the known ones"
        raise InputError(f"unknown model {name!r}{hint}")


def _start_weights(checkpoint: str) -> dict[str, Tensor]:
    if Path(checkpoint).suffix == ".ckpt":
        return model_state(read_checkpoint(checkpoint))
    if not os.path.isfile(checkpoint):
        raise InputError(f"no checkpoint at {checkpoint} (option model.checkpoint)")
    try:
        return load_state_dict(checkpoint, weights_only=True)
    except (RuntimeError, EOFError, OSError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise InputError(f"{checkpoint} holds no readable weights: {str(error).splitlines()[0]}") from None
    except SafetensorError as error:
        raise InputError(f"{checkpoint} is truncated or no safetensors file: {error}") from None
