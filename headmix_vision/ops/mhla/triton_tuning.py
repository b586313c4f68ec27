"""Holds the tile sizes of the Triton kernels: the best of sweeps on an H200 (bf16, head dims 64, 72 and 128).

In names T means tokens, Q queries, K keys, M and C rows and columns of the mixing, F entries of a summary.
"""

from __future__ import annotations

import torch

Tiles = dict[str, int]


def head_parts(dim: int) -> tuple[int, int]:
    """Return powers of two that cover a head dim: (64, 0) for 64, (64, 16) for 72, (16, 0) below 16."""
    first = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - first
    return (first, 0) if rest <= 0 else (first, max(16, 1 << (rest - 1).bit_length()))


# Each table has rows for head dims up to 64, up to 127 (two parts) and 128; the last row is for float32 products.
PAIRWISE_FORWARD = (
    Tiles(BQ=128, BK=64, num_warps=8, maxnreg=128),
    Tiles(BQ=128, BK=64, num_warps=8, maxnreg=128),
    Tiles(BQ=128, BK=64, num_warps=8),
    Tiles(BQ=64, BK=32, num_warps=4),
)
PAIRWISE_BACKWARD_QUERY = (
    Tiles(BQ=64, BK=64, num_warps=4, maxnreg=128),
    Tiles(BQ=64, BK=64, num_warps=4, maxnreg=168),
    Tiles(BQ=64, BK=32, num_warps=4),
    Tiles(BQ=64, BK=32, num_warps=4),
)
PAIRWISE_BACKWARD_KEY = (
    Tiles(BQ=64, BK=64, num_warps=4, maxnreg=168),
    Tiles(BQ=64, BK=64, num_warps=4),
    Tiles(BQ=32, BK=64, num_warps=4),
    Tiles(BQ=32, BK=64, num_warps=4),
)
SUMMARIZE = (
    Tiles(BT=64, num_warps=2),
    Tiles(BT=64, num_warps=4),
    Tiles(BT=32, num_warps=4),
    Tiles(BT=32, num_warps=4),
)
APPLY = (
    Tiles(BT=64, num_warps=4),
    Tiles(BT=64, num_warps=4),
    Tiles(BT=32, num_warps=4, maxnreg=128),
    Tiles(BT=32, num_warps=4),
)
BACKWARD_QUERY = (  # for parts of one tile; LONG is for longer parts
    Tiles(BT=64, num_warps=4, maxnreg=128),
    Tiles(BT=64, num_warps=4, maxnreg=168),
    Tiles(BT=16, num_warps=4),
    Tiles(BT=16, num_warps=8),
)
BACKWARD_QUERY_LONG = (
    Tiles(BT=32, num_warps=4, maxnreg=168),
    Tiles(BT=64, num_warps=4),
    Tiles(BT=16, num_warps=4),
    Tiles(BT=16, num_warps=8),
)
BACKWARD_KEY = (
    Tiles(BT=64, num_warps=4),
    Tiles(BT=64, num_warps=4),
    Tiles(BT=32, num_warps=4),
    Tiles(BT=32, num_warps=4),
)
# All keys and values, or queries and gradients, of a head on chip: for up to RESIDENT_TOKENS and head dims up to 64.
RESIDENT_FORWARD = Tiles(BQ=64, BK=128, num_warps=4, maxnreg=168)
RESIDENT_BACKWARD_KEY = Tiles(BQ=128, BK=64, num_warps=4)
RESIDENT_TOKENS = 256
PREFETCH_RUN = 16  # shorter runs leave no registers for prefetched queries


def resident(tiles: Tiles, num_tokens: int) -> Tiles:
    """Shrink the tiles to what the tokens need."""
    largest = 64 if num_tokens <= 64 else 128
    return tiles | {name: min(tiles[name], largest) for name in ("BQ", "BK")}


def tiles(table: tuple[Tiles, Tiles, Tiles, Tiles], dim: int, dtype: torch.dtype) -> Tiles:
    """Choose the row of a table for the larger head dim and the type of the inputs."""
    if dtype != torch.bfloat16:
        return table[3]
    return table[0 if dim <= 64 else 1 if dim < 128 else 2]


def mix_tiles(num_blocks: int, dtype: torch.dtype) -> Tiles:
    """Choose the tiles of ``mix_kernel``, and with ``per`` how many tiles of columns a program mixes."""
    if dtype != torch.bfloat16:
        return Tiles(BM=16 if num_blocks <= 16 else 64, BC=32, BF=64, num_warps=4, num_stages=1, per=4)
    if num_blocks <= 16:
        return Tiles(BM=16, BC=16, BF=128, num_warps=4, num_stages=3, per=2)
    if num_blocks <= 64:
        return Tiles(BM=64, BC=64, BF=128, num_warps=4, num_stages=3, per=4)
    return Tiles(BM=64, BC=32, BF=64, num_warps=4, num_stages=3, per=8)


def mixing_gradient_tiles(num_blocks: int, dtype: torch.dtype) -> Tiles:
    if dtype != torch.bfloat16:
        return Tiles(BM=16 if num_blocks <= 16 else 64, BF=32, num_warps=4, num_stages=1)
    if num_blocks <= 16:
        return Tiles(BM=16, BF=128, num_warps=4, num_stages=3, maxnreg=128)
    return Tiles(BM=64, BF=128 if num_blocks <= 64 else 64, num_warps=4, num_stages=3)
