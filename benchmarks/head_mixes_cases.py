"""Shapes and forms of bench_head_mixes.py: a mix, an op with mixes around it, and a layer.

B batch, N tokens, H heads, D head dim, P pseudo-heads, M token blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks import mhla_cases
from benchmarks.columns import Column, Tensors, run_compiled
from benchmarks.mhla_cases import (
    draw_leaves,
    draw_normal,
    packed_inputs,
    raster_inputs,
    run_low_precision,
    run_mhla,
    run_sdpa_raster,
)
from headmix_vision.layers import HeadMixAttention
from headmix_vision.ops import TokenBlocks, TokenGrid, mix_heads

Mix = Callable[[Tensors, Tensor], Tensors]


@dataclass(frozen=True)
class Shape(mhla_cases.Shape):
    """Interleaved heads on images: B images of a grid of tokens."""

    pseudo_heads: int = 2

    @property
    def blocks(self) -> TokenBlocks:
        """The blocks of the places, P for each token."""
        return TokenBlocks(TokenGrid(self.grid, 0, self.pseudo_heads), self.block_grid)

    @property
    def unit_bytes(self) -> int:
        """Size of one tensor [B, N, H, D]."""
        return self.floor_bytes // 4

    def tiny(self) -> Shape:
        return replace(self, batch=2, grid=(5, 6), heads=2, head_dim=8, block_grid=(2, 2))


SHAPES = tuple(
    Shape(f"{name}_p{pseudo_heads}", batch, 6, grid, 64, (4, 4), pseudo_heads=pseudo_heads)
    for name, batch, grid in (("n196", 128, (14, 14)), ("n1024", 32, (32, 32)))
    for pseudo_heads in (2, 4)
)


@dataclass(frozen=True)
class Contest:
    """Columns that compute the same from the same inputs, and what their results are checked against.

    Attributes:
        exact: computes it in float64, of inputs in float64.
        eager: computes it with every step in the type of the inputs: its error is the budget.
        units: tensors [B, N, H, D] that must be moved forward and with backward, for a shape; None where memory is not
            what bounds the time.
    """

    name: str
    make: Callable[[Shape, torch.Generator], Tensors]
    columns: tuple[Column, ...]
    exact: Callable[..., Tensors]
    eager: Callable[..., Tensors]
    units: Callable[[Shape], tuple[int, int]] | None = None


def einsum_mix(inputs: Tensors, weights: Tensor) -> Tensors:
    """The mix as one writes it down, in the inputs' type; contiguous, so that pseudo-heads can become tokens."""
    weights = weights.to(inputs[0].dtype)
    return tuple(torch.einsum("gh,bnhd->bngd", w, x).contiguous() for w, x in zip(weights, inputs, strict=True))


compiled_mix: Mix = partial(run_compiled, einsum_mix)


def mix_inputs(shape: Shape, generator: torch.Generator) -> Tensors:
    """q, k, v as views of one packed [B, N, 3, H, D], and weights [3, P H, H] in float32."""
    mixed = shape.pseudo_heads * shape.heads
    weights = draw_normal((3, mixed, shape.heads), generator, torch.float32) / shape.heads**0.5
    return (*packed_inputs(shape, generator), *draw_leaves(weights))


def collapse_inputs(shape: Shape, generator: torch.Generator) -> Tensors:
    """The output of a core [B, N, P H, D], and weights [1, H, P H] that are zero between heads."""
    mixed = shape.pseudo_heads * shape.heads
    x = draw_normal((shape.batch, shape.tokens, mixed, shape.head_dim), generator)
    return draw_leaves(x, _collapse(shape, generator))


def _collapse(shape: Shape, generator: torch.Generator) -> Tensor:
    weights = draw_normal((shape.pseudo_heads, shape.heads), generator, torch.float32) / shape.pseudo_heads
    return weights.diag_embed().transpose(0, 1).flatten(1)[None]


def op_inputs(shape: Shape, generator: torch.Generator) -> Tensors:
    """q, k, v, the weights of their mix and of the collapse, and a mixing matrix [M, M] that only MHLA reads."""
    mixing = raster_inputs(shape, generator)[-1]
    return (*mix_inputs(shape, generator), *draw_leaves(_collapse(shape, generator)), mixing)


def run_mix(mix: Mix, shape: Shape, *inputs: Tensor) -> Tensors:
    return mix(inputs[:-1], inputs[-1])


def run_interleaved(mix: Mix, core: Callable[..., Tensor], shape: Shape, *inputs: Tensor) -> Tensors:
    """Mix heads, let the core attend between all places, and collapse: [B, N, H, D]."""
    q, k, v, weights, collapse, mixing = inputs
    places = (shape.batch, -1, shape.heads, shape.head_dim)
    q, k, v = (x.view(places) for x in mix((q, k, v), weights))
    out = core(shape, q, k, v, mixing)
    return mix((out.reshape(shape.batch, shape.tokens, -1, shape.head_dim),), collapse)


def _softmax(backend: SDPBackend, shape: Shape, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
    return run_sdpa_raster(backend, shape, q, k, v)


def _softmax_columns() -> tuple[Column, ...]:
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    found = [
        Column(f"{name}{suffix}", op_inputs, partial(run_interleaved, mix, partial(_softmax, backend)), device="cuda")
        for name, backend in backends.items()
        for suffix, mix in {"": mix_heads, "_einsum": compiled_mix}.items()
    ]
    math_form = partial(run_interleaved, mix_heads, partial(_softmax, SDPBackend.MATH))
    return (*found, Column("math", op_inputs, math_form, device="cpu"))


def _mix_columns(make: Callable[[Shape, torch.Generator], Tensors]) -> tuple[Column, ...]:
    return (
        Column("kernel", make, partial(run_mix, mix_heads), ours=True),
        Column("compiled_einsum", make, partial(run_mix, compiled_mix), device="cuda"),
        Column("einsum", make, partial(run_mix, einsum_mix)),
    )


EXACT_MIX = partial(mix_heads, impl="reference")
CONTESTS = {
    contest.name: contest
    for contest in (
        Contest(
            "mix",
            mix_inputs,
            _mix_columns(mix_inputs),
            partial(run_mix, EXACT_MIX),
            partial(run_mix, einsum_mix),
            lambda shape: (3 + 3 * shape.pseudo_heads, 9 + 6 * shape.pseudo_heads),
        ),
        Contest(
            "collapse",
            collapse_inputs,
            _mix_columns(collapse_inputs),
            partial(run_mix, EXACT_MIX),
            partial(run_mix, einsum_mix),
            lambda shape: (1 + shape.pseudo_heads, 2 + 3 * shape.pseudo_heads),
        ),
        Contest(
            "op",
            op_inputs,
            (
                Column("mhla", op_inputs, partial(run_interleaved, mix_heads, partial(run_mhla, "auto")), ours=True),
                *_softmax_columns(),
            ),
            partial(run_interleaved, EXACT_MIX, partial(run_mhla, "reference")),
            partial(run_interleaved, einsum_mix, run_low_precision),
        ),
    )
}


def make_layer(core: str, shape: Shape, device: torch.device) -> HeadMixAttention:
    """The layer with weights in float32, and with a mix and a collapse that are not those at the start of training."""
    torch.manual_seed(0)
    layer = HeadMixAttention(
        shape.heads * shape.head_dim,
        shape.heads,
        core=core,
        head_mix="iha",
        head_mix_args={"pseudo_heads": shape.pseudo_heads},
        grid=shape.grid,
        block_grid=shape.block_grid,
        qkv_bias=True,
    ).to(device)
    with torch.no_grad():
        for parameter in layer.head_mix.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def layer_input(shape: Shape, generator: torch.Generator) -> Tensor:
    return draw_normal((shape.batch, shape.tokens, shape.heads * shape.head_dim), generator).requires_grad_()
