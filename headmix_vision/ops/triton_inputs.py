"""What the Triton kernels of all ops ask of their inputs, and the numbers that they compute in."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_DIM = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTERPRETED = triton.knobs.runtime.interpret  # as of the definition of the kernels
# As exact as "tf32x3", but with three halves of a float32 in shared memory instead of four; not known when interpreted.
SMALL_FLOAT32_PRECISION = "tf32x3" if _INTERPRETED else "bf16x6"


class Numerics(NamedTuple):
    """Type and precision of the products, and the type of stored intermediates; sums are float32 throughout."""

    compute: tl.dtype
    precision: str
    storage: torch.dtype


def numerics(dtype: torch.dtype) -> Numerics:
    """bf16 stays bf16; fp16 has too small a range for sums and is computed as float32 with 10-bit products."""
    if dtype == torch.bfloat16:
        return Numerics(tl.bfloat16, "tf32", torch.bfloat16)
    return Numerics(tl.float32, "tf32" if dtype == torch.float16 else "tf32x3", torch.float32)


def why_not_triton(q: Tensor, v: Tensor) -> str | None:
    """Reason, naming the argument, why no kernel can run on these inputs; None if it can."""
    if q.device.type != "cuda" and not (_INTERPRETED and q.device.type == "cpu"):
        return f"q is on {q.device}: the kernels need a CUDA device"
    if torch.version.hip is not None:
        return f"q is on {q.device} of a ROCm build of torch: the kernels are written for NVIDIA GPUs"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"q is on {torch.cuda.get_device_name(q.device)}: the kernels need compute capability 8.0"
    if q.dtype not in _DTYPES:
        return f"q has type {q.dtype}: the kernels take bfloat16, float16 and float32"
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > MAX_DIM:
            return f"{name} has head dim {x.shape[-1]}: the kernels take up to {MAX_DIM}"
    return None


def alignment(*tensors: Tensor) -> int:
    """Largest of 8, 4, 2, 1 dividing all strides but the last dim's, so that rows are loaded in wide words."""
    if any(x.data_ptr() % 16 for x in tensors):
        return 1
    return math.gcd(8, *(stride for x in tensors for stride in x.stride()[:-1]))
