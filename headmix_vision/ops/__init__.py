"""Attention mathematics on tensors: one folder per op, no modules, no models."""

from headmix_vision.ops.mhla import mhla
from headmix_vision.ops.token_blocks import BlockTables, TokenBlocks

__all__ = ["BlockTables", "TokenBlocks", "mhla"]
