"""The effective attention matrices of a network's layers, in float64.

A head's output, before norm, gate and projection, is a matrix times values: out = A v, whatever computes it. A is read
off the core itself, row by row, as the derivative of the outputs with respect to the values.

B images, N tokens, H heads, D head dim, R query tokens, S places of the core (N, or more with interleaved heads), G
heads whose values a head reads: 1, or all where a head mix joins heads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headmix_vision.console import available_memory
from headmix_vision.errors import InputError, check_counts, is_whole
from headmix_vision.layers import CORES, HEAD_MIXES, HeadMixAttention
from headmix_vision.ops import TokenGrid
from headmix_vision.ops.numerics import autocast_off

_BYTES = torch.float64.itemsize
# What is held at once, in multiples of the matrices: they are collected from their rows and joined, and entropy and
# distance take weights of tokens, those on the grid, their shares and products. Measured on the CPU over all cores: 6.3
# to 7.4 of entropy, 3.3 to 4.3 of rank.
_COPIES = 8
_MARGIN = 0.9  # of what is free now: it will be another number when the command is repeated


class Layer(NamedTuple):
    """An attention layer of a network.

    Attributes:
        number: Its number among the attention layers, from 0.
        name: Its name as a module, such as `blocks.0.attn`.
        attention: The layer itself.
    """

    number: int
    name: str
    attention: HeadMixAttention

    @property
    def title(self) -> str:
        """The title of the layer's panels."""
        return f"layer {self.number}"

    @property
    def core_name(self) -> str:
        """The name of its core."""
        return _registered(CORES, self.attention.core)

    @property
    def head_mix_name(self) -> str:
        """The name of its head mix; empty without one."""
        return _registered(HEAD_MIXES, self.attention.head_mix) if self.attention.head_mix is not None else ""

    def numbers(self, **numbers: Any) -> dict[str, Any]:
        """Put the layer's number and name in front of numbers."""
        return {"layer": self.number, "name": self.name, **numbers}


def attention_layers(network: nn.Module) -> list[Layer]:
    """List the attention layers of a network in the order of its modules."""
    found = [(name, module) for name, module in network.named_modules() if isinstance(module, HeadMixAttention)]
    return [Layer(number, name, module) for number, (name, module) in enumerate(found)]


def _registered(table: Mapping[str, type[nn.Module]], module: nn.Module) -> str:
    return next((name for name, kind in table.items() if type(module) is kind), type(module).__name__)


@dataclass(frozen=True)
class LayerAttention:
    """Inputs of an attention layer for a batch, from which its matrices are computed.

    Attributes:
        layer: The layer, of a copy of the network in float64.
        grid: The tokens; its repeats are the places of each in the core.
        queries: Numbers of the R query tokens, prefix tokens first.
        inputs: q, k, v and further arguments of the core.
    """

    layer: Layer
    grid: TokenGrid
    queries: list[int]
    inputs: dict[str, Any]

    @property
    def num_images(self) -> int:
        """B."""
        return len(self.inputs["q"])

    def matrices(self, image: int) -> Tensor:
        """Compute the attention matrices of one image: [H, R, G * S], float64.

        Their product with `values(image)` [G * S, D] of each head is the head's output for these tokens. With
        interleaved heads rows are tokens, whose pseudo-heads are collapsed, and columns pseudo-heads of tokens; with
        explicit heads, values are those composed. Head-in-Head convolves its values before.
        """
        with torch.inference_mode(False), torch.enable_grad():
            apply, values = self._linear_map(image)
            values = torch.zeros_like(values).requires_grad_()
            mix = self.layer.attention.head_mix
            out = apply(values) if mix is None else mix("after", apply(values))
            heads = [[head] for head in range(out.shape[2])] if self._joins_heads else [slice(None)]
            return torch.cat([self._rows(out, values, of) for of in heads])

    def _rows(self, out: Tensor, values: Tensor, heads: list[int] | slice) -> Tensor:
        """Derive outputs of some heads, the channels of a head serving one query token each."""
        rows = []
        for tokens in torch.tensor(self.queries, device=out.device).split(out.shape[-1]):
            chosen = torch.zeros_like(out)
            chosen[0, tokens, heads, torch.arange(len(tokens), device=out.device)] = 1
            (found,) = torch.autograd.grad(out, values, chosen, retain_graph=True)
            rows.append(found[0, ..., : len(tokens)].permute(1, 2, 0))  # [heads, tokens, S]
        of_heads = torch.cat(rows, dim=1)
        return of_heads.transpose(0, 1).flatten(1)[None] if self._joins_heads else of_heads

    def values(self, image: int) -> Tensor:
        """Return the values of one image that each head reads: [H, G * S, D], float64."""
        _, values = self._linear_map(image)
        of_heads = values[0].transpose(0, 1)  # [H, S, D]
        return of_heads.flatten(0, 1).expand(len(of_heads), -1, -1) if self._joins_heads else of_heads

    def token_weights(self, matrices: Tensor) -> Tensor:
        """Add up the weights of all values of a token: [H, R, G * S] -> [H, R, N]."""
        return matrices.unflatten(-1, (-1, self.grid.num_tokens // self.grid.repeats, self.grid.repeats)).sum((-3, -1))

    @property
    def _joins_heads(self) -> bool:
        mix = self.layer.attention.head_mix
        return mix is not None and mix.joins_heads

    def _linear_map(self, image: int) -> tuple[Any, Tensor]:
        batched = {"q", "k", "v", "x"}
        one = {name: value[image : image + 1] if name in batched else value for name, value in self.inputs.items()}
        return self.layer.attention.core.linear_map(**one)


def record_attention(
    network: nn.Module,
    *inputs: Any,
    queries: int | Sequence[int] | None = None,
    layers: Collection[int] | None = None,
) -> list[LayerAttention]:
    """Run a copy of a network in float64 and keep what its attention layers get.

    Args:
        network: A network with attention layers of this package; it is not changed.
        inputs: Its arguments; tensors of floating types are converted.
        queries: The query tokens whose rows are wanted: so many of the grid, drawn by a fixed seed; or their numbers,
            prefix tokens first; all when None.
        layers: Numbers of the attention layers to keep; all when None.

    Returns:
        The attention of each layer, in their order.

    Raises:
        InputError: Where there is no such layer or token, or the matrices of a layer do not fit into the memory that
            the device has left; the latter before the layer's attention is computed.
    """
    with torch.inference_mode(False), torch.no_grad():
        network = deepcopy(network).double().eval()
        found = attention_layers(network)
        chosen = range(len(found)) if layers is None else sorted(set(layers))
        if not found or not set(chosen) <= set(range(len(found))):
            known = f"it has layers 0 to {len(found) - 1}" if found else "it has no attention layers of this package"
            raise InputError(f"layers {[*chosen]} of a {type(network).__name__} cannot be analysed: {known}")
        kept: dict[int, LayerAttention] = {}
        for layer in found:
            _leave_kernels(layer.attention.core)
            _leave_kernels(layer.attention.head_mix)
        hooks = [
            found[number].attention.core.register_forward_pre_hook(
                partial(_keep, kept, found[number], queries), with_kwargs=True
            )
            for number in chosen
        ]
        doubled = [x.clone().double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
        with autocast_off(next(network.parameters())):
            network(*doubled)
        for hook in hooks:
            hook.remove()
    return [kept[number] for number in chosen]


def _leave_kernels(part: nn.Module | None) -> None:
    """Lets a core or head mix compute in PyTorch, whatever it was told: the kernels take no float64."""
    for settings in () if part is None else (vars(part), getattr(part, "options", {})):
        if "impl" in settings:
            settings["impl"] = "torch"


def _keep(
    kept: dict[int, LayerAttention],
    layer: Layer,
    queries: int | Sequence[int] | None,
    core: nn.Module,
    arguments: tuple[Tensor, Tensor, Tensor, TokenGrid],
    options: dict[str, Any],
) -> None:
    q, k, v, grid = arguments
    tokens = grid.num_tokens // grid.repeats
    rows = _query_tokens(queries, tokens, grid.num_prefix_tokens)
    mix = layer.attention.head_mix
    columns = grid.num_tokens * (q.shape[2] if mix is not None and mix.joins_heads else 1)
    of_query, memory = _COPIES * _BYTES * layer.attention.num_heads * columns, available_memory(q.device)
    if of_query * len(rows) > memory:
        fitting = int(_MARGIN * memory / of_query)
        advice = f"take fewer query tokens, --queries {fitting}" if fitting else "not even one query token fits"
        raise InputError(
            f"the attention matrices of {layer.title} need {of_query * len(rows) / 1e9:.3g} GB"
            f" ({layer.attention.num_heads} heads, {len(rows)} x {columns} in float64, {_COPIES} copies at once),"
            f" {q.device} has {memory / 1e9:.3g} GB available: {advice}"
        )
    kept[layer.number] = LayerAttention(layer, grid, rows, {"q": q, "k": k, "v": v, "grid": grid, **options})


def _query_tokens(queries: int | Sequence[int] | None, tokens: int, prefix: int) -> list[int]:
    if queries is None:
        return [*range(tokens)]
    if is_whole(queries):
        check_counts(1, queries=queries)
        generator = torch.Generator().manual_seed(0)
        return sorted((prefix + torch.randperm(tokens - prefix, generator=generator)[:queries]).tolist())
    assert not isinstance(queries, int)
    for token in queries:
        if not (is_whole(token) and 0 <= token < tokens):
            raise InputError(f"query token {token!r} does not exist, the tokens are 0 to {tokens - 1}")
    return [*queries]
