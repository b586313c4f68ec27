"""Shapes and columns of bench_mhla.py: each attention with inputs in the layout that suits it best.

B batch, N tokens, H heads, D head dim, M token blocks, n tokens in the largest block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.columns import Column, run_compiled
from headmix_vision.ops import TokenBlocks, mhla
from headmix_vision.ops.mhla.torch_impl import apply_feature_map

DTYPE = torch.bfloat16
EPS = 1e-6
PAIRWISE_MAX_TOKENS = 4096  # beyond, the N x N form takes seconds
LINEAR = "linear_kernel"
WINDOW_TILES = 3  # tiles along each axis that a query of sliding attention sees


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
    packed = draw_normal((shape.batch, shape.tokens, 3, shape.heads, shape.head_dim), generator)
    return draw_leaves(*packed.unbind(2), _mixing(shape, generator).float())


def packed_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v [B, N, H, D] as views of one packed [B, N, 3, H, D]."""
    return raster_inputs(shape, generator)[:3]


def token_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v [B, N, H, D], each contiguous."""
    return draw_leaves(*(x.contiguous() for x in packed_inputs(shape, generator)))


def head_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v [B, H, N, D], each contiguous."""
    return draw_leaves(*(x.transpose(1, 2).contiguous() for x in packed_inputs(shape, generator)))


def block_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v [B, M, n, H, D] in block order as views of one packed tensor, and the mixing [M, M]; uneven blocks are
    padded to the largest, as the paper pads 224 to 256 px."""
    blocks = shape.blocks
    sizes = (shape.batch, blocks.num_blocks, blocks.max_block_size, 3, shape.heads, shape.head_dim)
    return draw_leaves(*draw_normal(sizes, generator).unbind(3), _mixing(shape, generator))


def draw_normal(sizes: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(sizes, generator=generator, device=generator.device, dtype=dtype)


def _mixing(shape: Shape, generator: torch.Generator) -> Tensor:
    m = shape.blocks.num_blocks
    return torch.rand(m, m, generator=generator, device=generator.device).mul(0.9).add(0.1).to(DTYPE)


def draw_leaves(*inputs: Tensor) -> tuple[Tensor, ...]:
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


def one_block(shape: Shape) -> Shape:
    """Return the shape with all tokens in one block, where MHLA is linear attention."""
    return replace(shape, grid=(shape.tokens,), block_grid=(1,), prefix=0)


def linear_inputs(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    return raster_inputs(one_block(shape), generator)


def run_linear_kernel(shape: Shape, *inputs: Tensor) -> Tensor:
    """Linear attention by our kernels, as the linear core of models calls them."""
    return run_mhla("auto", one_block(shape), *inputs)


def features(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return F.relu(q) + EPS, F.relu(k) + EPS


def run_linear(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention as two batched products in the inputs' type, [B, H, N, D]."""
    q, k = features(q, k)
    return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1))


def run_fla(kernel: str, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention of flash-linear-attention, always causal and normalised, [B, N, H, D]."""
    from fla.ops import linear_attn

    out: Tensor = getattr(linear_attn, kernel)(*run_compiled(features, q, k), v)[0]
    return out


def windows(shape: Shape, unit: str) -> list[tuple[Tensor, Tensor, int]]:
    """Return place, first visible place and visible places of each token, axis by axis, for tokens in tile order.

    Tiles are the token blocks of MHLA. A query sees `WINDOW_TILES` tiles along each axis around its own ("tile"), or as
    many tokens around itself ("token"). Windows stop at the borders, so that all have one size.
    """
    order, found = shape.blocks.tables(torch.empty(0)).tokens.flatten(), []
    places = torch.unravel_index(order[order >= 0] - shape.prefix, shape.grid)
    for place, size, tiles in zip(places, shape.grid, shape.block_grid, strict=True):
        tokens = size // tiles
        place, extent, one = (place // tokens, tiles, 1) if unit == "tile" else (place, size, tokens)
        width = min(WINDOW_TILES * one, extent)
        found.append((place.int(), (place - width // 2).clamp(0, extent - width).int(), width))
    return found


@lru_cache
def window_mask(shape: Shape, unit: str, device: torch.device) -> BlockMask:
    """Return the block mask of sliding attention over tokens in tile order."""
    axes = [(place.to(device), start.to(device), width) for place, start, width in windows(shape, unit)]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = query >= 0
        for place, start, width in axes:
            offset = place[key] - start[query]
            inside = inside & (offset >= 0) & (offset < width)
        return inside

    return create_block_mask(visible, None, None, shape.tokens, shape.tokens, device, _compile=device.type == "cuda")


def run_flex(unit: str, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sliding attention by FlexAttention over tokens in tile order, [B, H, N, D]."""
    if not torch.is_grad_enabled():  # on a CPU it refuses tensors that need gradients, even so
        q, k, v = q.detach(), k.detach(), v.detach()
    out: Tensor = run_compiled(flex_attention, q, k, v, block_mask=window_mask(shape, unit, q.device))
    return out


def run_natten(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sliding attention around each token by NATTEN's own kernels, on the views of a packed projection."""
    import natten

    if not natten.HAS_LIBNATTEN:
        raise RuntimeError("NATTEN was installed without its kernels")
    sizes = tuple(width for _, _, width in windows(shape, "token"))
    out: Tensor = natten.na3d(*(x.unflatten(1, shape.grid) for x in (q, k, v)), kernel_size=sizes)
    return out.flatten(1, 3)


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


def _fla_column(kernel: str) -> Column:
    run = partial(run_fla, f"{kernel}_linear_attn")
    return Column(f"fla_{kernel}", token_inputs, run, scaling=True, module="fla.ops.linear_attn", package="fla-core")


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
        Column("flash4", packed_inputs, run_flash4, module="flash_attn.cute", package="flash-attn-4"),
        Column("math", head_inputs, partial(run_sdpa, SDPBackend.MATH), max_tokens=PAIRWISE_MAX_TOKENS),
        Column("released", block_inputs, run_released),
        Column(LINEAR, linear_inputs, run_linear_kernel, ours=True, scaling=True),
        Column("linear_compiled", head_inputs, partial(run_compiled, run_linear)),
        *(_fla_column(kernel) for kernel in ("fused_chunk", "chunk")),
        *(Column(f"flex_{unit}", head_inputs, partial(run_flex, unit), only="wan") for unit in ("tile", "token")),
        Column("natten", packed_inputs, run_natten, only="wan", module="natten", package="natten"),
    )
}
DEFAULT_COLUMNS = {
    "cuda": tuple(name for name in COLUMNS if name not in ("torch", "math")),
    "cpu": ("torch", "math", "released", LINEAR, "linear_compiled", "flex_tile", "flex_token"),
}
NOT_CAUSAL = ("released", LINEAR, "linear_compiled", "flex_tile", "flex_token", "natten")
