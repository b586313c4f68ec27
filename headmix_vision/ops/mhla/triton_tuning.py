"""Hold the tile sizes of the Triton kernels: the best of sweeps on an H200 (head dims 64, 72 and 128).

Rows of float32 heads of more than 64 dims come from sweeps of summary kernels with 72, 96 and 128, others from bf16.

GPUs that multiply by mma.sync have other rows, swept on the H200 in their place (``headmix_lab.stand_in``).

In names T means tokens, Q queries, K keys, M and C rows and columns of the mixing, F entries of a summary. Tiles that
need more shared memory than the smallest GPU has name the need as KB, and others follow that need less;
``benchmarks/compile_kernels.py`` checks both for every GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from headmix_vision.ops.hardware import Gpu
from headmix_vision.ops.token_blocks import TokenBlocks

Tiles = dict[str, Any]
Row = Tiles | tuple[Tiles, ...]


def head_parts(dim: int) -> tuple[int, int]:
    """Return powers of two that cover a head dim: (64, 0) for 64, (64, 16) for 72, (16, 0) below 16."""
    first = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - first
    return (first, 0) if rest <= 0 else (first, max(16, 1 << (rest - 1).bit_length()))


# Each table has three rows for bfloat16 heads of up to 64, up to 127 (two parts) and 128 dims, and three for the same
# with mma.sync. Products of float32 have one row, and wide heads their own: one of up to 96 and one of up to 128 dims,
# or one for both. A row that exceeds the shared memory of the smallest GPU is a tuple of choices; the first that fits
# is taken.
PAIRWISE_FORWARD = (
    Tiles(BQ=128, BK=64, num_warps=8, maxnreg=128),
    Tiles(BQ=128, BK=64, num_warps=8, maxnreg=128),
    Tiles(BQ=128, BK=64, num_warps=8),
    Tiles(BQ=128, BK=32, num_warps=4, maxnreg=168),
    Tiles(BQ=128, BK=32, num_warps=4),
    Tiles(BQ=128, BK=32, num_warps=4),
    Tiles(BQ=64, BK=32, num_warps=4),
    Tiles(BQ=64, BK=32, num_warps=4),
)
PAIRWISE_BACKWARD_QUERY = (
    Tiles(BQ=64, BK=64, num_warps=4, maxnreg=168),
    Tiles(BQ=64, BK=64, num_warps=4, maxnreg=168),
    Tiles(BQ=64, BK=32, num_warps=4),
    Tiles(BQ=128, BK=64, num_warps=4),
    Tiles(BQ=128, BK=32, num_warps=4),
    Tiles(BQ=128, BK=32, num_warps=8),
    Tiles(BQ=64, BK=32, num_warps=4),
    (Tiles(BQ=64, BK=32, num_warps=4, KB=132), Tiles(BQ=32, BK=32, num_warps=4)),
)
PAIRWISE_BACKWARD_KEY = (
    Tiles(BQ=64, BK=64, num_warps=4, maxnreg=168),
    Tiles(BQ=64, BK=64, num_warps=4),
    Tiles(BQ=32, BK=64, num_warps=4),
    Tiles(BQ=32, BK=32, num_warps=2, num_stages=2),
    Tiles(BQ=32, BK=64, num_warps=4, num_stages=3),
    Tiles(BQ=64, BK=32, num_warps=4),
    Tiles(BQ=32, BK=64, num_warps=4),
    (Tiles(BQ=32, BK=64, num_warps=4, KB=132), Tiles(BQ=32, BK=32, num_warps=4)),
)
SUMMARIZE = (
    Tiles(BT=64, num_warps=2, STAGES=3, DOTS=True),
    Tiles(BT=64, num_warps=4, STAGES=2, DOTS=True),
    Tiles(BT=64, num_warps=4, STAGES=2, DOTS=True),
    Tiles(BT=64, num_warps=4, maxnreg=128, STAGES=2, DOTS=True),
    Tiles(BT=32, num_warps=2, DOTS=True),
    Tiles(BT=64, num_warps=4, STAGES=2, DOTS=True),
    Tiles(BT=32, num_warps=4),
    Tiles(BT=32, num_warps=4),
)
APPLY = (
    Tiles(BT=64, num_warps=4, DOTS=True),
    Tiles(BT=64, num_warps=4, DOTS=True, ONE_TILE=True),
    Tiles(BT=32, num_warps=4, maxnreg=128),
    Tiles(BT=64, num_warps=4, maxnreg=128, DOTS=True),
    Tiles(BT=64, num_warps=4, maxnreg=128, DOTS=True, ONE_TILE=True),
    Tiles(BT=64, num_warps=8, maxnreg=128),
    Tiles(BT=32, num_warps=4),
    Tiles(BT=16, num_warps=4),
    (Tiles(BT=16, num_warps=4, KB=120), Tiles(BT=32, num_warps=4, ONE_TILE=True)),
)
BACKWARD_QUERY = (  # for parts of one tile; LONG is for longer parts
    Tiles(BT=64, num_warps=4, maxnreg=128),
    Tiles(BT=64, num_warps=4, maxnreg=168, DOTS=True),
    Tiles(BT=16, num_warps=4),
    Tiles(BT=64, num_warps=2),
    Tiles(BT=64, num_warps=4, DOTS=True),
    Tiles(BT=32, num_warps=8),
    Tiles(BT=16, num_warps=8),
    Tiles(BT=16, num_warps=4),
    Tiles(BT=16, num_warps=8),
)
BACKWARD_QUERY_LONG = (
    Tiles(BT=32, num_warps=4, maxnreg=168),
    Tiles(BT=64, num_warps=4, STAGES=2, DOTS=True, DIVIDE=True),
    Tiles(BT=16, num_warps=4),
    Tiles(BT=32, num_warps=2, STAGES=3),
    Tiles(BT=64, num_warps=4, STAGES=3, DOTS=True, DIVIDE=True),
    Tiles(BT=32, num_warps=8),
    Tiles(BT=16, num_warps=8),
    Tiles(BT=16, num_warps=4),
    (Tiles(BT=16, num_warps=8, KB=120), Tiles(BT=16, num_warps=8, PRECISION="ieee")),
)
BACKWARD_KEY = (
    Tiles(BT=64, num_warps=4),
    Tiles(BT=64, num_warps=4),
    Tiles(BT=32, num_warps=4),
    Tiles(BT=32, num_warps=4),
    Tiles(BT=32, num_warps=2),
    Tiles(BT=32, num_warps=8),
    Tiles(BT=32, num_warps=4),
    (Tiles(BT=16, num_warps=4, KB=128), Tiles(BT=16, num_warps=4, ONE_TILE=True)),
    (
        Tiles(BT=16, num_warps=8, KB=204),
        Tiles(BT=16, num_warps=8, KB=128, ONE_TILE=True),
        Tiles(BT=16, num_warps=4, ONE_TILE=True),
    ),
)
CAUSAL = (  # of Hopper's rows that of 64 dims alone is swept
    Tiles(BT=64, num_warps=4),
    Tiles(BT=64, num_warps=4),
    Tiles(BT=32, num_warps=4),
    Tiles(BT=32, num_warps=2),
    Tiles(BT=32, num_warps=2),
    Tiles(BT=64, num_warps=8),
    Tiles(BT=32, num_warps=4),
    Tiles(BT=16, num_warps=4),
)
CROWDED = Tiles(num_warps=4, PRECISION="ieee")  # in place of other entries, by crowds_registers
# All keys and values, or queries and gradients, of a head on chip: for up to RESIDENT_TOKENS and head dims up to 64.
RESIDENT_FORWARD = Tiles(BQ=64, BK=128, num_warps=4, maxnreg=168)
RESIDENT_BACKWARD_KEY = (
    Tiles(BQ=128, BK=64, num_warps=4),
    Tiles(BQ=64, BK=128, num_warps=8),  # mma.sync: A100 has the memory
)
RESIDENT_BACKWARD_KB = 128
RESIDENT_TOKENS = 256
# For the Gluon kernels of Hopper, around the sizes that they were measured at; dims are multiples of 8. They compute
# 64, 128 or 256 rows. The three tiles of 65 to 96 queries in the backward kernel of 64 dims do not compile.
HOPPER_TOKENS = ((49, 64), (97, RESIDENT_TOKENS))  # from, to
HOPPER_DIMS = (64, 72, 80)  # not a range, whose membership graphs of symbolic head dims cannot compute
HOPPER_BACKWARD_DIM = 64
HOPPER_QUERIES = 32  # of a tile
HOPPER_BACKWARD = {  # by the rows that are computed, the first that fit: with how many programs of a multiprocessor
    64: (Tiles(VALUES_AHEAD=True, num_warps=4, programs=2),),
    128: (
        Tiles(VALUES_AHEAD=False, num_warps=4, programs=2),
        Tiles(VALUES_AHEAD=True, num_warps=8, programs=1),  # more than 16 blocks
    ),
    256: (
        Tiles(VALUES_AHEAD=True, num_warps=8, programs=1),
        Tiles(VALUES_AHEAD=False, num_warps=8, programs=1),  # more than 16 blocks of more than 224 tokens
    ),
}
# For heads of these dims, by the rows that are computed: keys of a pass, queries of a tile, whether keys are copied
# ahead, and programs of a multiprocessor. The first that fit into shared memory, up to so many BLOCKS: with more, all
# keys in one pass were slower.
HOPPER_WIDE_DIMS = (72, 80)
HOPPER_WIDE_COLUMNS = 80  # 64 and a tail of 16
HOPPER_WIDE = {
    64: (Tiles(KEYS=64, BQ=32, AHEAD=False, num_warps=4, programs=2),),
    128: (Tiles(KEYS=128, BQ=64, AHEAD=True, num_warps=8, programs=1),),
    256: (
        Tiles(KEYS=256, BQ=32, AHEAD=False, num_warps=8, programs=1, BLOCKS=16),
        Tiles(KEYS=128, BQ=64, AHEAD=True, num_warps=8, programs=1),
    ),
}
HOPPER_BLOCKS = 32
HOPPER_EPS = 1e-5  # a larger one rounds more numbers below zero to it, whose slopes the backward kernels take for one
HOPPER_KB = 227  # of shared memory, as every Hopper GPU has
MIXING_TILE = 64  # blocks that one tile holds, beside the smaller tile of 16
PREFETCH_RUN = 16  # shorter runs leave no registers for prefetched queries


def resident(tiles: Tiles, num_tokens: int) -> Tiles:
    """Shrink the tiles to what the tokens need."""
    largest = 64 if num_tokens <= 64 else 128
    return tiles | {name: min(tiles[name], largest) for name in ("BQ", "BK")}


def power_of_two(number: int, least: int) -> int:
    """Return the smallest power of two that is neither below a number nor below another power of two."""
    return max(least, 1 << (number - 1).bit_length())


def fits_hopper(blocks: TokenBlocks, *dims: int) -> bool:
    """Return whether the Gluon kernels take such blocks, and the forward kernel heads of such dims."""
    return (
        all(dim in HOPPER_DIMS for dim in dims)
        and blocks.num_blocks <= HOPPER_BLOCKS
        and any(first <= blocks.num_tokens <= last for first, last in HOPPER_TOKENS)
    )


def hopper_bytes(num_tokens: int, dim: int, value_dim: int, num_blocks: int) -> int:
    """Count the bytes of shared memory that a program of the Gluon forward kernel holds."""
    keys, values, blocks = 2 * sum(head_parts(dim)), 2 * sum(head_parts(value_dim)), 2 * power_of_two(num_blocks, 16)
    return power_of_two(num_tokens, 64) * (3 * keys + 2 * values + 2 * blocks + 32)


def programs_that_fit(needed: int, shared_memory: int) -> int:
    """Count the programs that share a multiprocessor's memory: it has 1 KB more, and keeps 1 KB for each of them."""
    return (shared_memory + 1024) // (needed + 1024)


def hopper_backward(num_tokens: int, num_blocks: int, shared_memory: int) -> Tiles | None:
    """Choose the tiles of the Gluon backward kernel for 64 dims, if programs of a multiprocessor fit into it."""
    keys, padded_blocks = power_of_two(num_tokens, 64), power_of_two(num_blocks, 16)
    queries = -(-num_tokens // HOPPER_QUERIES) * HOPPER_QUERIES
    products = 2 * HOPPER_QUERIES * keys + (keys + queries) * padded_blocks
    for tiles in HOPPER_BACKWARD[keys]:
        rows = (3 + tiles["VALUES_AHEAD"]) * keys + 9 * HOPPER_QUERIES
        needed = 2 * (HOPPER_BACKWARD_DIM * rows + products) + 8 * HOPPER_QUERIES
        if tiles["programs"] <= programs_that_fit(needed, shared_memory):
            return tiles
    return None


def hopper_wide(num_tokens: int, num_blocks: int, shared_memory: int) -> Tiles | None:
    """Choose the tiles of the Gluon backward kernel for wide heads, if programs of a multiprocessor fit into it."""
    tokens, padded_blocks = power_of_two(num_tokens, 64), power_of_two(num_blocks, 16)
    for row in HOPPER_WIDE[tokens]:
        tiles = dict(row)
        if num_blocks > tiles.pop("BLOCKS", HOPPER_BLOCKS):
            continue
        keys, queries = tiles["KEYS"], tiles["BQ"]
        group = max(2 * queries, 16 * tiles["num_warps"])
        rows = 2 * keys * (1 + tiles["AHEAD"]) + 6 * queries + group
        needed = 2 * (HOPPER_WIDE_COLUMNS * rows + group * keys + 2 * tokens * padded_blocks) + 8 * queries
        if tiles["programs"] <= programs_that_fit(needed, shared_memory):
            return tiles
    return None


def lone_prefix(blocks: TokenBlocks) -> int:
    """Count the prefix tokens that the Gluon backward kernel sums apart, as one block more than a product takes.

    It does so where that was faster: not of 192 tokens or fewer.
    """
    count = blocks.grid.num_prefix_tokens
    alone = blocks.num_blocks == 17 and count <= 32 and blocks.grid.repeats == 1
    return count if alone and blocks.num_tokens > 192 else 0


def is_wide(dim: int, dtype: torch.dtype) -> bool:
    """Return whether heads of a type are so wide that their products crowd shared memory."""
    return dim > {torch.float32: 64, torch.float16: 96}.get(dtype, dim)


def crowds_registers(dtype: torch.dtype, dim: int) -> bool:
    """Return whether a kernel without a loop would spill far too much with products on tensor cores.

    For Hopper ptxas gave kernels of float32 keys of 65 to 80 dims and tiles of up to 32 tokens 32 registers and 8 KB of
    stack. With exact products they spill nothing.
    """
    return dtype == torch.float32 and 64 < dim <= 80


def tiles(table: tuple[Row, ...], dim: int, dtype: torch.dtype, gpu: Gpu) -> Tiles:
    """Choose the tiles of a table.

    Args:
        table: see above.
        dim: the larger head dim.
        dtype: type of the inputs.
        gpu: that runs the kernel.

    Returns:
        The tiles. With ONE_TILE a program takes one tile of tokens and no loop; loops with STAGES let the compiler
        load so many tiles ahead, others load the next one; with DOTS vectors are summed by products, as columns of
        a matrix; with DIVIDE denominators divide the queries; a PRECISION takes the place of the type's.
    """
    if dtype == torch.bfloat16:
        row = table[(0 if dim <= 64 else 1 if dim < 128 else 2) + 3 * gpu.uses_mma_sync]
    else:
        index = 6 if not is_wide(dim, dtype) else 7 if dim <= 96 else 8
        row = table[min(index, len(table) - 1)]
    rows = row if isinstance(row, tuple) else (row,)
    fitting = next(tiles for tiles in rows if tiles.get("KB", 0) << 10 <= gpu.shared_memory)
    return {name: value for name, value in fitting.items() if name != "KB"}


def mix_tiles(num_blocks: int, dtype: torch.dtype) -> Tiles:
    """Choose the tiles of ``mix_kernel``, and with ``per`` how many tiles of columns a program mixes."""
    if dtype != torch.bfloat16:
        return Tiles(BM=16 if num_blocks <= 16 else 64, BC=32, BF=64, num_warps=4, num_stages=1, per=4)
    if num_blocks <= 16:
        return Tiles(BM=16, BC=16, BF=128, num_warps=4, num_stages=3, per=2)
    if num_blocks <= 32:
        return Tiles(BM=32, BC=32, BF=128, num_warps=4, num_stages=3, per=2)
    if num_blocks <= 64:
        return Tiles(BM=64, BC=64, BF=128, num_warps=4, num_stages=3, per=4)
    return Tiles(BM=64, BC=32, BF=64, num_warps=4, num_stages=3, per=8)


def mixing_gradient_tiles(num_blocks: int, dtype: torch.dtype, shared_memory: int) -> Tiles:
    rows = min(MIXING_TILE, power_of_two(num_blocks, 16))
    if dtype != torch.bfloat16:
        return Tiles(BM=rows, BF=32, num_warps=4, num_stages=1)
    if num_blocks <= 16:
        return Tiles(BM=rows, BF=256, num_warps=2, num_stages=3)
    return Tiles(BM=rows, BF=128 if shared_memory >= 112 << 10 else 64, num_warps=4, num_stages=3)
