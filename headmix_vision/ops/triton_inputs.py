"""The numbers that the Triton kernels of all ops compute in, and how widely they load their inputs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from headmix_vision.ops.selection import INTERPRETED

# As exact as "tf32x3", but with three halves of a float32 in shared memory instead of four; not known when interpreted.
SMALL_FLOAT32_PRECISION = "tf32x3" if INTERPRETED else "bf16x6"


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


def alignment(*tensors: Tensor) -> int:
    """Return the largest of 8, 4, 2, 1 that divides all strides but the last dim's, so that rows load in wide words."""
    if any(x.data_ptr() % 16 for x in tensors):
        return 1
    return math.gcd(8, *(stride for x in tensors for stride in x.stride()[:-1]))
