"""Compression of the key and value heads of a trained model into fewer component heads.

H heads, D head dim, C width, h' component heads.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_counts
from headmix_vision.layers import ExplicitHeads, HeadMixAttention


class LayerErrors(NamedTuple):
    """Loss of a layer: relative Frobenius error of the projections composed of h' heads against the trained ones.

    Attributes:
        layer: name of the attention layer in the model.
        keys, values: square root of the share of the squared singular values that are left out, from 0 to 1.
    """

    layer: str
    keys: float
    values: float


class Compression(NamedTuple):
    """The result of :func:`compress_heads`.

    Attributes:
        model: the compressed model; it shares no memory with the source.
        errors: of each compressed layer, from the first.
    """

    model: Any
    errors: list[LayerErrors]


@torch.no_grad()
def compress_heads(model: nn.Module, component_heads: int) -> Compression:
    """Make a model of explicit heads, ``head_mix="mea"``, whose keys and values need fewer projected heads.

    The key projection of a layer, bias included, is H heads of D x (C + 1) numbers. Its best approximation by h' heads
    of which all H are linear compositions is its singular value decomposition over the heads (arXiv 2601.19611):
    the first h' right singular vectors times their singular values become the projection, the left ones, orthonormal,
    the composition ``head_mix.mix``. Values likewise. Projections and kept keys and values shrink to h' / H. Everything
    else is copied, the function is that of the source for h' = H, and ``output_norm`` is as the source has it: mostly
    off, while models called ``mea`` have it on. Training recovers what was lost (docs/finetune.md).

    >>> import timm, headmix_vision
    >>> source = timm.create_model("deit_softmax_digits", pretrained=True)
    >>> model, errors = compress_heads(source, component_heads=1)
    >>> [round(layer.keys, 2) for layer in errors]
    [0.57, 0.68, 0.67, 0.68]
    >>> arguments = {"head_mix_args": {"component_heads": 1}, "output_norm": False}
    >>> timm.create_model("deit_softmax_mea_digits", **arguments).load_state_dict(model.state_dict())
    <All keys matched successfully>

    A softmax model of timm, or an official DiT, is compressed after :mod:`headmix_vision.models.convert` (or
    ``convert_dit``) has made it ``deit_softmax_*`` (``dit_softmax_*``). In a model whose ``global_every`` leaves the
    window out of some layers, these stay as they are.

    Args:
        model: a ViT or DiT of this package without a head mix, of finite weights; it is not changed.
        component_heads: h', from 1 to H.

    Raises:
        InputError: if ``model`` has no attention layers of this package, a head mix, an adapter or parametrization of
            its projections, or ``qk_norm``: a norm of all H key heads, with a weight for each channel, is none of h'
            heads. If ``component_heads`` is out of range.
    """
    layers = _layers_to_compress(model)
    for name, layer in layers.items():
        _check_layer(name, layer, component_heads)
    compressed = copy.deepcopy(model)
    errors = []
    for name, layer in layers.items():
        new, keys, values = _compress_layer(layer, component_heads)
        compressed.set_submodule(name, new)
        errors.append(LayerErrors(name, keys, values))
    register = getattr(compressed, "register_to_config", None)
    if register is not None:  # a model of diffusers is saved with its arguments
        register(head_mix="mea", head_mix_args={"component_heads": component_heads})
    return Compression(compressed, errors)


def _layers_to_compress(model: nn.Module) -> dict[str, HeadMixAttention]:
    """Return the attention layers by name; those with a window alone, where some have one."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    layers = {name: module for name, module in modules if name and isinstance(module, HeadMixAttention)}
    if not layers:
        raise InputError(
            f"{type(model).__name__} holds no attention layers of headmix_vision: convert a model of timm by "
            "headmix_vision.models.convert first."
        )
    windowed = {name: layer for name, layer in layers.items() if getattr(layer.core, "window", None) is not None}
    return windowed or layers


def _check_layer(name: str, layer: HeadMixAttention, component_heads: int) -> None:
    check_counts(1, layer.num_heads, component_heads=component_heads)
    if type(layer) is not HeadMixAttention:
        raise InputError(
            f"{name} is a {type(layer).__name__}: compress a model of this package by its weights instead."
        )
    if layer.head_mix is not None:
        raise InputError(f"{name} has a head mix, {type(layer.head_mix).__name__}: only plain heads are compressed.")
    if type(layer.qkv) is not nn.Linear:
        raise InputError(f"{name}.qkv is a {type(layer.qkv).__name__}, no plain projection: merge or remove it first.")
    if not isinstance(layer.k_norm, nn.Identity):
        raise InputError(f"{name} has qk_norm, a norm over all {layer.num_heads} key heads, which fewer cannot have.")
    for kind, weight in layer.qkv.named_parameters():
        if weight.is_meta or not weight.isfinite().all():
            raise InputError(f"{name}.qkv.{kind} must hold finite numbers to be compressed.")


def _compress_layer(layer: HeadMixAttention, component_heads: int) -> tuple[HeadMixAttention, float, float]:
    """Return a compressed copy of a layer, and the errors of its keys and values."""
    weight, bias = layer.qkv.weight, layer.qkv.bias
    rows = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    q, k, v = rows.cpu().double().unflatten(0, (3, layer.num_heads, layer.head_dim)).flatten(2)
    (k, mix_k, error_k), (v, mix_v, error_v) = (_factorise(heads, component_heads) for heads in (k, v))
    rows = torch.cat([q, k, v]).unflatten(1, (layer.head_dim, -1)).flatten(0, 1)
    return _with_components(layer, rows, torch.stack([mix_k, mix_v])), error_k, error_v


def _with_components(layer: HeadMixAttention, rows: Tensor, mix: Tensor) -> HeadMixAttention:
    """Return a copy of a layer that projects by rows [(H + 2 h') D, C], or C + 1 with a bias, and mixes [2, H, h']."""
    weight, bias = layer.qkv.weight, layer.qkv.bias
    new = HeadMixAttention(
        weight.shape[1],
        layer.num_heads,
        core="softmax",  # until it is replaced by the layer's own
        head_mix="mea",
        head_mix_args={"component_heads": mix.shape[2]},
        grid=layer.grid.shape,
        num_prefix_tokens=layer.grid.num_prefix_tokens,
        qkv_bias=bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    for name, module in layer.named_children():
        if name != "qkv":
            setattr(new, name, copy.deepcopy(module))
    cast(ExplicitHeads, new.head_mix).mix.copy_(mix)
    new.qkv.weight.copy_(rows[:, : weight.shape[1]])
    if bias is not None:
        new.qkv.bias.copy_(rows[:, -1])
    return new.train(layer.training)


def _factorise(heads: Tensor, count: int) -> tuple[Tensor, Tensor, float]:
    """Factorise heads, float64 [H, features]: components [h', features], their composition [H, h'], relative error.

    The sign of a component is that with which its largest weight in the composition is positive.
    """
    left, singular, right = torch.linalg.svd(heads, full_matrices=False)
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))
    sign = largest.sign()
    error = singular[count:].norm() / singular.norm().clamp(min=torch.finfo(singular.dtype).tiny)
    return ((sign * singular).mT * right)[:count], (sign * left)[:, :count], error.item()
