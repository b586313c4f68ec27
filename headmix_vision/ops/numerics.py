"""Types and precision that ops compute in: of sums, of stored intermediates and of products.

This file can be imported without Triton.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headmix_vision.ops.hardware import INTERPRETED, Gpu, triton_release


def autocast_off(like: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of ``like``; the meta device has no autocast.

    A tracer records the context even without autocast, as its graph may run under autocast later.
    """
    device = like.device.type
    if device == "meta" or not (torch.is_autocast_enabled(device) or torch.compiler.is_compiling()):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float32 for float32 and narrower types, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of stored intermediates for inputs of a type."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class Numerics(NamedTuple):
    """The type and precision of products; sums are float32 throughout."""

    compute: Any  # a type of triton.language
    precision: str


def numerics(dtype: torch.dtype, gpu: Gpu, crowded: bool = False) -> Numerics:
    """Choose the numbers that the kernels compute in for inputs of a type.

    bf16 stays bf16; fp16 has too small a range for sums and is computed as float32 with 10-bit products. A product of
    float32 is a sum of three tf32 products. Where shared memory is ``crowded``, it is a sum of six bf16 products, which
    is as exact and holds three halves of a number there instead of four; neither the interpreter nor Triton 3.5 knows
    these. On AMD GPUs products of float32 are exact. Tables of tiles may name another precision.
    """
    import triton.language as tl

    if dtype == torch.bfloat16:
        return Numerics(tl.bfloat16, "ieee" if gpu.amd else "tf32")
    if gpu.amd:
        return Numerics(tl.float32, "ieee")
    if dtype == torch.float16:
        return Numerics(tl.float32, "tf32")
    return Numerics(tl.float32, "bf16x6" if crowded and not INTERPRETED and triton_release() >= (3, 6) else "tf32x3")
