"""Chooses the implementation of an op, says why the Triton kernels cannot run, and sets the numbers they compute in.

This file can be imported without Triton.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.ops.tracing import is_transforming

OLDEST_TRITON = (3, 6)
MAX_DIM = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Run = TypeVar("Run", bound=Callable[..., object])


def why_no_kernels() -> str | None:
    """Return why the kernels cannot be loaded, or None; an older Triton lacks language that they use."""
    if find_spec("triton") is None:
        return "cannot reach the kernels: the package triton is not installed"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"cannot reach the kernels: they need triton {oldest} (torch 2.11), installed is {triton.__version__}"
    return None


def _is_interpreted() -> bool:
    import triton

    return triton.knobs.runtime.interpret


NO_KERNELS = why_no_kernels()
INTERPRETED = NO_KERNELS is None and _is_interpreted()  # the kernels, once defined, keep this value


class Gpu(NamedTuple):
    """What the kernels have to know of a GPU.

    Attributes:
        name: its name.
        capability: CUDA compute capability.
        shared_memory: bytes that a program may have.
        processors: streaming multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    processors: int = 1


INTERPRETER = Gpu("the interpreter", (9, 0), 227 << 10)
LEAST_SHARED_MEMORY = 99 << 10  # every kernel has tiles for it: what all GPUs from Ampere on have
TENSOR_MEMORY = (10, 11)  # major compute capabilities whose products go through tensor memory
ALLOW_UNTESTED = "HEADMIX_VISION_UNTESTED_GPUS"


@lru_cache
def find_gpu(device: torch.device) -> Gpu | None:
    """Return the GPU behind a device, or None if it is none that CUDA runs on; the interpreter takes CPU tensors."""
    if device.type != "cuda" or torch.version.hip is not None:
        return INTERPRETER if INTERPRETED and device.type == "cpu" else None
    about = torch.cuda.get_device_properties(device)
    shared_memory: int = about.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Gpu(about.name, (about.major, about.minor), shared_memory, about.multi_processor_count)


def gpu_behind(device: torch.device) -> Gpu:
    """Return the GPU behind the device of a tensor that the kernels can run on."""
    gpu = find_gpu(device)
    assert gpu is not None, device
    return gpu


@torch.compiler.assume_constant_result
def why_not_here(device: torch.device, name: str = "q") -> str | None:
    """Return why no kernel can run on the device of a named argument, or None."""
    gpu = find_gpu(device)
    if gpu is None and device.type == "cuda":
        return f"{name} is on {device} of a ROCm build of torch: the kernels are written for NVIDIA GPUs"
    if gpu is None:
        return f"{name} is on {device}: the kernels need a CUDA device"
    capability = ".".join(map(str, gpu.capability))
    if gpu.capability < (8, 0):
        return f"{name} is on {gpu.name} of compute capability {capability}: the kernels need 8.0"
    if gpu.shared_memory < LEAST_SHARED_MEMORY:
        return (
            f"{name} is on {gpu.name}, where a program may have {gpu.shared_memory >> 10} KB of shared memory:"
            f" the kernels need {LEAST_SHARED_MEMORY >> 10} KB"
        )
    if gpu.capability[0] in TENSOR_MEMORY and not os.environ.get(ALLOW_UNTESTED):
        # Triton 3.6 pipelines two products into one accumulator wrongly there (triton #10821).
        return (
            f"{name} is on {gpu.name} of compute capability {capability}, where nobody has tested the kernels yet"
            f" ({ALLOW_UNTESTED}=1 runs them all the same)"
        )
    return None


def why_no_kernel_takes(x: Tensor, name: str) -> str | None:
    """Return why no kernel can run on a named argument of its device and type, or None."""
    if NO_KERNELS is not None:
        return f"{name} {NO_KERNELS}"
    if reason := why_not_here(x.device, name):
        return reason
    if is_transforming():
        return f"{name} is under a transformation of torch.func: the kernels have none"
    if x.dtype not in _DTYPES:
        return f"{name} has type {x.dtype}: the kernels take bfloat16, float16 and float32"
    return None


def why_not_triton(q: Tensor, v: Tensor, names: tuple[str, str] = ("q", "v")) -> str | None:
    """Return the reason, naming the argument, why no kernel can run on these inputs; None if one can."""
    if reason := why_no_kernel_takes(q, names[0]):
        return reason
    for name, x in zip(names, (q, v), strict=True):
        if x.shape[-1] > MAX_DIM:
            return f"{name} has head dim {x.shape[-1]}: the kernels take up to {MAX_DIM}"
    return None


def select(impl: str, implementations: Mapping[str, Run], on_gpu: bool, why_not: Callable[[], str | None]) -> Run:
    """Choose the implementation of an op.

    Args:
        impl: name of an implementation, or ``"auto"``: the kernels on a CUDA device wherever they can run, else torch,
            with a warning for each reason.
        implementations: ``"reference"``, ``"torch"`` and, where they could be loaded, the names of kernels, which
            begin with ``"triton"``.
        on_gpu: whether the inputs are on a CUDA device.
        why_not: returns the reason why the kernels cannot run on the inputs, or None if they can.

    Raises:
        InputError: if kernels are asked for by name and cannot run; with the reason.
    """
    if impl == "auto":
        reason = why_not() if on_gpu else None
        if reason:
            _warn_once(reason)
        return implementations["triton" if on_gpu and reason is None else "torch"]
    if impl.startswith("triton") and (reason := why_not()):
        raise InputError(f"{reason}; impl={impl!r} was asked for.")
    return implementations[impl]


_warned: set[str] = set()


@torch.compiler.assume_constant_result
def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"{reason}; the slower PyTorch form takes their place (impl='auto').", stacklevel=2)


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
