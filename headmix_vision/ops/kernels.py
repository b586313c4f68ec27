"""Chooses the implementation of an op, says why the Triton kernels cannot run, and sets the numbers they compute in.

This file can be imported without Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from headmix_vision.errors import InputError

OLDEST_TRITON = (3, 6)
MAX_DIM = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Run = TypeVar("Run", bound=Callable[..., object])


def why_no_kernels() -> str | None:
    """Return why the kernels cannot be loaded, or None; an older Triton lacks language that they use."""
    if find_spec("triton") is None:
        return "q cannot reach the kernels: the package triton is not installed"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"q cannot reach the kernels: they need triton {oldest} (torch 2.11), installed is {triton.__version__}"
    return None


def _is_interpreted() -> bool:
    import triton

    return triton.knobs.runtime.interpret


NO_KERNELS = why_no_kernels()
INTERPRETED = NO_KERNELS is None and _is_interpreted()  # the kernels, once defined, keep this value


def why_not_triton(q: Tensor, v: Tensor) -> str | None:
    """Return the reason, naming the argument, why no kernel can run on these inputs; None if one can."""
    if NO_KERNELS is not None:
        return NO_KERNELS
    if q.device.type != "cuda" and not (INTERPRETED and q.device.type == "cpu"):
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


def select(impl: str, implementations: Mapping[str, Run], on_gpu: bool, why_not: Callable[[], str | None]) -> Run:
    """Choose the implementation of an op.

    Args:
        impl: name of an implementation, or ``"auto"``: the kernels on a CUDA device wherever they can run, else torch.
        implementations: ``"reference"``, ``"torch"`` and, where they could be loaded, the names of kernels, which
            begin with ``"triton"``.
        on_gpu: whether the inputs are on a CUDA device.
        why_not: returns the reason why the kernels cannot run on the inputs, or None if they can.

    Raises:
        InputError: if kernels are asked for by name and cannot run; with the reason.
    """
    if impl == "auto":
        return implementations["triton" if on_gpu and why_not() is None else "torch"]
    if impl.startswith("triton") and (reason := why_not()):
        raise InputError(f"{reason}; impl={impl!r} was asked for.")
    return implementations[impl]


# It is as exact as "tf32x3", but holds three halves of a float32 in shared memory instead of four. The interpreter does
# not know it.
SMALL_FLOAT32_PRECISION = "tf32x3" if INTERPRETED else "bf16x6"


class Numerics(NamedTuple):
    """The type and precision of the products, and the type of stored intermediates; sums are float32 throughout."""

    compute: Any  # a type of triton.language
    precision: str
    storage: torch.dtype


def numerics(dtype: torch.dtype) -> Numerics:
    """Choose the numbers that the kernels compute in for inputs of a type.

    bf16 stays bf16; fp16 has too small a range for sums and is computed as float32 with 10-bit products.
    """
    import triton.language as tl

    if dtype == torch.bfloat16:
        return Numerics(tl.bfloat16, "tf32", torch.bfloat16)
    return Numerics(tl.float32, "tf32" if dtype == torch.float16 else "tf32x3", torch.float32)


def alignment(*tensors: Tensor) -> int:
    """Return the largest of 8, 4, 2, 1 that divides all strides but the last dim's, so that rows load in wide words."""
    if any(x.data_ptr() % 16 for x in tensors):
        return 1
    return math.gcd(8, *(stride for x in tensors for stride in x.stride()[:-1]))
