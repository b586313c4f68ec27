"""Shapes and columns of bench_hih.py: each op with inputs in the layout that suits it best.

B batch, N tokens, H heads, D head dim, r sub-heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.columns import Column
from benchmarks.mhla_cases import DTYPE, Shape, head_inputs, raster_inputs, run_mhla, run_sdpa
from headmix_vision.ops import head_in_head

SUB_HEADS = (1, 2, 4, 8)
SHAPES = (
    Shape("n256", 128, 6, (16, 16), 64, (4, 4)),
    Shape("n1024", 32, 16, (32, 32), 64, (4, 4), group="sweep"),
    Shape("n4096", 8, 16, (64, 64), 64, (8, 8), group="sweep"),
    Shape("n16384", 2, 16, (128, 128), 64, (8, 8), group="sweep"),
    Shape("b8_n1024", 8, 16, (32, 32), 64, (4, 4), group="scaling"),
    Shape("b8_n4096", 8, 16, (64, 64), 64, (8, 8), group="scaling"),
    Shape("b8_n16384", 8, 16, (128, 128), 64, (8, 8), group="scaling"),
)
LOOP_MAX_TOKENS = 256


def floor_bytes(shape: Shape) -> tuple[int, int]:
    """Bytes that any delta rule moves: forward, forward with backward.

    Of features in bf16 q, k, v read and o written; with backward q, k, v, do read and dq, dk, dv written as well. Of
    beta and log decay in float32 both read; with backward both read again and their gradients written.
    """
    gates = 2 * 4 * shape.batch * shape.tokens * shape.heads
    return shape.floor_bytes + gates, shape.floor_bytes * 11 // 4 + 3 * gates


@dataclass(frozen=True)
class DeltaColumn(Column):
    """A column of ours: Head-in-Head with r sub-heads by one of the implementations."""

    impl: str = "triton"
    r: int = 1


def delta_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k (of norm 1), v [B, N, H, D] in bf16, beta in (0, 1) and log_decay [B, N, H] in float32."""
    size = (shape.batch, shape.tokens, shape.heads)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=generator.device)

    q, k = (F.normalize(normal(*size, shape.head_dim), dim=-1).to(DTYPE) for _ in range(2))
    v = normal(*size, shape.head_dim).to(DTYPE)
    inputs = (q, k, v, normal(*size).sigmoid(), -0.1 * F.softplus(normal(*size)))
    return tuple(x.requires_grad_() for x in inputs)


def sub_head_mask(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """[..., r, r] float32 with unit diagonal, positive semidefinite."""
    rows = F.normalize(torch.rand(size, generator=generator, device=generator.device), dim=-1)
    return (rows @ rows.mT).requires_grad_()


def masked_inputs(r: int, shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """`delta_inputs` and a mask [H, r, r]."""
    return *delta_inputs(shape, generator), sub_head_mask((shape.heads, r, r), generator)


def run_head_in_head(impl: str, shape: Shape, *inputs: Tensor) -> Tensor:
    return head_in_head(*inputs, impl=impl)[0]


def why_no_fla() -> str | None:
    """Reason why flash-linear-attention is not compared with, if so."""
    return None if find_spec("fla") else "package fla-core (flash-linear-attention) is not installed"


def run_fla(shape: Shape, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """The gated delta rule of flash-linear-attention, chunk by chunk."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g=log_decay, beta=beta, scale=q.shape[-1] ** -0.5)[0]


def _ours(name: str, impl: str, r: int, scaling: bool = False, max_tokens: int | None = None) -> DeltaColumn:
    make, run = partial(masked_inputs, r), partial(run_head_in_head, impl)
    return DeltaColumn(name, make, run, ours=True, scaling=scaling, max_tokens=max_tokens, impl=impl, r=r)


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        *(_ours(f"r{r}", "triton", r, scaling=True) for r in SUB_HEADS),
        *(_ours(f"torch_r{r}", "torch", r) for r in SUB_HEADS),
        _ours("loop_r1", "reference", 1, max_tokens=LOOP_MAX_TOKENS),
        Column("fla", delta_inputs, run_fla, scaling=True),
        Column("mhla", raster_inputs, partial(run_mhla, "auto")),
        Column("flash", head_inputs, partial(run_sdpa, SDPBackend.FLASH_ATTENTION)),
        Column("cudnn", head_inputs, partial(run_sdpa, SDPBackend.CUDNN_ATTENTION), scaling=True),
        Column("math", head_inputs, partial(run_sdpa, SDPBackend.MATH), max_tokens=4096),
    )
}
DEFAULT_COLUMNS = {
    "cuda": tuple(name for name in COLUMNS if name != "math"),
    "cpu": ("torch_r1", "torch_r4", "loop_r1", "mhla", "math"),
}
