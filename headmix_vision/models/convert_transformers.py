"""Conversion of weights of transformers' ViT, DeiT, DINOv2 and DINOv3 to the names of timm's vision transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headmix_vision.errors import InputError

_LEAVES = ("weight", "bias")


def _with_leaves(places: dict[str, str]) -> dict[str, str]:
    return {f"{theirs}.{leaf}": f"{ours}.{leaf}" for theirs, ours in places.items() for leaf in _LEAVES}


class _Names(NamedTuple):
    """Names of weights in transformers, and of the same weights in timm.

    Attributes:
        kind: name of the models in messages.
        outside: names of weights outside blocks.
        block: matches names of weights in blocks, with the number of the block and the rest.
        inside: names of such rests.
        joined: the rests that become one weight, in order.
        left_out: weights that timm's models do not have.
    """

    kind: str
    outside: dict[str, str]
    block: re.Pattern[str]
    inside: dict[str, str]
    joined: dict[str, tuple[str, ...]]
    left_out: tuple[str, ...]


_PREFIXES = ("vit.", "deit.", "dinov2.", "dinov2_with_registers.", "backbone.")
_VIT = _Names(
    kind="ViT, DeiT or DINOv2",
    outside={
        "embeddings.cls_token": "cls_token",
        "embeddings.distillation_token": "dist_token",
        "embeddings.register_tokens": "reg_token",
        "embeddings.position_embeddings": "pos_embed",
        **_with_leaves(
            {
                "embeddings.patch_embeddings.projection": "patch_embed.proj",
                "layernorm": "norm",
                "classifier": "head",
                "cls_classifier": "head",
                "distillation_classifier": "head_dist",
            }
        ),
    },
    block=re.compile(r"encoder\.layer\.(\d+)\.(.+)"),
    inside={
        "layer_scale1.lambda1": "ls1.gamma",
        "layer_scale2.lambda1": "ls2.gamma",
        **_with_leaves(
            {
                "attention.output.dense": "attn.proj",
                "layernorm_before": "norm1",
                "layernorm_after": "norm2",
                "intermediate.dense": "mlp.fc1",
                "output.dense": "mlp.fc2",
                **{name: name for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")},
            }
        ),
    },
    joined={
        f"attn.qkv.{leaf}": tuple(f"attention.attention.{part}.{leaf}" for part in ("query", "key", "value"))
        for leaf in _LEAVES
    },
    left_out=("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias"),
)
_DINOV3 = _Names(
    kind="DINOv3 ViT",
    outside={
        "embeddings.cls_token": "cls_token",
        "embeddings.register_tokens": "reg_token",
        **_with_leaves({"embeddings.patch_embeddings": "patch_embed.proj", "norm": "norm"}),
    },
    block=re.compile(r"layer\.(\d+)\.(.+)"),
    inside={
        "attention.q_proj.bias": "attn.q_bias",
        "attention.v_proj.bias": "attn.v_bias",
        "layer_scale1.lambda1": "gamma_1",
        "layer_scale2.lambda1": "gamma_2",
        **_with_leaves(
            {
                "attention.o_proj": "attn.proj",
                "mlp.up_proj": "mlp.fc1",
                "mlp.down_proj": "mlp.fc2",
                "norm1": "norm1",
                "norm2": "norm2",
            }
        ),
    },
    joined={"attn.qkv.weight": tuple(f"attention.{part}_proj.weight" for part in "qkv")},
    left_out=("embeddings.mask_token",),
)


def dinov3_to_timm(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' DINOv3 ViT for timm.

    Weights of queries, keys and values become one. The mask token is left out.

    Args:
        state_dict: Weights as ``save_pretrained`` writes them.

    Raises:
        InputError: A weight without a place in timm's models, or a layer without one of queries, keys and values.
    """
    return _renamed(state_dict, _DINOV3)


def transformers_to_timm(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' ViT, DeiT or DINOv2, and join queries, keys and values.

    Mask token and pooler are left out: timm's models have neither. A distillation token without a classifier becomes a
    register token. Where there are register tokens, the positions of class and distillation token are added to them, as
    timm's ``no_embed_class`` expects.

    Args:
        state_dict: Weights as ``save_pretrained`` writes them, with or without the prefix of the model's type.

    Raises:
        InputError: A weight without a place in timm's models, a layer without one of queries, keys and values, or
            positions that do not fit the tokens.
    """
    prefix = re.compile("|".join(map(re.escape, _PREFIXES)))
    named = {name[found.end() :] if (found := prefix.match(name)) else name: x for name, x in state_dict.items()}
    return _with_register_tokens(_renamed(named, _VIT))


def _renamed(weights: Mapping[str, Tensor], names: _Names) -> dict[str, Tensor]:
    """Rename all weights, and join the parts of a weight."""
    place_of_part = {part: place for place, parts in names.joined.items() for part in parts}
    renamed: dict[str, Tensor] = {}
    found: dict[tuple[str, str], dict[str, Tensor]] = {}  # parts by their block and place
    for name, value in weights.items():
        block, rest = match.groups() if (match := names.block.fullmatch(name)) else ("", "")
        if name in names.outside:
            renamed[names.outside[name]] = value
        elif rest in place_of_part:
            found.setdefault((block, place_of_part[rest]), {})[rest] = value
        elif rest in names.inside:
            renamed[f"blocks.{block}.{names.inside[rest]}"] = value
        elif name not in names.left_out:
            raise InputError(f"{name} has no place in timm's vision transformers: not a {names.kind} of transformers.")
    for (block, place), parts in found.items():
        name = f"blocks.{block}.{place}"
        if missing := [part for part in names.joined[place] if part not in parts]:
            raise InputError(f"{name} cannot be made: the weights lack {missing[0]}.")
        renamed[name] = torch.cat([parts[part] for part in names.joined[place]])
    return renamed


def _with_register_tokens(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make a distillation token without a classifier a register token, and leave positions to patches alone."""
    placed = ["cls_token"]
    if "dist_token" in weights and "head_dist.weight" not in weights:
        weights = {"reg_token" if name == "dist_token" else name: value for name, value in weights.items()}
        placed.append("reg_token")
    elif "reg_token" not in weights:
        return weights
    if weights["reg_token"].ndim != 3:
        raise InputError(f"register tokens must be [1, tokens, C], got {tuple(weights['reg_token'].shape)}.")
    positions = weights.get("pos_embed", torch.empty(0)).float()
    for index, name in enumerate(placed):
        token = weights.get(name)
        if token is None or positions.ndim != 3 or token.shape != positions[:, index : index + 1].shape:
            raise InputError(f"{name} and the position embeddings of the weights do not fit each other.")
        weights[name] = token.float() + positions[:, index : index + 1]
    return {**weights, "pos_embed": positions[:, len(placed) :]}
