"""Hold what the launches of all regimes share: index tables, constants, strides, gradients, sums.

B batch, N tokens, H heads, M blocks, C parts of blocks, D and Dv head dims. Tables are built on the host, once for each
partition and device. The kernels take the normalizers "paper" (they write the inverse denominators), "given" (they read
them) and "none".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from headmix_vision.ops.mhla import triton_tiles as shared
from headmix_vision.ops.mhla import triton_tuning as tuning
from headmix_vision.ops.mhla.torch_impl import Settings
from headmix_vision.ops.numerics import numerics
from headmix_vision.ops.runtime import Launch, Layout, cached_tables, is_recording, planned
from headmix_vision.ops.token_blocks import TokenBlocks

_CPU = torch.empty(0)
TILE = 64
LARGEST_TILE = 128


class Places(NamedTuple):
    """The tokens block by block, each block filled up to whole runs, for the pairwise kernels; int32.

    Attributes:
        tokens: [runs * run], the token at each place, -1 where there is none.
        blocks: [runs], the block of each run.
        run: places in a run, a power of two.
        full: whether every place holds a token.
        padded_runs: runs up to whole tiles.
    """

    tokens: Tensor
    blocks: Tensor
    run: int
    full: bool
    padded_runs: int

    @property
    def num_places(self) -> int:
        return self.tokens.numel()


@cached_tables
def places(blocks: TokenBlocks, longest_run: int, device: torch.device) -> Places:
    """List tokens in the longest runs, up to ``longest_run``, that need no more tiles of 64 than runs of one place."""
    tokens = blocks.tables(_CPU).tokens
    tokens = tokens.gather(1, (tokens < 0).long().argsort(stable=True, dim=1))  # absent places last
    sizes = (tokens >= 0).sum(1)
    runs_of = (1 << i for i in range(longest_run.bit_length()))
    tiles = {run: -(-int((-(-sizes // run) * run).sum()) // TILE) for run in runs_of}
    run = max(r for r, count in tiles.items() if count == min(tiles.values()))
    runs = -(-sizes // run)
    width = -(-tokens.shape[1] // run) * run
    tokens = torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1)
    tokens = tokens.unflatten(1, (-1, run))
    tokens = tokens[torch.arange(tokens.shape[1]) < runs[:, None]]  # [runs, run]
    block = torch.repeat_interleave(torch.arange(len(runs)), runs)
    full = bool((tokens >= 0).all())
    per_tile = LARGEST_TILE // run
    padded_runs = -(-len(block) // per_tile) * per_tile
    return Places(tokens.flatten().to(device, torch.int32), block.to(device, torch.int32), run, full, padded_runs)


@cached_tables
def block_of_token(blocks: TokenBlocks, device: torch.device, first: int = 0) -> Tensor:
    """List the block of each token in raster order, those before block ``first`` counted last: int32 [N]."""
    table = (blocks.tables(_CPU).block_of_token - first) % blocks.num_blocks
    return table.to(device, torch.int32)


@cached_tables
def parts(blocks: TokenBlocks, split: int, device: torch.device) -> Tensor:
    """Cut the tokens of each block into ``split`` parts, -1 where there is none: int32 [C = M * split, tokens]."""
    tokens = blocks.tables(_CPU).tokens
    size = -(-tokens.shape[1] // split)
    tokens = torch.nn.functional.pad(tokens, (0, size * split - tokens.shape[1]), value=-1)
    return tokens.reshape(blocks.num_blocks * split, size).to(device, torch.int32)


class Saved(NamedTuple):
    """The tensors that the forward pass saves for the backward pass; N or M is 0 where a part is not used.

    Attributes:
        inverse: [B, H, N] float32, inverse denominators.
        summary_matrix: [B, H, M, D, Dv], block summaries S.
        summary_vector: [B, H, M, D] float32, block summaries z.
    """

    inverse: Tensor
    summary_matrix: Tensor
    summary_vector: Tensor


class Forward(NamedTuple):
    """A forward pass: the inputs, the output to fill, the buffers that kernels fill for the backward pass, settings."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Tensor
    out: Tensor
    saved: Saved
    settings: Settings


class Backward(NamedTuple):
    """A backward pass.

    Attributes:
        d_out: [B, N, H, Dv], the gradient of the output.
        q, k, v, mixing: the inputs.
        out: the output, where the regime reads it.
        saved: by the forward pass.
        packed: [B, N, 3, H, D], which the gradients of q, k and v fill, or None.
        settings: of the call.
    """

    d_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Tensor
    out: Tensor | None
    saved: Saved
    packed: Tensor | None
    settings: Settings


class Gradients(NamedTuple):
    """The gradients of the inputs; for the mixing and a given denominator [B, H, N] they are float32."""

    query: Tensor
    key: Tensor
    value: Tensor
    mixing: Tensor
    denominator: Tensor


def choose_tiles(table: tuple[tuning.Row, ...], x: Layout, y: Layout) -> tuning.Tiles:
    return tuning.tiles(table, max(x.shape[-1], y.shape[-1]), x.dtype, x.gpu)


def normalizer_name(settings: Settings) -> str:
    return {"paper": "paper", "source_block": "given", None: "none"}[settings.normalizer]


def gradient(x: Tensor, packed: Tensor | None, part: int) -> Tensor:
    """Allocate the gradient of an input [B, N, H, D], or take its part of a packed tensor [B, N, PACK, H, D]."""
    return x.new_empty(x.shape) if packed is None else packed[:, :, part]


def query_gradient(q: Tensor, packed: Tensor | None) -> Tensor:
    """Allocate the gradient of queries for a kernel, or give it the packed tensor, which begins with that."""
    return q.new_empty(q.shape) if packed is None else packed


def key_gradients(k: Tensor, v: Tensor, packed: Tensor | None) -> tuple[Tensor, Any]:
    """Allocate the gradients of keys and values for a kernel, or give it the packed tensor, where it finds both."""
    return (k.new_empty(k.shape), v.new_empty(v.shape)) if packed is None else (packed, None)


def pack_size(packed: Tensor | None) -> int:
    """Count the gradients that lie in one tensor."""
    return 1 if packed is None else packed.shape[2]


def row_strides(align: int, *tensors: Layout) -> list[int]:
    return [s for x in tensors for s in (*(stride // align for stride in x.strides[:-1]), x.strides[-1])]


def mixing_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of [H, ...] weights; those that heads share have stride 0 over H."""
    return (0, *strides) if len(strides) == 2 else strides


def kernel_constants(q: Layout, v: Layout, settings: Settings, align: int) -> dict[str, Any]:
    compute, precision = numerics(q.dtype, q.gpu, tuning.is_wide(max(q.shape[-1], v.shape[-1]), q.dtype))
    (d1, d2), (dv1, dv2) = tuning.head_parts(q.shape[-1]), tuning.head_parts(v.shape[-1])
    return dict(
        D=q.shape[-1], D1=d1, D2=d2, DV=v.shape[-1], DV1=dv1, DV2=dv2,
        NORMALIZER=normalizer_name(settings), FEATURE_MAP=settings.feature_map,
        COMPUTE=compute, PRECISION=precision, ALIGN=align,
    )  # fmt: skip


class RowSum(NamedTuple):
    """The launch of a sum of rows, in shares."""

    launch: Launch
    shares: int


@planned
def _sum_rows(rows: int, columns: int, device: torch.device) -> RowSum:  # compiled for each device
    column_tiles = triton.cdiv(columns, 32)
    shares = 1 if rows <= 64 else min(triton.cdiv(rows, 64), max(1, 264 // column_tiles))
    share = triton.cdiv(rows, shares)
    shares = triton.cdiv(rows, share)
    constants = dict(BR=64, BC=32, num_warps=4)
    return RowSum(Launch(shared.sum_rows_kernel, (column_tiles, shares), (rows, columns, share), constants), shares)


def sum_leading(x: Tensor, dims: int) -> Tensor:
    """Sum over the first ``dims`` dims of a contiguous float32 tensor, in an order fixed by the shape.

    torch.sum takes eight times as long on a tall matrix. A graph has its own sum.
    """
    if is_recording():
        return x.sum(tuple(range(dims)))
    shape = x.shape[dims:]
    x = x.reshape(-1, shape.numel())
    while len(x) > 1:
        launch, shares = _sum_rows(*x.shape, x.device)
        sums = x.new_empty(shares, x.shape[1])
        launch(x, sums)
        x = sums
    return x.view(shape)
