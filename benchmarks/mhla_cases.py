"""Shapes and columns of bench_mhla.py: each attention with inputs in the layout that suits it best.

B batch, N tokens, H heads, D head dim, M token blocks, n tokens in the largest block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.columns import Column
from headmix_vision.ops import TokenBlocks, mhla
from headmix_vision.ops.mhla.torch_impl import apply_feature_map

DTYPE = torch.bfloat16
EPS = 1e-6
PAIRWISE_MAX_TOKENS = 4096  # beyond, the N x N form takes seconds


@dataclass(frozen=True)
class Shape:
    """One row: B·H·grid·D and the block grid; ``group`` is "model", "sweep" (B·N fixed) or "scaling" (B fixed).

    ``causal``: MHLA in the order of the blocks, softmax in the order of its inputs, which costs as much.
    """

    name: str
    batch: int
    heads: int
    grid: tuple[int, ...]
    head_dim: int
    block_grid: tuple[int, ...]
    prefix: int = 0
    group: str = "model"
    causal: bool = False

    @property
    def blocks(self) -> TokenBlocks:
        return TokenBlocks.from_grid(self.grid, self.block_grid, self.prefix)

    @property
    def tokens(self) -> int:
        return self.prefix + math.prod(self.grid)

    @property
    def floor_bytes(self) -> int:
        """q, k, v read and o written once. Forward with backward: q, k, v, o, do read, o, dq, dk, dv written: 11/4."""
        return 4 * self.batch * self.tokens * self.heads * self.head_dim * DTYPE.itemsize

    def tiny(self) -> Shape:
        """The same kind of shape, small enough for a CPU."""
        if self.group != "model":
            grid = tuple(max(b, g // 8) for g, b in zip(self.grid, self.block_grid, strict=True))
        else:
            grid = tuple(2 * b - (g % b > 0) for g, b in zip(self.grid, self.block_grid, strict=True))
        return replace(self, batch=1, heads=2, head_dim=24, grid=grid)


def _line(group: str, batch_of: Callable[[int], int], exponents: range) -> tuple[Shape, ...]:
    return tuple(
        Shape(f"{group}_{2**e}", batch_of(2**e), 6, (2 ** (e - e // 2), 2 ** (e // 2)), 64, (4, 4), group=group)
        for e in exponents
    )


SHAPES = (
    Shape("deit", 128, 6, (16, 16), 64, (4, 4)),
    Shape("dit256", 32, 16, (16, 16), 72, (4, 4)),
    Shape("dit512", 32, 16, (32, 32), 72, (4, 4)),
    Shape("k4", 8, 16, (64, 64), 64, (8, 8)),
    Shape("k16", 2, 16, (128, 128), 64, (8, 8)),
    Shape("wan", 1, 12, (21, 30, 50), 128, (3, 5, 10)),
    Shape("n196", 128, 6, (14, 14), 64, (4, 4)),
    Shape("n197", 128, 6, (14, 14), 64, (4, 4), prefix=1),
    *_line("sweep", lambda tokens: 65536 // tokens, range(6, 17)),
    *_line("scaling", lambda tokens: 4, range(12, 17)),
)


def raster_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v [B, N, H, D] as views of one packed [B, N, 3, H, D], and a float32 mixing [M, M]."""
    packed = _normal((shape.batch, shape.tokens, 3, shape.heads, shape.head_dim), generator)
    return _leaves(*packed.unbind(2), _mixing(shape, generator).float())


def packed_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v [B, N, H, D] as views of one packed [B, N, 3, H, D]."""
    return raster_inputs(shape, generator)[:3]


def head_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v [B, H, N, D], each contiguous."""
    return _leaves(*(_normal((shape.batch, shape.heads, shape.tokens, shape.head_dim), generator) for _ in range(3)))


def block_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v [B, M, n, H, D] in block order as views of one packed tensor, and the mixing [M, M]; uneven blocks are
    padded to the largest, as the paper pads 224 to 256 px."""
    blocks = shape.blocks
    sizes = (shape.batch, blocks.num_blocks, blocks.max_block_size, 3, shape.heads, shape.head_dim)
    return _leaves(*_normal(sizes, generator).unbind(3), _mixing(shape, generator))


def _normal(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(sizes, generator=generator, device=generator.device, dtype=DTYPE)


def _mixing(shape: Shape, generator: torch.Generator) -> Tensor:
    m = shape.blocks.num_blocks
    return torch.rand(m, m, generator=generator, device=generator.device).mul(0.9).add(0.1).to(DTYPE)


def _leaves(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in inputs)


def run_mhla(impl: str, shape: Shape, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
    return mhla(q, k, v, mixing, shape.blocks, eps=EPS, causal=shape.causal, impl=impl)


def run_released(shape: Shape, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
    """The released maths (normaliser of the source block) in the inputs' type, step by step as released.

    q, k, v [B, M, n, H, D] in block order -> [B, M, n, H·D]; the mixing is a 1 x 1 convolution over blocks.
    """
    q, k = F.relu(q) + EPS, F.relu(k) + EPS
    q, k, v = (x.permute(0, 3, 1, 2, 4).flatten(0, 1) for x in (q, k, v))  # [B·H, M, n, D]
    kernel = mixing[:, :, None, None]
    summaries = F.conv2d(k.mT @ v, kernel)
    denominator = F.conv2d(q @ k.sum(-2).unsqueeze(-1), kernel) + EPS
    out = q @ summaries / denominator
    return out.unflatten(0, (shape.batch, shape.heads)).permute(0, 2, 3, 1, 4).flatten(-2)


def run_linear(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention as two batched products in the inputs' type, [B, H, N, D]."""
    q, k = F.relu(q) + EPS, F.relu(k) + EPS
    return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1))


def run_sdpa_raster(backend: SDPBackend, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """On the views of a packed projection that a model has, [B, N, H, D] -> [B, N, H, D]."""
    return run_sdpa(backend, shape, *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def run_sdpa(backend: SDPBackend, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)


def run_flash4(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention 4, of the package `flash-attn-4`, on the views of a packed projection."""
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(q, k, v, causal=shape.causal)
    return out[0] if isinstance(out, tuple) else out


def run_low_precision(shape: Shape, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
    """mhla's maths with every step rounded to the inputs' type: its error is the budget of the correctness gate."""
    tables = shape.blocks.tables(q)
    present = (tables.tokens >= 0)[:, :, None]  # [M, n, 1]
    q, k = apply_feature_map(q, "relu", EPS), apply_feature_map(k, "relu", EPS)  # with its derivative at 0
    v = F.pad(v, (0, 1), value=1.0)
    q, k, v = (x.transpose(1, 2)[:, :, tables.tokens.clamp(min=0)] for x in (q, k, v))  # [B, H, M, n, D]
    summaries = (k * present).mT @ v
    mixing = mixing.to(q.dtype)
    mixed = torch.einsum("ij,bhjde->bhide", mixing.tril(-1) if shape.causal else mixing, summaries)
    out = q @ mixed
    if shape.causal:  # blocks before by their summaries, tokens of the own block one by one
        out = out + ((q @ k.mT) * mixing.diagonal()[:, None, None]).tril() @ v
    out = out.flatten(2, 3)[:, :, tables.slot_of_token].transpose(1, 2)
    return out[..., :-1] / out[..., -1:]


def _mhla_column(name: str, impl: str, scaling: bool = False, max_tokens: int | None = None) -> Column:
    return Column(name, raster_inputs, partial(run_mhla, impl), ours=True, scaling=scaling, max_tokens=max_tokens)


COLUMNS = {
    column.name: column
    for column in (
        _mhla_column("auto", "auto", scaling=True),
        _mhla_column("pairwise", "triton_pairwise", max_tokens=PAIRWISE_MAX_TOKENS),
        _mhla_column("summary", "triton_summary"),
        _mhla_column("torch", "torch", scaling=True),
        Column("flash", head_inputs, partial(run_sdpa, SDPBackend.FLASH_ATTENTION)),
        Column("cudnn", head_inputs, partial(run_sdpa, SDPBackend.CUDNN_ATTENTION)),
        Column("flash_packed", packed_inputs, partial(run_sdpa_raster, SDPBackend.FLASH_ATTENTION)),
        Column("cudnn_packed", packed_inputs, partial(run_sdpa_raster, SDPBackend.CUDNN_ATTENTION)),
        Column("flash4", packed_inputs, run_flash4),
        Column("math", head_inputs, partial(run_sdpa, SDPBackend.MATH), max_tokens=PAIRWISE_MAX_TOKENS),
        Column("released", block_inputs, run_released),
        Column("linear", head_inputs, run_linear, scaling=True),
    )
}
DEFAULT_COLUMNS = {
    "cuda": tuple(name for name in COLUMNS if name not in ("torch", "math")),
    "cpu": ("torch", "math", "released", "linear"),
}
NOT_CAUSAL = ("released", "linear")
