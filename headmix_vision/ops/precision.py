"""Numerics shared by the ops: inputs of any floating type, sums in float32 or wider, autocast left outside."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_off(like: Tensor) -> AbstractContextManager[object]:
    """Context without autocast on the device of ``like``; the meta device knows none."""
    device = like.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float32 and narrower types, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
