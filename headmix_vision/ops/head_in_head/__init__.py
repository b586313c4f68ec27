"""Compute Head-in-Head: the delta rule with a mask between sub-heads."""

from headmix_vision.ops.head_in_head.api import HeadInHeadOutput, head_in_head, head_in_head_rwkv7

__all__ = ["HeadInHeadOutput", "head_in_head", "head_in_head_rwkv7"]
