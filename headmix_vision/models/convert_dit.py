"""Loads weights of the official DiT (facebookresearch key names), or of another of ours, into a mixed-head DiT."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.layers.embeddings import sincos_positions
from headmix_vision.models.convert import Conversion, check_shape, merge
from headmix_vision.models.headmix_dit import HeadMixDiT

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


def convert_dit_state_dict(state_dict: dict[str, Tensor], model: HeadMixDiT) -> Conversion:
    """Map a state dict with the official DiT's keys onto ``model``.

    The names agree, so a model with the softmax core takes every weight and computes what the official model does.
    Mixing matrices, CPE and gates, which the source lacks, keep the model's present values. So do head mixes, which
    start as their core alone: the model computes what it would without one, explicit heads with ``output_norm=False``.
    Fixed positions are compared and left out; those of another resolution are the model's own. For example::

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


_HINTS = {
    "final_layer.linear": "learned_variance doubles the output; official checkpoints need learned_variance=True",
    "y_embedder.embedding_table": "num_classes and class_dropout > 0, one more row for the null class, must agree",
    "x_embedder.proj": "patch_size, in_channels and embed_dim must agree",
}


def _check_positions(stored: Tensor, model: HeadMixDiT) -> None:
    expected = sincos_positions(model.embed_dim, model.base_grid, model.base_grid, like=torch.empty(0))[None]
    same = stored.shape == expected.shape
    if same and stored.device.type != "meta" and not torch.allclose(stored.float(), expected, rtol=0, atol=1e-3):
        raise InputError(f"{_POSITIONS} is not the fixed sine-cosine embedding, which the model computes.")
