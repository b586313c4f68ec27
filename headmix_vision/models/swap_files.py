"""Swapped models in timm's registry, and folders of them in timm's hub format.

``swapped`` is a name of timm: its arguments are the architecture, the swaps and what the architecture takes, so timm's
scripts make and open swapped models::

    python train.py DATA --model swapped --model-kwargs architecture=vit_small_patch16_224 swaps=mhla --pretrained

A folder holds `config.json` and `model.safetensors`; ``timm.create_model("local-dir:FOLDER", pretrained=True)`` opens
it once this package is imported.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model,
    load_state_dict,
    model_entrypoint,
    register_model,
)
from timm.models._builder import resolve_pretrained_cfg
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn

from headmix_vision.errors import InputError, explain
from headmix_vision.files.reading import check_fields, read_json
from headmix_vision.files.tensors import read_tensors, write_tensors
from headmix_vision.files.writing import atomic_path
from headmix_vision.layers import MixingMatrix
from headmix_vision.layers.swapped_attention import SwappedAttention
from headmix_vision.models.building import building
from headmix_vision.models.swap import SWAPPED, as_swaps, swap_attention

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_NEW = re.compile(r"\.(core|head_mix|output_norm|cpe|lepe)\.")  # in names of parameters that a swap adds
_ADAPTED = re.compile(r"\.(base_layer|original_module)\.")  # in names of weights that peft has wrapped
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


# Of any architecture: what is read of a name's configuration must be there, and its classes are always stated.
default_cfgs = generate_default_cfgs(
    {SWAPPED: {"num_classes": -1, "fixed_input_size": True, "classifier": "head", "first_conv": "patch_embed.proj"}}
)


@register_model
def swapped(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Make a model of timm with swapped attention, as a model of timm.

    Args:
        pretrained: load weights: of the folder that timm opens, of ``pretrained_cfg``, or of the architecture. Weights
            from before the swap are loaded before it.
        kwargs: ``architecture``, a name of timm; ``swaps``, the arguments of
            :func:`~headmix_vision.models.swap.swap_attention`, a list of them or a core; and arguments of the
            architecture.

    Raises:
        InputError: if an argument is missing or wrong.
    """
    architecture, swaps = swapped_architecture(kwargs), as_swaps(kwargs.pop("swaps", None))
    del kwargs["architecture"]
    if not swaps:
        raise InputError("swaps is empty: it must be a core, arguments of swap_attention, or a list of such.")
    given, overlay = kwargs.pop("pretrained_cfg", None), kwargs.pop("pretrained_cfg_overlay", None)
    if isinstance(given, dict) and given.get("source") in ("local-dir", "hf-hub"):
        config, is_swapped = resolve_pretrained_cfg(SWAPPED, given, overlay).to_dict(), True
    else:
        if isinstance(given, dict) and given.get("architecture") == SWAPPED:
            given = None  # timm's default for a name without weights
        config = resolve_pretrained_cfg(architecture, given, overlay).to_dict()
        is_swapped = pretrained and any(_NEW.search(name) for name in _stored(config))
    create = model_entrypoint(architecture)
    module = vars(sys.modules[create.__module__])
    before = {} if is_swapped else {"pretrained": pretrained, "pretrained_cfg": config}

    def build(**arguments: Any) -> nn.Module:
        model = create(**before, **arguments)
        for swap in swaps:
            swap_attention(model, **swap)
        return model

    made: nn.Module = build_model_with_cfg(
        build,
        SWAPPED,
        pretrained and is_swapped,
        pretrained_cfg={**config, "architecture": SWAPPED},
        pretrained_filter_fn=module.get("filter_pretrained", module.get("checkpoint_filter_fn")),
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **kwargs,
    )
    return made


def _stored(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights that timm would load, if they are at hand."""
    if config.get("state_dict"):
        state: Mapping[str, Any] = config["state_dict"]
        return state
    if config.get("file") and not config.get("custom_load"):
        return load_state_dict(config["file"], weights_only=True)
    return {}


def swapped_architecture(arguments: Mapping[str, Any]) -> str:
    """Return the architecture among the arguments of :func:`swapped`.

    Raises:
        InputError: if timm has no such model.
    """
    architecture = arguments.get("architecture")
    if not isinstance(architecture, str) or architecture == SWAPPED or not is_model(architecture):
        raise InputError(f"architecture must be the name of a model of timm, got {architecture!r}.")
    return architecture


def save_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Save a model of timm, swapped or not, in timm's hub format.

    >>> import tempfile, timm, torch, headmix_vision
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1).eval()
    >>> report = headmix_vision.swap_attention(model, "mhla")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     headmix_vision.save_pretrained(model, folder)
    ...     opened = headmix_vision.from_pretrained(folder)
    >>> images = torch.rand(1, 3, 224, 224)
    >>> torch.equal(opened(images), model(images))
    True

    Args:
        model: a model that ``timm.create_model`` made; a compiled one is saved as the model in it.
        folder: the folder; files of an earlier model there are replaced.

    Raises:
        InputError: if the model was made in another way, was changed since, such as by another head, or has arguments
            that JSON cannot hold.
        OSError: if the folder cannot be written.
    """
    model = getattr(model, "_orig_mod", model)
    config, arguments = getattr(model, "pretrained_cfg", None), getattr(model, "_model_args", None)
    if not config or not config.get("architecture") or arguments is None:
        raise InputError(
            f"{type(model).__name__} was not made by timm.create_model: its arguments are not known, and it could not"
            " be opened again. Save its state_dict(), and load that into a model that is made and swapped alike."
        )
    if "swaps" not in arguments and any(isinstance(module, SwappedAttention) for module in model.modules()):
        if arguments.get("features_only"):
            raise InputError("swap and save the model without features_only, and open the folder with features_only.")
        raise InputError("a part of the model was swapped: save this part, or swap the whole model.")
    folder = Path(folder)
    described = _described(model)
    with atomic_path(folder / CONFIG) as temporary:
        temporary.write_bytes(described)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})


def _described(model: nn.Module) -> bytes:
    """Return the configuration of a model, from which timm makes one that takes its weights."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, CONFIG)
        try:
            save_config_for_hf(model, str(file))
        except (AttributeError, ValueError) as error:
            raise InputError(f"{type(model).__name__} cannot be saved: {error}") from None
        with torch.device("meta"):  # shapes suffice
            opened = timm.create_model(f"local-dir:{place}")
        state = opened.state_dict()
        for name, module in opened.named_modules():
            if isinstance(module, MixingMatrix):
                state[f"{name}.block_grid"] = torch.tensor(module.blocks.block_grid)
        if adapted := next(filter(_ADAPTED.search, model.state_dict()), None):
            raise InputError(f"{adapted} belongs to an adapter: save what merge_and_unload() of peft returns.")
        if difference := _difference(model.state_dict(), state, "in the model"):
            raise InputError(
                f"{type(model).__name__} was changed after timm.create_model made it, and could not be opened again:"
                f" {difference} as it was made."
            )
        return file.read_bytes()


def _difference(state: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str) -> str | None:
    """Describe the first weight that does not fit the model in name, shape or block grid; None if all fit."""
    for name in sorted(state.keys() | own.keys()):
        shapes = [_shape(name, tensors[name]) if name in tensors else None for tensors in (state, own)]
        if shapes[0] != shapes[1]:
            states = ["absent" if shape is None else f"of shape {shape}" for shape in shapes]
            return f"{name} is {states[0]} {where} and {states[1]}"
    return None


def _shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; of a stored block grid the shape that it stores."""
    return tuple(tensor.tolist() if name.endswith(".mixing.block_grid") else tensor.shape)


def from_pretrained(folder: str | Path) -> nn.Module:
    """Open a folder that :func:`save_pretrained` or timm wrote; nothing is downloaded.

    Args:
        folder: the folder, with `config.json` and `model.safetensors`.

    Returns:
        The model with its weights, in evaluation mode.

    Raises:
        InputError: if a file is damaged, names something that timm or this package does not have, or the weights
            belong to another model.
        OSError: if a file is missing.
    """
    path = Path(folder) / CONFIG
    wanted = {"architecture": str, "pretrained_cfg": dict, "model_args": (dict, type(None))}
    config = check_fields(str(path), read_json(path), wanted)
    with building(f"the model of {path}", config["model_args"] or {}):
        try:
            model = timm.create_model(f"local-dir:{folder}")
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        except _FAILURES as error:
            reason = explain(error).splitlines()[0]
            raise InputError(f"{path} describes a model that timm cannot make: {reason}") from None
    state, own = read_tensors(Path(folder) / WEIGHTS), model.state_dict()
    if difference := _difference(state, own, "in the file"):
        raise InputError(
            f"{Path(folder) / WEIGHTS} belongs to another model than {path} describes: {difference} in the model."
        )
    model.load_state_dict(state)
    return model.eval()
