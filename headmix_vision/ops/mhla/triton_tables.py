"""Builds the index tables of the Triton kernels on the host, once for each partition and device.

N tokens, M blocks, C parts of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headmix_vision.ops.runtime import cached_tables
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
