"""The attention layer of another model, with a core of this package between its own projections.

B batch, N tokens, C width, H heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_counts, check_flags
from headmix_vision.layers.attention import HeadMixAttention, check_parts, check_sees_later
from headmix_vision.layers.convolutions import ConvPositionEncoding, GridConvolution, is_bare
from headmix_vision.layers.cores import CORES
from headmix_vision.layers.cores.base import LayerSpec
from headmix_vision.layers.head_mixes import HEAD_MIXES
from headmix_vision.layers.padding import grids_of
from headmix_vision.layers.positions import Rotation
from headmix_vision.ops import SampleGrids, TokenGrid
from headmix_vision.ops.dispatch import as_axes


class GridOfCall(Protocol):
    """The token grid of a model's current call, which its layers read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Tokens along each axis, prefix tokens left out."""

    @property
    def varies(self) -> bool:
        """Whether samples of a call may have grids of their own, which the mask then carries."""

    def of_backward(self, count: int) -> tuple[int, ...]:
        """Return the grid of so many tokens whose backward pass runs."""


@dataclass(frozen=True)
class Names:
    """Names of the parts of an attention layer; the defaults are timm's.

    Attributes:
        heads: attribute with the number of heads.
        qkv: submodule of one projection, or of three for queries, keys and values.
        out: submodule of the output projection.
        drop: attribute with the dropout on attention weights: a module, or a rate.
        bias: parameter and buffer of a bias on attention scores, which only softmax can use.
        rotate_half: whether rotary positions pair channel i with channel i + D / 2; None where the layer has an
            attribute of this name.
    """

    heads: str = "num_heads"
    qkv: tuple[str, ...] = ("qkv",)
    out: str = "proj"
    drop: str = "attn_drop"
    bias: tuple[str, ...] = ()
    rotate_half: bool | None = None


class SwappedAttention(HeadMixAttention):
    """An attention layer of timm or transformers with another core, and with all its own weights.

    Projections, norms and the gate are the modules and parameters of the original under their names. New are the core,
    the head mix and the optional parts. Convolutions start at zero: they change nothing before they are trained.

    Args:
        original: the layer to replace. It does not change, and its weights are shared.
        names: names of its parts.
        grid: token grid at the start.
        grid_of_call: the object that knows the grid of the current call.
        core, head_mix, block_grid, core_args, head_mix_args, cpe, lepe: as in
            :class:`~headmix_vision.layers.HeadMixAttention`.
        output_norm: RMSNorm of each head's output; None for what models of this core and head mix have.

    Shape:
        ``x`` [B, N, C] -> [B, N, C]. ``rope`` is timm's table of sines and cosines for the tokens on the grid,
        [N, 2 * D], [H, N, 2 * D] or [B, H, N, 2 * D] with 1 in place of B or H.

    Raises:
        InputError: for options that do not fit the layer, and, when called, for a number of tokens that is not the
            grid's, or a mask or rotary positions that the core cannot take.
    """

    def __init__(
        self,
        original: nn.Module,
        names: Names,
        grid: TokenGrid,
        grid_of_call: GridOfCall,
        core: str = "mhla",
        head_mix: str | None = None,
        block_grid: tuple[int, ...] = (4, 4),
        core_args: dict[str, Any] | None = None,
        head_mix_args: dict[str, Any] | None = None,
        cpe: bool = False,
        lepe: int = 0,
        output_norm: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)  # the base class would make projections of its own
        check_parts(core, head_mix, core_args, head_mix_args, lepe)
        if output_norm is None:
            defaults = CORES[core].layer_options | (HEAD_MIXES[head_mix].layer_options if head_mix else {})
            output_norm = defaults.get("output_norm", False)
        check_flags(cpe=cpe, output_norm=output_norm)
        for count in as_axes("block_grid", block_grid):
            check_counts(1, block_grid=count)
        if getattr(original, names.qkv[0]) is None:  # timm's layers have one projection or three
            names = replace(names, qkv=("q_proj", "k_proj", "v_proj"))
        self.names, self.grid, self.grid_of_call, self.ranks = names, grid, grid_of_call, None
        half = names.rotate_half
        self.rotate_half = bool(getattr(original, "rotate_half", False)) if half is None else half
        parts: Any = original
        dim, out, drop = getattr(parts, names.qkv[0]).in_features, getattr(parts, names.out), getattr(parts, names.drop)
        self.num_heads = getattr(parts, names.heads)
        self.head_dim = out.in_features // self.num_heads
        self.queries_per_key = self.num_heads // getattr(parts, "num_kv_heads", self.num_heads)
        spec = LayerSpec(
            dim,
            self.num_heads,
            self.head_dim,
            grid,
            tuple(block_grid),
            drop.p if isinstance(drop, nn.Dropout) else drop,
            CORES[core].averages_places,
            out.weight.device,
            out.weight.dtype,
        )
        factory, axes = spec.factory, len(grid.shape)
        mix = None if head_mix is None else HEAD_MIXES[head_mix](spec, **(head_mix_args or {}))
        if mix is not None and mix.projected_heads != (self.num_heads,) * 3:
            raise InputError(
                f"head_mix_args={head_mix_args!r} change the number of projected heads, which stay {self.num_heads}:"
                " leave component_heads out."
            )
        self.repeats = 1 if mix is None else mix.repeats
        made = CORES[core](spec if mix is None else mix.core_spec(spec), **(core_args or {}))
        check_sees_later(made, cpe, lepe)
        self.takes_bias = made.forms_weights and self.repeats == 1 and getattr(made, "window", None) is None

        self._take_over(original)
        self.input_norm = nn.Identity()
        self.cpe = _silenced(ConvPositionEncoding(dim, axes, **factory)) if cpe else None
        self.lepe = _silenced(GridConvolution(out.in_features, axes, lepe, **factory)) if lepe else None
        self.head_mix, self.core = mix, made
        self.output_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **factory) if output_norm else nn.Identity()
        for part in (self.input_norm, self.cpe, self.lepe, mix, made, self.output_norm):
            if part is not None:
                part.train(original.training)

    def _take_over(self, original: nn.Module) -> None:
        """Take the modules, parameters, buffers, settings and hooks of the original; parts that it lacks do nothing."""
        names = self.names
        self.__dict__.update({name: value for name, value in vars(original).items() if "_hook" in name})
        left_out = {names.drop, *(() if self.takes_bias else names.bias)}
        settings = {name: value for name, value in vars(original).items() if not name.startswith("_")}
        self.__dict__.update({name: value for name, value in settings.items() if name not in vars(self)})
        self.training = original.training
        for name, module in original._modules.items():
            if name not in left_out:
                self.add_module(name, module)
        for name, parameter in original._parameters.items():
            self.register_parameter(name, None if name in left_out else parameter)
        for name, buffer in original._buffers.items():
            persistent = name not in original._non_persistent_buffers_set
            self.register_buffer(name, None if name in left_out else buffer, persistent)
        for name in ("q_norm", "k_norm", "norm", "proj_drop"):
            if not hasattr(self, name):
                self.add_module(name, nn.Identity())
        if not hasattr(self, "gate"):
            self.gate = None

    def flops(self, grid: tuple[int, ...] | None = None) -> int:
        """Return the operations of one image of the grid of the last call, or of another."""
        return super().flops(self.grid_of_call.shape if grid is None else grid)

    def projections(self) -> list[nn.Linear]:
        layers = [getattr(self, name) for name in (*self.names.qkv, self.names.out)]
        return layers if self.gate is None else [*layers, self.gate]

    def _project(self, x: Tensor) -> list[Tensor]:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self._flat_projections(x))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotate_half:  # the cores rotate neighbouring channels; products do not depend on their order
            q, k = (y.unflatten(-1, (2, -1)).mT.flatten(-2) for y in (q, k))
        if self.queries_per_key > 1:
            k, v = (y.repeat_interleave(self.queries_per_key, 2) for y in (k, v))
        return [q, k, v] if self.head_mix is None else list(self.head_mix("before", q, k, v))

    def _flat_projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [B, N, heads * D] each."""
        if len(self.names.qkv) > 1:
            return cast(tuple[Tensor, Tensor, Tensor], tuple(getattr(self, name)(x) for name in self.names.qkv))
        qkv = getattr(self, self.names.qkv[0])
        q_bias = getattr(self, "q_bias", None)
        if q_bias is None:
            out = qkv(x)
        else:
            bias = torch.cat([q_bias, cast(Tensor, self.k_bias), cast(Tensor, self.v_bias)])
            out = F.linear(x, qkv.weight, bias) if is_bare(qkv, nn.Linear) else qkv(x) + bias
        q, k, v = out.chunk(3, -1)  # unpacked, which torch.fx can trace
        return q, k, v

    def _finish(self, x: Tensor, out: Tensor, positions: Tensor | None = None) -> Tensor:
        """Mix the heads back, add ``positions``, norm, gate by a sigmoid and project: [B, N, C]."""
        out = self.output_norm(out if self.head_mix is None else self._mix_back(x, out)).flatten(2)
        out = self.norm(out if positions is None else out + positions)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return cast(Tensor, self.proj_drop(getattr(self, self.names.out)(out)))

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, ...] | SampleGrids | None = None,
        rotation: Rotation | None = None,
        key_mask: Tensor | None = None,
        rope: Tensor | None = None,
    ) -> Tensor:
        if rope is not None:
            sin, cos = rope.chunk(2, -1)
            rotation = self._rotation(sin, cos)
        if grid is None and attn_mask is not None and self.grid_of_call.varies:
            return self._of_samples(x, attn_mask, is_causal, rotation, key_mask)
        grid = self._current_grid(x.shape[1]) if grid is None else grid
        return super().forward(x, attn_mask, is_causal, grid, rotation, key_mask)

    def _current_grid(self, tokens: int) -> tuple[int, ...]:
        """Return the grid of the call; where gradient checkpointing computes a layer again, of its forward pass."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
            return self.grid_of_call.shape
        return self.grid_of_call.of_backward(tokens - self.grid.num_prefix_tokens)

    @torch.compiler.disable  # each batch has other grids, for each of which it would compile anew
    def _of_samples(
        self, x: Tensor, attn_mask: Tensor, is_causal: bool, rotation: Rotation | None, key_mask: Tensor | None
    ) -> Tensor:
        grid = grids_of(attn_mask) or self.grid_of_call.shape
        return super().forward(x, attn_mask, is_causal, grid, rotation, key_mask)

    def _rotation(self, sin: Tensor, cos: Tensor) -> Rotation:
        """Turn tables with a value for each channel, [N, D], [H, N, D] or [B, H, N, D], into those of the cores."""
        channels = slice(self.head_dim // 2) if self.rotate_half else slice(None, None, 2)
        cos, sin = (table[..., channels] for table in (cos, sin))
        if cos.ndim > 2:
            cos, sin = (table.transpose(-2, -3) for table in (cos, sin))
        return cos, sin


def _silenced(convolution: Any) -> Any:
    """Set the weights of a convolution to zero."""
    for parameter in convolution.parameters():
        nn.init.zeros_(parameter)
    return convolution
