"""Conversion of weights to a mixed-head DiT: from the official DiT (facebookresearch key names), SiT, or our models.

SiT's weights have DiT's names and shapes but another meaning: its time runs from noise (0) to data (1), and its
velocity points to the data. Weights of an image model become a model of clips that computes the same for a still.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.files.tensors import check_weights, load_plain, read_weights
from headmix_vision.layers import MixingMatrix
from headmix_vision.layers.block_mixing import locality_weights
from headmix_vision.models.convert import Conversion, check_depth, fit
from headmix_vision.models.convert_mhla import is_released_mhla, rename_released_mhla
from headmix_vision.models.dit_blocks import sincos_positions
from headmix_vision.models.headmix_dit import HeadMixDiT
from headmix_vision.models.headmix_vit import state_dict_in
from headmix_vision.ops import TokenBlocks

# Fixed sine-cosine positions, which the official model stores and ours computes.
_POSITIONS = "pos_embed"


def read_dit_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a local checkpoint of a DiT, such as the official ``DiT-XL-2-256x256.pt``.

    Nothing but tensors, plain values and command line arguments is unpickled. Of a training checkpoint the moving
    average (``ema``) is taken. That weights are SiT's, as its arguments of training and its file names tell, is noted
    in the metadata of the result.

    Args:
        path: a ``.safetensors`` file, or whatever ``torch.save`` wrote.

    Raises:
        InputError: if there is no such file, it holds no weights, or SiT's of another path than the straight one, or of
            another prediction than the velocity.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(
            f"no checkpoint at {path}; the official ones are linked from https://github.com/facebookresearch/DiT"
        )
    if path.suffix == ".safetensors":
        return _noting_sit(read_weights(path), _has_name_of_sit(path))
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = load_plain(path)
    arguments = loaded.get("args") if isinstance(loaded, dict) else None
    for name in ("ema", "model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(name), dict):
            loaded = loaded[name]
            break
    loaded = check_weights(path, loaded)
    path_type, prediction = (getattr(arguments, name, None) for name in ("path_type", "prediction"))
    if path_type not in (None, "Linear") or prediction not in (None, "velocity"):
        raise InputError(
            f"{path} holds weights of SiT of path_type={path_type!r} and prediction={prediction!r}: only those of"
            " 'Linear' and 'velocity' can be converted."
        )
    return _noting_sit(loaded, path_type is not None or _has_name_of_sit(path))


_SIT = "sit"  # in the metadata of a state dict


def _has_name_of_sit(path: Path) -> bool:
    return re.search(r"(?<![a-z])sit(?![a-z])", path.name.lower()) is not None


def _noting_sit(weights: dict[str, Tensor], is_sit: bool) -> dict[str, Tensor]:
    noted = OrderedDict(weights)
    noted._metadata = {"": {_SIT: is_sit}}  # type: ignore[attr-defined]
    return noted


def convert_dit_state_dict(state_dict: dict[str, Tensor], model: HeadMixDiT, sit: bool | None = None) -> Conversion:
    """Map a state dict with the official DiT's keys onto ``model``.

    The names agree, so a model with the softmax core takes every weight and computes what the official model does.
    Mixing matrices, CPE and gates, which the source lacks, keep the model's present values. So do head mixes, which
    start as their core alone: the model computes what it would without one, explicit heads with ``output_norm=False``.
    Fixed positions are compared and left out; at another resolution the model's own are kept. Weights of an image
    model are first inflated for a model on clips (:func:`inflate_dit`).

    >>> import timm, headmix_vision
    >>> source = timm.create_model("dit_softmax_s_2", depth=1, learned_variance=True).state_dict()
    >>> model = timm.create_model("dit_mhla_s_2", depth=1, learned_variance=True)
    >>> converted = convert_dit_state_dict(source, model)
    >>> model.load_state_dict(converted.state_dict)
    <All keys matched successfully>
    >>> converted.new_parameters
    ['blocks.0.attn.core.mixing.weight']

    Weights of SiT (arXiv 2401.08740) load into a model with ``sit_time=True`` and without a learned variance. The
    velocity gets the sign of ours, so that the model is one of flow matching, and the half of the output that SiT does
    not train is left out. SiT's samples are guided in three channels: ``guidance_channels="first_three"``.

    Args:
        state_dict: weights of a DiT, or a checkpoint holding them under ``ema``, ``model`` or ``state_dict``; prefixes
            of DistributedDataParallel and torch.compile are left out.
        model: the model to fill; it is not changed.
        sit: whether official weights are SiT's. None takes what :func:`read_dit_weights` has noted, and what the second
            half of the output tells: DiT trains it as the variance, SiT leaves it zero. Weights without that half are
            SiT's if the model has ``sit_time=True``, and refused otherwise.

    Raises:
        InputError: if the source is not a DiT, or is LightningDiT; if it is SiT and the model not, or the other way
            round, or nothing tells which it is; if its depth, width, patch size, channels, classes or variance
            differ, or the model projects to fewer heads than the source
            (:func:`~headmix_vision.models.compress_heads` makes these).
    """
    source: dict[str, Tensor] = state_dict_in(state_dict, "ema", "model", "state_dict")
    if is_released_mhla(source):
        source = rename_released_mhla(source, model)
    for name in ("x_embedder.proj.weight", "blocks.0.attn.qkv.weight", "final_layer.linear.weight"):
        if name not in source:
            raise InputError(f"state_dict has no {name}: not a DiT.")
    _refuse_lightning(source)
    if _POSITIONS in source:  # which our models do not store
        noted = getattr(source, "_metadata", {}).get("", {}).get(_SIT) or None
        _turn_sit(source, model, noted if sit is None else sit)
    if len(model.patch_size) == 3 and source["x_embedder.proj.weight"].ndim == 4:
        source = inflate_dit(source, model)
    check_depth(source, model)
    if _POSITIONS in source:
        _check_positions(source.pop(_POSITIONS), model)
    return fit(source, model, lambda name: _HINTS.get(name.rpartition(".")[0], "width and MLP width must agree"))


_OF_LIGHTNING = {".mlp.w12.": "SwiGLU", "feat_rope.": "rotary positions", ".norm1.weight": "RMSNorm with weights"}


def _refuse_lightning(source: dict[str, Tensor]) -> None:
    """Raise InputError for parts of LightningDiT that the models here do not have."""
    found = {what for part, what in _OF_LIGHTNING.items() for name in source if part in name}
    if found:
        raise InputError(
            f"these are weights of LightningDiT, with {', '.join(sorted(found))}: no model here has these parts."
        )


def _turn_sit(source: dict[str, Tensor], model: HeadMixDiT, sit: bool | None) -> None:
    """Turn SiT's official weights into weights for a velocity from data to noise; refuse the wrong model."""
    channels, kernel = source["x_embedder.proj.weight"].shape[1], source["x_embedder.proj.weight"].shape[2:]
    last = {name: source[name] for name in ("final_layer.linear.weight", "final_layer.linear.bias")}
    halves = len(last["final_layer.linear.bias"]) // (math.prod(kernel) * channels)
    parts = {name: value.unflatten(0, (-1, halves, channels)) for name, value in last.items()}  # pixel, half, channel
    if halves == 2 and sit is None:
        first, second = (any(_is_filled(value[:, half]) for value in parts.values()) for half in (0, 1))
        sit = first and not second
    wanted = cast(bool, model.config["sit_time"])
    sit = True if sit is None and wanted else sit
    if sit is None:
        raise InputError(
            "the weights have the names of DiT and of SiT, and no variance that would tell them apart: make the model"
            " with sit_time=True for those of SiT, or give sit=False to convert_dit_state_dict."
        )
    if sit != wanted or (sit and model.out_channels != channels):
        name, variance = ("SiT", "without learned_variance") if sit else ("DiT", "with learned_variance=True")
        raise InputError(f"the weights are those of {name}: make the model with sit_time={sit} and {variance}.")
    if sit:
        source.update({name: -value[:, 0].flatten(0, 1) for name, value in parts.items()})


def _is_filled(value: Tensor) -> bool:
    return value.is_meta or bool(value.any())


def inflate_dit(state_dict: dict[str, Tensor], model: HeadMixDiT) -> dict[str, Tensor]:
    """Turn weights of an image DiT into weights of a clip model, whose output for a still they leave as it was.

    A patch of t frames sums them with equal shares of the image's kernel, and predicts each of them alike. A
    convolution over the image convolves each frame. A mixing matrix becomes the Kronecker product of one along time
    with that of the image: ``1 - dist(i, j) / max_k dist(i, k)`` of the frames' blocks, the paper's initial weights
    before rows are normalised, so that a block weighs its own frames as the image did.

    Args:
        state_dict: weights of an image DiT, of ours or the official one's names.
        model: the model to fill, whose positions are ``"sincos"`` if it is to compute the same; it is not changed.
    """
    inflated, target, frames = {}, model.state_dict(), model.patch_size[0]
    for name, value in state_dict.items():
        wanted = target.get(name)
        if name == "x_embedder.proj.weight":
            value = value[:, :, None].expand(-1, -1, frames, -1, -1) / frames
        elif name.startswith("final_layer.linear."):
            value = value.repeat(frames, *[1] * (value.ndim - 1))
        elif wanted is not None and wanted.ndim == value.ndim + 1 == 5:
            value = F.pad(value[:, :, None], (0, 0, 0, 0, wanted.shape[2] // 2, wanted.shape[2] // 2))
        elif wanted is not None and name.endswith(".mixing.block_grid"):
            value = torch.cat([wanted[:1].to(value), value])
        elif wanted is not None and name.endswith(".mixing.weight"):
            value = _with_time(value, model.get_submodule(name.rpartition(".")[0]))
        inflated[name] = value
    return inflated


def _with_time(weight: Tensor, mixing: nn.Module) -> Tensor:
    """Return the Kronecker product of initial weights along time with weights [..., M, M] of an image."""
    blocks = cast(MixingMatrix, mixing).blocks
    along_time = locality_weights(TokenBlocks.from_grid(blocks.grid.shape[:1], blocks.block_grid[:1]))
    along_time = (along_time / along_time.amax(1, keepdim=True)).to(weight)
    whole = torch.einsum("st,...mn->...smtn", along_time, weight)
    return whole.flatten(-4, -3).flatten(-2)


_HINTS = {
    "final_layer.linear": "learned_variance doubles the output; official checkpoints need learned_variance=True",
    "y_embedder.embedding_table": "num_classes and class_dropout > 0, one more row for the null class, must agree",
    "x_embedder.proj": "patch_size, in_channels and embed_dim must agree",
}


def _check_positions(stored: Tensor, model: HeadMixDiT) -> None:
    grid = model.base_grid[-2:]  # of an image
    expected = sincos_positions(model.embed_dim, grid, grid, like=torch.empty(0))[None]
    same = stored.shape == expected.shape
    if same and stored.device.type != "meta" and not torch.allclose(stored.float(), expected, rtol=0, atol=1e-3):
        raise InputError(f"{_POSITIONS} is not the fixed sine-cosine embedding, which the model computes.")
