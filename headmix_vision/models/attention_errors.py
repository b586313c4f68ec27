"""Errors of a student against its teacher: layer by layer in attention, and in the last features.

B batch, N tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.models.converted import ConvertedModel

Pairs = Sequence[tuple[nn.Module, nn.Module]]


def attention_names(teacher: nn.Module, student: nn.Module) -> list[str]:
    """Name the attention layers that teacher and student both have under a name, and that compute differently.

    Layers of ours differ by core or head mix, layers of diffusers by their processor. A layer that
    :func:`headmix_vision.swap_attention` has swapped differs from its original. The teacher of a converted Wan is
    ``wan_to_mhla(original, layers=[])``, of Sana ``sana_to_mhla(original, layers=[])``: it computes what the original
    does, and tells each layer the grid.

    Raises:
        InputError: if an attention layer of one has no counterpart, or all layers are alike; if the student is
            converted and the teacher is not.
    """
    if isinstance(student, ConvertedModel) and not isinstance(teacher, type(student)):
        raise InputError(
            f"the teacher of a {type(student).__name__} must be one, too, converted with layers=[], got"
            f" {type(teacher).__name__}."
        )
    theirs, ours = (dict(model.named_modules()) for model in (teacher, student))
    attention = [name for name, layer in ours.items() if _kind(layer)]
    of_teacher = {name for name, layer in theirs.items() if _kind(layer)}
    if odd := {*attention} - theirs.keys() | of_teacher - {*attention}:
        raise InputError(f"teacher and student must have the same layers, but one of them has no {min(odd)}.")
    names = [name for name in attention if _kind(ours[name]) != _kind(theirs[name])]
    if not names:
        raise InputError(
            "teacher and student have the same kind of attention in all layers: there is nothing to distil."
        )
    return names


def attention_pairs(teacher: nn.Module, student: nn.Module) -> Pairs:
    """Return the layers that :func:`attention_names` names, of the teacher and of the student.

    Raises:
        InputError: as there.
    """
    names = attention_names(teacher, student)
    return [(teacher.get_submodule(name), student.get_submodule(name)) for name in names]


def _kind(layer: nn.Module) -> tuple[type, ...]:
    """Return what an attention layer computes with; nothing of other modules."""
    parts = {**vars(layer), **layer._modules}  # asked for an attribute, models of diffusers look into their options
    names = ("core", "head_mix") if "core" in parts else ("processor",)
    return tuple(type(parts[name]) for name in names if name in parts)


@contextmanager
def attention_errors(pairs: Pairs, *, learn: bool = True) -> Iterator[list[Tensor]]:
    """Run each student layer on what its teacher's is given while the teacher runs, and collect the errors.

    Under ``torch.no_grad()`` around the teacher, only the students get gradients.

    >>> import timm, headmix_vision
    >>> teacher = timm.create_model("deit_softmax_digits", pretrained=True, class_token=False, global_pool="avg")
    >>> student = timm.create_model("deit_mhla_digits")
    >>> with attention_errors(attention_pairs(teacher, student)) as errors, torch.no_grad():
    ...     logits = teacher(torch.rand(2, 1, 8, 8))
    >>> torch.stack(errors).mean().backward()  # one error for each of four layers
    >>> len(errors)
    4

    Args:
        pairs: attention layers of teacher and student, outputs [B, N, C].
        learn: whether the errors have gradients.

    Yields:
        A list, filled as the teacher runs: for each layer its squared error over the teacher's mean square, float32
        [B].
    """
    errors: list[Tensor] = []

    def compare(student: nn.Module, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        wanted = _tokens(output).detach().float().flatten(1)
        if "call_grid" in vars(layer):  # layers of Sana are told the grid by the block around them
            student.call_grid = layer.call_grid
        with torch.set_grad_enabled(learn):
            errors.append(_relative_error(_tokens(student(*args, **kwargs)).float().flatten(1), wanted))

    hooks = [a.register_forward_hook(partial(compare, b), with_kwargs=True) for a, b in pairs]
    try:
        yield errors
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def tell_grid(pairs: Pairs, images: Tensor) -> None:
    """Tell the students of :func:`attention_errors` the token grid of images, which swapped layers take from a call.

    Args:
        pairs: attention layers of teacher and student.
        images: those that the teacher is given next, [B, C, H, W].
    """
    grids: list[Any] = [layer.grid_of_call for _, layer in pairs if "grid_of_call" in vars(layer)]
    for grid in {id(grid): grid for grid in grids}.values():
        grid.embed(images)


def feature_errors(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the last features of a student with those of its teacher.

    Args:
        found: features of the student, [B, N, C].
        wanted: features of the teacher, of the same shape.

    Returns:
        For each sample the mean of 1 - cosine over its tokens, and the squared error over the teacher's mean square,
        both float32 [B].
    """
    found, wanted = found.float(), wanted.float()
    distance = 1 - F.cosine_similarity(found, wanted, dim=-1).flatten(1).mean(1)
    return distance, _relative_error(found.flatten(1), wanted.flatten(1))


def _tokens(output: Any) -> Tensor:
    """Return what an attention layer computes; layers of transformers return weights beside it."""
    tokens: Tensor = output[0] if isinstance(output, tuple) else output
    return tokens


def _relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean(1) / wanted.square().mean(1).clamp(min=torch.finfo(torch.float32).tiny)
