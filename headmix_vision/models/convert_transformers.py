"""Conversion of weights of transformers' ViT, DeiT, DINOv2 and DINOv3 to the names of timm's vision transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from headmix_vision.errors import InputError

_BLOCK = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias|lambda1)")
_RENAMED = {
    "embeddings.cls_token": "cls_token",
    "embeddings.distillation_token": "dist_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
    "classifier.weight": "head.weight",
    "classifier.bias": "head.bias",
    "cls_classifier.weight": "head.weight",
    "cls_classifier.bias": "head.bias",
    "distillation_classifier.weight": "head_dist.weight",
    "distillation_classifier.bias": "head_dist.bias",
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
_PREFIXES = ("vit.", "deit.", "dinov2.", "dinov2_with_registers.", "backbone.")
_IGNORED = ("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias")

_DINOV3_BLOCK = re.compile(r"layer\.(\d+)\.(.+)\.(weight|bias|lambda1)")
_DINOV3_RENAMED = {
    "embeddings.cls_token": "cls_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.patch_embeddings.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.bias": "patch_embed.proj.bias",
    "norm.weight": "norm.weight",
    "norm.bias": "norm.bias",
}
_DINOV3_IN_BLOCK = {
    "attention.o_proj.weight": "attn.proj.weight",
    "attention.o_proj.bias": "attn.proj.bias",
    "attention.q_proj.bias": "attn.q_bias",
    "attention.v_proj.bias": "attn.v_bias",
    "layer_scale1.lambda1": "gamma_1",
    "layer_scale2.lambda1": "gamma_2",
    "mlp.up_proj.weight": "mlp.fc1.weight",
    "mlp.up_proj.bias": "mlp.fc1.bias",
    "mlp.down_proj.weight": "mlp.fc2.weight",
    "mlp.down_proj.bias": "mlp.fc2.bias",
    **{f"{norm}.{leaf}": f"{norm}.{leaf}" for norm in ("norm1", "norm2") for leaf in ("weight", "bias")},
}
_DINOV3_QKV = tuple(f"attention.{part}_proj.weight" for part in "qkv")


def dinov3_to_timm(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' DINOv3 ViT for timm's, and join those of queries, keys and values.

    The mask token is left out.

    Args:
        state_dict: Weights as ``save_pretrained`` writes them.

    Raises:
        InputError: A weight without a place in timm's models, or a layer without one of queries, keys and values.
    """
    renamed: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in state_dict.items():
        in_block = _DINOV3_BLOCK.fullmatch(name)
        leaf = f"{in_block[2]}.{in_block[3]}" if in_block else ""
        if name in _DINOV3_RENAMED:
            renamed[_DINOV3_RENAMED[name]] = value
        elif in_block and leaf in _DINOV3_QKV:
            parts.setdefault(f"blocks.{in_block[1]}.attn.qkv.weight", {})[leaf] = value
        elif in_block and leaf in _DINOV3_IN_BLOCK:
            renamed[f"blocks.{in_block[1]}.{_DINOV3_IN_BLOCK[leaf]}"] = value
        elif name != "embeddings.mask_token":
            raise InputError(f"{name} has no place in timm's DINOv3: not a DINOv3 ViT of transformers.")
    return renamed | _joined(parts, _DINOV3_QKV)


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
            raise InputError(
                f"{full} has no place in timm's vision transformers: not a ViT, DeiT or DINOv2 of transformers."
            )
    return _with_register_tokens(renamed | _joined(parts, _QKV))


def _joined(parts: dict[str, dict[str, Tensor]], names: tuple[str, ...]) -> dict[str, Tensor]:
    """Join queries, keys and values of each layer."""
    for name, three in parts.items():
        if missing := [part for part in names if part not in three]:
            raise InputError(f"{name} cannot be made: the weights lack {missing[0]}.")
    return {name: torch.cat([three[part] for part in names]) for name, three in parts.items()}


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
