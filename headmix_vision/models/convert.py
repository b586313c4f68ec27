"""Turns the weights of a trained softmax DeiT or ViT into those of a mixed-head model."""

from __future__ import annotations

from typing import Any, NamedTuple

from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.models.headmix_vit import HeadMixVisionTransformer


class Conversion(NamedTuple):
    """The result of :func:`convert_state_dict`.

    Attributes:
        state_dict: complete weights, ``model.load_state_dict(state_dict)`` accepts them strictly.
        new_parameters: names which the source does not have; they keep the model's present values.
        unused: names of the source which the model has no place for.
    """

    state_dict: dict[str, Tensor]
    new_parameters: list[str]
    unused: list[str]


def convert_state_dict(state_dict: dict[str, Any], model: HeadMixVisionTransformer) -> Conversion:
    """Map a state dict with timm's DeiT or ViT keys onto ``model``.

    All weights that both have are taken over: projections, MLPs, norms (the final norm moves to ``fc_norm`` when the
    model pools by the mean), the head if the class counts agree, position embeddings resampled to the model's
    resolution. A class, register or distillation token the model lacks is left out together with its position.
    For example::

        source = timm.create_model("deit_small_patch16_224", pretrained=True).state_dict()
        model = timm.create_model("deit_mhla_small")
        converted = convert_state_dict(source, model)
        model.load_state_dict(converted.state_dict)

    Args:
        state_dict: weights of a timm ViT, or a checkpoint holding them under ``model`` or ``state_dict``.
        model: the model to fill; it is not changed.

    Raises:
        InputError: if the source is no ViT with timm's keys, or its width, depth, patch size or input channels differ.
    """
    source = dict(state_dict.get("model", state_dict.get("state_dict", state_dict)))
    if "patch_embed.proj.weight" not in source or "blocks.0.attn.qkv.weight" not in source:
        raise InputError("state_dict has no patch_embed.proj.weight and blocks.0.attn.qkv.weight: not a timm ViT.")
    depth = len({name.split(".")[1] for name in source if name.startswith("blocks.")})
    if depth != len(model.blocks):
        raise InputError(f"the source has {depth} blocks, the model {len(model.blocks)}.")
    unused: list[str] = []

    old_norm, new_norm = ("norm", "fc_norm") if isinstance(model.norm, nn.Identity) else ("fc_norm", "norm")
    for leaf in ("weight", "bias"):
        if f"{old_norm}.{leaf}" in source:
            source[f"{new_norm}.{leaf}"] = source.pop(f"{old_norm}.{leaf}")
    if source.get("head.weight", Tensor()).shape != getattr(model.head, "weight", Tensor()).shape:
        unused += [name for name in ("head.weight", "head.bias") if source.pop(name, None) is not None]
    if "pos_embed" in source and model.pos_embed is not None:
        source["pos_embed"] = _convert_positions(source, model)

    target = model.state_dict()
    for name in [name for name in source if name not in target]:
        unused.append(name)
        del source[name]
    for name, value in source.items():
        if value.shape != target[name].shape:
            raise InputError(
                f"{name} has shape {tuple(value.shape)}, the model needs {tuple(target[name].shape)}: "
                "width, depth, patch size and input channels must agree."
            )
    return Conversion({**target, **source}, [name for name in target if name not in source], unused)


def _convert_positions(source: dict[str, Tensor], model: HeadMixVisionTransformer) -> Tensor:
    """Select the positions of the tokens that the model has and resample them to its grid: [1, tokens, C]."""
    positions, prefix = source["pos_embed"], _num_prefix_positions(source)
    wanted = 0 if model.no_embed_class else model.num_prefix_tokens
    if wanted > prefix:
        raise InputError(f"the model has {wanted} prefix positions, the source {prefix}: no weights for the others.")
    # Class token first, then the others, on both sides.
    positions = positions[:, [*range(wanted), *range(prefix, positions.shape[1])]]
    return resample_abs_pos_embed(positions, new_size=model.patch_embed.grid_size, num_prefix_tokens=wanted)


def _num_prefix_positions(source: dict[str, Tensor]) -> int:
    """Count the prefix tokens with a position of their own: the positions that a square grid leaves over."""
    tokens = [source[name].shape[1] for name in ("cls_token", "dist_token", "reg_token") if name in source]
    for prefix in (sum(tokens), 0):
        side = round((source["pos_embed"].shape[1] - prefix) ** 0.5)
        if side**2 == source["pos_embed"].shape[1] - prefix:
            return prefix
    raise InputError(f"pos_embed of {source['pos_embed'].shape[1]} positions is not a square grid plus prefix tokens.")
