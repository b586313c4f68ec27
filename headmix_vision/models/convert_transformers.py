"""Conversion of weights of transformers' ViT and DINOv2 to the names of timm's vision transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from headmix_vision.errors import InputError

_BLOCK = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias|lambda1)")
_RENAMED = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
    "classifier.weight": "head.weight",
    "classifier.bias": "head.bias",
}
_IN_BLOCK = {
    "attention.output.dense": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layer_scale1": "ls1",
    "layer_scale2": "ls2",
    **{name: name for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")},
}
_QKV = ("query", "key", "value")
_PREFIXES = ("vit.", "dinov2.", "backbone.")
_IGNORED = ("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias")


def transformers_to_timm(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' ViT or DINOv2, and join queries, keys and values.

    Mask token and pooler are left out: timm's models have neither.

    Args:
        state_dict: Weights as ``save_pretrained`` writes them, with or without the prefix ``vit.`` or ``dinov2.``.

    Raises:
        InputError: A weight without a place in timm's models, or a layer without one of queries, keys and values.
    """
    renamed: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for full, value in state_dict.items():
        name = next((full.removeprefix(prefix) for prefix in _PREFIXES if full.startswith(prefix)), full)
        if name in _IGNORED:
            continue
        in_block = _BLOCK.fullmatch(name)
        if name in _RENAMED:
            renamed[_RENAMED[name]] = value
        elif in_block and in_block[2].removeprefix("attention.attention.") in _QKV:
            place = parts.setdefault(f"blocks.{in_block[1]}.attn.qkv.{in_block[3]}", {})
            place[in_block[2].rpartition(".")[2]] = value
        elif in_block and in_block[2] in _IN_BLOCK:
            leaf = "gamma" if in_block[3] == "lambda1" else in_block[3]
            renamed[f"blocks.{in_block[1]}.{_IN_BLOCK[in_block[2]]}.{leaf}"] = value
        else:
            raise InputError(f"{full} has no place in timm's vision transformers: not a ViT or DINOv2 of transformers.")
    for name, three in parts.items():
        if missing := [part for part in _QKV if part not in three]:
            raise InputError(f"{name} cannot be made: the weights lack {missing[0]}.")
        renamed[name] = torch.cat([three[part] for part in _QKV])
    return renamed
