"""Teachers of distillation: trained classifiers and backbones from any place, and students made of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import timm
from torch import nn

from headmix_vision.data.augmentation import INTERPOLATIONS, check_interpolation
from headmix_vision.errors import InputError, check_choice, check_counts, check_numbers
from headmix_vision.files.reading import check_fields, read_json
from headmix_vision.files.tensors import read_weights
from headmix_vision.models.convert_transformers import dinov3_to_timm, transformers_to_timm
from headmix_vision.models.names import CORRECT
from headmix_vision.models.swap import SWAPPED, swap_attention
from headmix_vision.runs.checkpoints import (
    DESCRIPTION_KEY,
    check_finite,
    find_checkpoint,
    is_generator,
    read_checkpoint,
)
from headmix_vision.runs.directory import CHECKPOINTS
from headmix_vision.runs.networks import LOCAL, PREPROCESSING, create_network, export_arguments, without_sources

_WEIGHTS = "model.safetensors"
_ACTIVATIONS = ("gelu", "gelu_python")
_DINOV2 = ("dinov2", "dinov2_with_registers")
_DINOV3 = "dinov3_vit"


class Made(NamedTuple):
    """A network, and what makes another one of its kind.

    Attributes:
        network: The network, on the CPU.
        name: Its name in timm.
        arguments: Plain arguments of `timm.create_model`.
    """

    network: nn.Module
    name: str
    arguments: dict[str, Any]


def open_teacher(
    source: str,
    checkpoint: str | None = None,
    arguments: dict[str, Any] | None = None,
    img_size: int | list[int] | None = None,
) -> Made:
    """Open a trained classifier or backbone in evaluation mode, on the CPU.

    Args:
        source: A run directory, a `.ckpt`, a `.safetensors` of `headmix export`, the name of a model in timm, or
            `local-dir:` with a folder that timm or transformers (ViT, DeiT, DINOv2, DINOv3) has saved.
        checkpoint: Weights of a model named in timm; not needed where weights come with the package.
        arguments: Further arguments of `timm.create_model` for a model named in timm.
        img_size: Image size in pixels, to which position embeddings are resampled; that of the weights when None.

    Raises:
        InputError: There is no such teacher, it is a generator, its weights are missing or do not fit, or an option
            does not apply to it.
    """
    path = Path(source)
    named = timm.is_model(source.partition(".")[0]) and not path.exists()
    for option, value in (("teacher_checkpoint", checkpoint), ("teacher_args", arguments)):
        if value and not named:
            raise InputError(f"model.{option} applies to the name of a model in timm, not to {source}: leave it out")
    if source.startswith(LOCAL):
        made = _open_folder(Path(source.removeprefix(LOCAL)), img_size)
    elif named:
        made = _open_named(source, checkpoint, arguments or {}, img_size)
    elif path.suffix == ".ckpt" or (path / CHECKPOINTS).is_dir():
        made = _open_run(find_checkpoint(path), img_size)
    elif path.suffix == ".safetensors" and path.is_file() and (described := export_arguments(path)) is not None:
        made = _create(*described, img_size, str(path))
    else:
        raise InputError(
            f"teacher {source} is neither a run directory (with {CHECKPOINTS}/), nor a .ckpt, nor a .safetensors of"
            f" headmix export, nor a model of timm, nor {LOCAL}FOLDER"
        )
    made.network.eval().requires_grad_(False)
    return made


def _create(name: str, arguments: dict[str, Any], img_size: Any, checkpoint: str | None) -> Made:
    given = {**arguments, **({} if img_size is None else {"img_size": img_size})}
    size = {key: given.get(key) for key in ("num_classes", "img_size")}
    rest = {key: value for key, value in given.items() if key not in size}
    network = create_network(name, **cast("dict[str, Any]", size), model_args=rest, checkpoint=checkpoint)
    return Made(network, name, {key: value for key, value in given.items() if value is not None})


def _open_named(name: str, checkpoint: str | None, arguments: dict[str, Any], img_size: Any) -> Made:
    if checkpoint is None and name in CORRECT:
        network = timm.create_model(name, pretrained=True, img_size=img_size, **arguments)
        return Made(network, name, {**arguments, **({} if img_size is None else {"img_size": img_size})})
    if checkpoint is None:
        raise InputError(
            f"teacher {name} needs weights: give a file by model.teacher_checkpoint, or a folder by {LOCAL}FOLDER"
        )
    return _create(name, arguments, img_size, checkpoint)


def _open_run(checkpoint: Path, img_size: Any) -> Made:
    read = read_checkpoint(checkpoint)
    about = read[DESCRIPTION_KEY]
    if is_generator(read):
        raise InputError(f"{checkpoint} holds the generator {about['name']}, the teacher must be a classifier")
    arguments = {**without_sources(about["model_args"]), **{key: about[key] for key in ("num_classes", "img_size")}}
    return _create(about["name"], arguments, img_size, str(checkpoint))


def _open_folder(folder: Path, img_size: Any) -> Made:
    """Open a folder that timm or transformers has saved."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: it was not saved by timm or transformers")
    weights = folder / _WEIGHTS
    if not weights.is_file():
        raise InputError(f"{folder} has no {_WEIGHTS}: save the model anew with safetensors")
    config = check_fields(str(folder / "config.json"), read_json(folder / "config.json"), {})
    if "model_type" in config:
        return _open_transformers(folder, config, img_size)
    where = f"{folder / 'config.json'}"
    found = check_fields(where, {"model_args": {}, "pretrained_cfg": {}, **config}, {"architecture": str})
    found = check_fields(where, found, {"model_args": dict, "pretrained_cfg": dict})
    classes = {"num_classes": found["num_classes"]} if "num_classes" in found else {}
    arguments = {**classes, **without_sources(found["model_args"])}
    made = _create(found["architecture"], arguments, img_size, str(weights))
    own = cast("dict[str, Any]", made.network.pretrained_cfg)
    changed = {
        name: value
        for name, value in _preprocessing(where, found["pretrained_cfg"]).items()
        if json.dumps(own.get(name)) != json.dumps(value)
    }
    if changed:
        own.update(changed)
        made.arguments["pretrained_cfg_overlay"] = changed
    return made


def _preprocessing(where: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return what a folder says of the preparation of its images, checked."""
    found = {name: value for name, value in found.items() if name in PREPROCESSING and value is not None}
    for name in found.keys() & {"mean", "std"}:
        numbers = found[name] if isinstance(found[name], list) else [found[name]]
        check_counts(1, 3, **{f"the length of {name} in {where}": len(numbers)})
        for number in numbers:
            check_numbers(-1e6 if name == "mean" else 1e-6, 1e6, **{f"{name} in {where}": number})
    if "crop_pct" in found:
        check_numbers(1e-3, 10, **{f"crop_pct in {where}": found["crop_pct"]})
    if "interpolation" in found:
        check_interpolation(f"interpolation in {where}", found["interpolation"], INTERPOLATIONS)
    if "crop_mode" in found:
        check_choice(f"crop_mode in {where}", found["crop_mode"], ("center", "squash", "border"))
    return found


def _open_transformers(folder: Path, config: dict[str, Any], img_size: Any) -> Made:
    """Make timm's network of a ViT, DeiT, DINOv2 or DINOv3 of transformers; its norms have timm's epsilon."""
    where, kind = f"{folder / 'config.json'}", config["model_type"]
    gated = config.get("use_swiglu_ffn") or config.get("use_gated_mlp")
    if kind not in ("vit", "deit", _DINOV3, *_DINOV2) or gated or config.get("hidden_act") not in _ACTIVATIONS:
        raise InputError(
            f"{where} describes a {kind!r:.40} that cannot be a teacher: it must be a ViT, DeiT, DINOv2 or DINOv3 ViT"
            " with GELU, or a folder of timm"
        )
    sizes = ["hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size", "num_channels"]
    sizes.append("mlp_ratio" if kind in _DINOV2 else "intermediate_size")
    config = check_fields(where, {"mlp_ratio": 4, **config}, dict.fromkeys(sizes, int))
    check_counts(1, **{f"{name} in {where}": config[name] for name in sizes})
    state = (dinov3_to_timm if kind == _DINOV3 else transformers_to_timm)(read_weights(folder / _WEIGHTS))
    check_finite(state, str(folder / _WEIGHTS))
    if kind in _DINOV2:  # its classifier sees the class token and the mean of the patches
        state = {name: value for name, value in state.items() if not name.startswith("head.")}
    ratio = config["mlp_ratio"] if kind in _DINOV2 else config["intermediate_size"] / config["hidden_size"]
    arguments: dict[str, Any] = {
        "num_classes": len(state["head.weight"]) if "head.weight" in state else 0,
        "img_size": config["image_size"],
        "patch_size": config["patch_size"],
        "in_chans": config["num_channels"],
        "embed_dim": config["hidden_size"],
        "depth": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "mlp_ratio": ratio,
    }
    if kind == _DINOV3:
        name = "vit_small_patch16_dinov3_qkvb"
        arguments |= _dinov3_arguments(where, config)
    else:
        name = "deit_base_distilled_patch16_224" if "dist_token" in state else "vit_base_patch16_224"
        arguments |= {
            "qkv_bias": bool(config.get("qkv_bias", True)),
            **({"init_values": 1.0} if kind in _DINOV2 else {}),
            **({"reg_tokens": state["reg_token"].shape[1], "no_embed_class": True} if "reg_token" in state else {}),
        }
    made = _create(name, arguments, None, None)
    network: Any = made.network
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"{folder} does not fit its config.json: {' '.join(str(error).split())[:300]}") from None
    preprocessing = folder / "preprocessor_config.json"
    found = check_fields(str(preprocessing), read_json(preprocessing), {}) if preprocessing.is_file() else {}
    names = {"mean": "image_mean", "std": "image_std"}
    stated = {ours: found[name] for ours, name in names.items() if found.get(name) is not None}
    overlay = _preprocessing(str(preprocessing), stated)
    network.pretrained_cfg.update(overlay)
    made.arguments.update({"pretrained_cfg_overlay": overlay} if overlay else {})
    if img_size is not None:
        network.set_input_size(img_size)
        made.arguments["img_size"] = img_size
    return made


def _dinov3_arguments(where: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of timm's DINOv3 besides sizes: it has register tokens, and no bias of keys."""
    biases = {name: bool(config.get(name, name != "key_bias")) for name in ("query_bias", "key_bias", "value_bias")}
    if biases["key_bias"] or biases["query_bias"] != biases["value_bias"]:
        raise InputError(
            f"{where} has {biases}: timm's DINOv3 has biases of queries and values, or none, and no key_bias"
        )
    registers, theta = config.get("num_register_tokens", 0), config.get("rope_theta", 100.0)
    check_counts(1, **{f"num_register_tokens in {where}": registers})
    check_numbers(1e-3, 1e9, **{f"rope_theta in {where}": theta})
    return {
        "qkv_bias": biases["query_bias"],
        "num_reg_tokens": registers,
        "rope_temperature": float(theta),
        "global_pool": "token",
    }


def make_student(
    teacher: Made,
    core: str = "mhla",
    layers: Sequence[int | str] | None = None,
    head_mix: str | None = None,
    softmax_every: int = 0,
    options: dict[str, Any] | None = None,
) -> Made:
    """Make a student that computes as its teacher does in all but attention; the teacher is not changed.

    Args:
        teacher: The teacher.
        core: The new core.
        layers: Layers to swap, by number or name; all when None.
        head_mix: Mix across feature heads, or None.
        softmax_every: k, for an original layer as the first of each k; 0 for none.
        options: Further options of `swap_attention`.

    Raises:
        InputError: If there is nothing to swap, a layer cannot be swapped, or an option does not fit.
    """
    copied: Any = copy.deepcopy(teacher.network)
    swap_attention(copied, core, layers, head_mix, softmax_every=softmax_every, **(options or {}))
    return Made(copied, SWAPPED, {**teacher.arguments, **copied._model_args})
