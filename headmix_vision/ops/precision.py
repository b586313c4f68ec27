"""Sets the numerics of all ops: they take any floating type, sum in float32 or wider, and run without autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_off(like: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of ``like``; the meta device has no autocast."""
    device = like.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float32 for float32 and narrower types, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
