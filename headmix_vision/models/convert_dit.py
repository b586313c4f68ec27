"""Loads weights of the official DiT (facebookresearch key names), or of another of ours, into a mixed-head DiT.

An image model's weights become those of a video model that is the same function of a still.
"""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path
from typing import cast

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers import MixingMatrix
from headmix_vision.layers.block_mixing import locality_weights
from headmix_vision.layers.embeddings import sincos_positions
from headmix_vision.models.convert import Conversion, check_shape, merge
from headmix_vision.models.headmix_dit import HeadMixDiT
from headmix_vision.models.headmix_video_dit import HeadMixVideoDiT
from headmix_vision.ops import TokenBlocks

# Fixed sine-cosine positions, which the official model stores and ours computes.
_POSITIONS = "pos_embed"


def read_dit_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a local checkpoint of a DiT, such as the official ``DiT-XL-2-256x256.pt``.

    Nothing but tensors, plain values and command line arguments is unpickled. Of a training checkpoint the moving
    average (``ema``) is taken.

    Args:
        path: a ``.safetensors`` file, or whatever ``torch.save`` wrote.

    Raises:
        InputError: if there is no such file, or it holds no weights.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"no checkpoint at {path}; the official ones are linked from https://github.com/facebookresearch/DiT"
        )
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} holds no readable weights: {str(error).splitlines()[0]}") from None
    for name in ("ema", "model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(name), dict):
            loaded = loaded[name]
            break
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise InputError(f"{path} holds no state dict of tensors.")
    return loaded


def convert_dit_state_dict(state_dict: dict[str, Tensor], model: HeadMixDiT | HeadMixVideoDiT) -> Conversion:
    """Map a state dict with the official DiT's keys onto ``model``.

    The names agree, so a model with the softmax core takes every weight and computes what the official model does.
    Mixing matrices, CPE and gates, which the source lacks, keep the model's present values. So do head mixes, which
    start as their core alone: the model computes what it would without one, explicit heads with ``output_norm=False``.
    Fixed positions are compared and left out; those of another resolution are the model's own. Weights of an image
    model are first inflated for a model on clips (:func:`inflate_dit`). For example::

        model = timm.create_model("dit_mhla_xl_2", learned_variance=True)
        converted = convert_dit_state_dict(read_dit_weights("DiT-XL-2-256x256.pt"), model)
        model.load_state_dict(converted.state_dict)
        print(converted.new_parameters)

    Args:
        state_dict: weights of a DiT.
        model: the model to fill; it is not changed.

    Raises:
        InputError: if the source is no DiT, its depth, width, patch size, channels, classes or variance differ, or the
            model projects to fewer heads than the source (:func:`~headmix_vision.models.compress_heads` makes these).
    """
    source = dict(state_dict)
    for name in ("x_embedder.proj.weight", "blocks.0.attn.qkv.weight", "final_layer.linear.weight"):
        if name not in source:
            raise InputError(f"state_dict has no {name}: not a DiT.")
    if isinstance(model, HeadMixVideoDiT) and source["x_embedder.proj.weight"].ndim == 4:
        source = inflate_dit(source, model)
    depth = len({name.split(".")[1] for name in source if name.startswith("blocks.")})
    if depth != len(model.blocks):
        raise InputError(f"the source has {depth} blocks, the model {len(model.blocks)}.")
    if _POSITIONS in source:
        _check_positions(source.pop(_POSITIONS), model)
    target = model.state_dict()
    unused = [name for name in source if name not in target]
    for name in unused:
        del source[name]
    for name, value in source.items():
        check_shape(name, value, target[name], _HINTS.get(name.rpartition(".")[0], "width and MLP width must agree"))
    return merge(source, target, unused)


def inflate_dit(state_dict: dict[str, Tensor], model: HeadMixVideoDiT) -> dict[str, Tensor]:
    """Turn weights of an image DiT into those of a model on clips, whose output for a still they leave as it was.

    A patch of t frames sums them with equal shares of the image's kernel, and predicts each of them alike. A
    convolution over the image convolves each frame. A mixing matrix becomes the Kronecker product of one along time
    with that of the image: ``1 - dist(i, j) / max_k dist(i, k)`` of the frames' blocks, the paper's initial weights
    before rows are normalised, so that a block weighs its own frames as the image did.

    Args:
        state_dict: weights of an image DiT, of ours or the official one's names.
        model: the model to fill, whose positions are ``"sincos"`` if it is to compute the same; it is not changed.
    """
    inflated, target, frames = {}, model.state_dict(), model.patch[0]
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


def _check_positions(stored: Tensor, model: HeadMixDiT | HeadMixVideoDiT) -> None:
    grid = model.base_grid[-2:]  # of an image
    expected = sincos_positions(model.embed_dim, grid, grid, like=torch.empty(0))[None]
    same = stored.shape == expected.shape
    if same and stored.device.type != "meta" and not torch.allclose(stored.float(), expected, rtol=0, atol=1e-3):
        raise InputError(f"{_POSITIONS} is not the fixed sine-cosine embedding, which the model computes.")
