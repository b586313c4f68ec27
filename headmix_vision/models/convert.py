"""Conversion of trained weights, of timm's DeiT and ViT or of our models, to a mixed-head model."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.models.convert_mhla import is_released_mhla, rename_released_mhla
from headmix_vision.models.headmix_vit import (
    HeadMixVisionTransformer,
    carry_over,
    find_grid,
    named_grid,
    refuse_grid,
    state_dict_in,
)


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


def convert_state_dict(
    state_dict: dict[str, Any], model: HeadMixVisionTransformer, source_grid: tuple[int, int] | None = None
) -> Conversion:
    """Map a state dict with timm's DeiT or ViT keys onto ``model``.

    All weights that both have are taken over: projections, MLPs, norms (the final norm moves to ``fc_norm`` when the
    model pools by the mean), what the core of one of our models has learned, the head if the class counts agree,
    position embeddings resampled to the model's resolution. A class, register or distillation token the model lacks is
    left out together with its position; one that the source lacks keeps the model's token and position.

    >>> import timm, headmix_vision
    >>> source = timm.create_model("deit_tiny_patch16_224", depth=1).state_dict()  # pretrained=True: with its weights
    >>> model = timm.create_model("deit_mhla_tiny", depth=1)
    >>> converted = convert_state_dict(source, model)
    >>> model.load_state_dict(converted.state_dict)
    <All keys matched successfully>
    >>> converted.new_parameters, converted.unused
    (['blocks.0.attn.core.mixing.weight'], ['cls_token'])

    Weights of the released MHLA code load into models whose layers are made as its: an InputError names the arguments.

    A model without a head mix becomes one with it in the same way, and computes the same function until it is trained
    on, since a new mix starts as its core alone. The norm that models of explicit heads have on changes the function
    where it is new, that is over every core but ``"hih"``; ``output_norm=False`` leaves it out.

    Args:
        state_dict: weights of a timm ViT, or a checkpoint holding them under ``model`` or ``state_dict``; prefixes of
            DistributedDataParallel and torch.compile are left out.
        model: the model to fill; it is not changed.
        source_grid: patches along height and width of the source. Where it is None, it is the grid that the state dict
            of one of our models names, else the model's own if it has as many patches, else that of the model's
            ``pretrained_cfg`` (224 x 224 pixels for most names) if it has as many.

    Raises:
        InputError: if the source is not a ViT with timm's keys, its token grid is not known, its width, depth, patch
            size or input channels differ, or the model projects to fewer heads than the source
            (:func:`~headmix_vision.models.compress_heads` makes these).
    """
    source: dict[str, Any] = state_dict_in(state_dict, "model", "state_dict")
    grid = source_grid or named_grid(source)
    if is_released_mhla(source):
        source = rename_released_mhla(source, model)
        side = math.isqrt(source["pos_embed"].shape[1])  # the released grid is a square, without prefix tokens
        grid = grid or (side, side)
    if "patch_embed.proj.weight" not in source or "blocks.0.attn.qkv.weight" not in source:
        raise InputError("state_dict has no patch_embed.proj.weight and blocks.0.attn.qkv.weight: not a timm ViT.")
    check_depth(source, model)
    unused: list[str] = []

    old_norm, new_norm = ("norm", "fc_norm") if isinstance(model.norm, nn.Identity) else ("fc_norm", "norm")
    for leaf in ("weight", "bias"):
        if f"{old_norm}.{leaf}" in source:
            source[f"{new_norm}.{leaf}"] = source.pop(f"{old_norm}.{leaf}")
    if source.get("head.weight", Tensor()).shape != getattr(model.head, "weight", Tensor()).shape:
        unused += [name for name in ("head.weight", "head.bias") if source.pop(name, None) is not None]
    if "pos_embed" in source and model.pos_embed is not None:
        source["pos_embed"] = _convert_positions(source, model, grid)

    return fit(source, model, lambda name: "width, depth, patch size and input channels must agree", unused)


_ATTENTION_HINTS = {
    ".attn.head_mix.": "head_mix_args must agree",
    ".attn.core.": "core_args and block_grid must agree",
}


def check_depth(source: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise InputError unless the weights have as many transformer blocks as the model."""
    depth, own = (
        len({name.split(".")[1] for name in source if name.startswith("blocks.")}),
        len(cast(Any, model).blocks),
    )
    if depth != own:
        raise InputError(f"the source has {depth} blocks, the model {own}.")


def fit(
    source: Mapping[str, Tensor], model: nn.Module, hint: Callable[[str], str], unused: Iterable[str] = ()
) -> Conversion:
    """Complete renamed weights by the model's own, and leave out what it has no place for.

    Args:
        source: weights under the model's names.
        model: the model to fill; it is not changed.
        hint: tells what must agree for a weight to have the shape of the model's.
        unused: names that have been left out before.

    Raises:
        InputError: for a weight of another shape than the model's.
    """
    target = model.state_dict()
    for name, value in source.items():
        if name in target and value.shape != target[name].shape:
            _refuse_shape(name, value, target[name], hint(name))
    # integers, as sizes, are not weights
    new = [name for name, value in target.items() if name not in source and value.is_floating_point()]
    left_out = [*unused, *(name for name in source if name not in target)]
    target.update({name: value for name, value in source.items() if name in target})
    return Conversion(target, new, left_out)


def _refuse_shape(name: str, value: Tensor, wanted: Tensor, hint: str) -> NoReturn:
    for part, of_attention in _ATTENTION_HINTS.items():
        hint = of_attention if part in name else hint
    if ".attn.qkv." in name and value.shape[1:] == wanted.shape[1:] and len(value) > len(wanted):
        hint = "fewer component_heads are for headmix_vision.models.compress_heads, which computes them"
    raise InputError(f"{name} has shape {tuple(value.shape)}, the model needs {tuple(wanted.shape)}: {hint}.")


PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")  # in the order in which timm puts them before the patches


def _convert_positions(source: dict[str, Any], model: HeadMixVisionTransformer, named: Any) -> Tensor:
    """Return positions for the model's tokens: those that they have in the source, resampled to the model's grid.

    Prefix tokens are told apart by kind. One that the source lacks keeps the model's position. A token without one, as
    ``no_embed_class`` leaves them, has position zero; a position that the model has no place for is added to its token.

    Returns:
        [1, tokens, C].
    """
    stored, target = source["pos_embed"], cast(Tensor, model.pos_embed).detach()
    prefix, grid = _find_prefix_and_grid(source, model, named)
    kept, first, embedded = [], 0, 0
    for name in PREFIX_TOKENS:
        count = source[name].shape[1] if name in source else 0
        own = getattr(model, name, None)
        position = stored[:, first : first + count] if prefix else stored.new_zeros(1, count, stored.shape[2])
        first += count if prefix else 0
        if own is None:
            continue
        if not model.no_embed_class:
            kept.append(position if count == own.shape[1] else target[:, embedded : embedded + own.shape[1]])
            embedded += own.shape[1]
        elif count:
            source[name] = source[name] + position
    return torch.cat([*kept, carry_over(stored[:, prefix:], grid, model.patch_embed.grid_size)], dim=1)


def _find_prefix_and_grid(
    source: dict[str, Any], model: HeadMixVisionTransformer, named: Any
) -> tuple[int, tuple[int, int]]:
    """Count the prefix tokens with a position of their own, all or none, and find the token grid of the others."""
    tokens = sum(source[name].shape[1] for name in PREFIX_TOKENS if name in source)
    positions = source["pos_embed"].shape[1]
    for prefix in (tokens, 0):
        grid = find_grid(model, positions - prefix, named, tuple(source["patch_embed.proj.weight"].shape[-2:]))
        if grid is not None:
            return prefix, grid
    raise refuse_grid(positions - tokens, model.patch_embed.grid_size, named)


def __getattr__(name: str) -> Any:
    if name in ("wan_to_mhla", "sana_to_mhla"):  # load diffusers
        module = importlib.import_module(f"headmix_vision.models.convert_{name.split('_')[0]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
