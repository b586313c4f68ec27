"""Compute attention on tensors: one folder for each op; it holds no modules and no models."""

from headmix_vision.ops.grid_conv import grid_conv
from headmix_vision.ops.head_in_head import HeadInHeadOutput, head_in_head, head_in_head_rwkv7
from headmix_vision.ops.mhla import MHLAState, mhla, mhla_step
from headmix_vision.ops.mix_heads import mix_heads
from headmix_vision.ops.sample_grids import SampleGrids
from headmix_vision.ops.token_blocks import BlockTables, TokenBlocks
from headmix_vision.ops.token_grid import TokenGrid
from headmix_vision.ops.token_ranks import TokenRanks
from headmix_vision.ops.token_scan import ScanTables, TokenScan
from headmix_vision.ops.token_window import TokenWindow

__all__ = [
    "BlockTables",
    "HeadInHeadOutput",
    "MHLAState",
    "SampleGrids",
    "ScanTables",
    "TokenBlocks",
    "TokenGrid",
    "TokenRanks",
    "TokenScan",
    "TokenWindow",
    "grid_conv",
    "head_in_head",
    "head_in_head_rwkv7",
    "mhla",
    "mhla_step",
    "mix_heads",
]
