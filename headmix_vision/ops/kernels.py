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
from headmix_vision.ops.assembler import why_no_assembler
from headmix_vision.ops.tracing import is_transforming

OLDEST_TRITON = (3, 5)
MAX_DIM = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Run = TypeVar("Run", bound=Callable[..., object])


def triton_release() -> tuple[int, int]:
    """Return the release of the installed Triton: (3, 6)."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def why_no_kernels() -> str | None:
    """Return why the kernels cannot be loaded, or None; an older Triton lacks language that they use."""
    if find_spec("triton") is None:
        return "cannot reach the kernels: the package triton is not installed"
    if triton_release() < OLDEST_TRITON:
        import triton

        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"cannot reach the kernels: they need triton {oldest} (torch 2.9), installed is {triton.__version__}"
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
        amd: architecture of an AMD GPU, such as "gfx942"; empty for NVIDIA's.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    processors: int = 1
    amd: str = ""

    @property
    def has_tensor_memory(self) -> bool:
        """Whether products go through tensor memory (tcgen05): on B200, B300 and, from Triton 3.7 on, Thor."""
        return not self.amd and self.capability[0] in (10, 11)


INTERPRETER = Gpu("the interpreter", (9, 0), 227 << 10)
LEAST_SHARED_MEMORY = 99 << 10  # every kernel has tiles for it: what all GPUs from Ampere on have
AMD_SHARED_MEMORY = 64 << 10
AMD_GPUS = ("gfx942", "gfx950", "gfx1100")  # for which the kernels have been compiled
RIGHT_ON_TENSOR_MEMORY = (3, 9)  # first release of Triton whose products in loops are right there
ALLOW_UNTESTED = "HEADMIX_VISION_UNTESTED_GPUS"


@lru_cache
def find_gpu(device: torch.device) -> Gpu | None:
    """Return the GPU behind a device, or None if there is none; the interpreter takes CPU tensors."""
    if device.type != "cuda":
        return INTERPRETER if INTERPRETED and device.type == "cpu" else None
    about: Any = torch.cuda.get_device_properties(device)
    capability, processors = (about.major, about.minor), about.multi_processor_count
    if torch.version.hip is not None:
        return Gpu(about.name, capability, AMD_SHARED_MEMORY, processors, about.gcnArchName.partition(":")[0])
    return Gpu(about.name, capability, about.shared_memory_per_block_optin, processors)


def gpu_behind(device: torch.device) -> Gpu:
    """Return the GPU behind the device of a tensor that the kernels can run on."""
    gpu = find_gpu(device)
    assert gpu is not None, device
    return gpu


@torch.compiler.assume_constant_result
def is_amd(device: torch.device) -> bool:
    """Tell whether a device that the kernels can run on is an AMD GPU."""
    return bool(gpu_behind(device).amd)


@torch.compiler.assume_constant_result
def why_not_here(device: torch.device, name: str = "q") -> str | None:
    """Return why no kernel can run on the device of a named argument, or None."""
    gpu = find_gpu(device)
    if gpu is None:
        return f"{name} is on {device}: the kernels need a CUDA device"
    reason = _why_not_amd(gpu) if gpu.amd else _why_not_nvidia(gpu)
    return reason and f"{name} is on {gpu.name}{reason}"


def _why_not_amd(gpu: Gpu) -> str | None:
    if os.environ.get(ALLOW_UNTESTED):
        return None
    compiled = "the kernels compile for it" if gpu.amd in AMD_GPUS else "the kernels have not been compiled for it"
    return f" ({gpu.amd}): {compiled}, but nobody has run them there ({ALLOW_UNTESTED}=1 runs them all the same)"


def _why_not_nvidia(gpu: Gpu) -> str | None:
    capability = ".".join(map(str, gpu.capability))
    if gpu.capability < (8, 0):
        return f" of compute capability {capability}: the kernels need 8.0"
    if gpu.shared_memory < LEAST_SHARED_MEMORY:
        return (
            f", where a program may have {gpu.shared_memory >> 10} KB of shared memory:"
            f" the kernels need {LEAST_SHARED_MEMORY >> 10} KB"
        )
    if gpu.has_tensor_memory and not _is_right_on_tensor_memory(gpu):
        release, right = (".".join(map(str, x)) for x in (triton_release(), RIGHT_ON_TENSOR_MEMORY))
        return (
            f" of compute capability {capability}, for which triton {release} compiles products in loops wrongly"
            f" (triton #10821): install triton {right} or newer, or set DISABLE_MMA_V5=1"
        )
    if gpu.capability == (9, 0) and not INTERPRETED and (reason := why_no_assembler()):
        return f", where {reason}"
    return None


def _is_right_on_tensor_memory(gpu: Gpu) -> bool:
    """Tell whether Triton compiles products for tensor memory rightly, or does not use it."""
    release = triton_release()
    unused = bool(os.environ.get("DISABLE_MMA_V5")) or (gpu.capability[0] == 11 and release < (3, 7))
    return unused or release >= RIGHT_ON_TENSOR_MEMORY or bool(os.environ.get(ALLOW_UNTESTED))


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
            begin with ``"triton"``; ``"auto"`` are the kernels too, but gives way to torch where one does not compile.
        on_gpu: whether the inputs are on a CUDA device.
        why_not: returns the reason why the kernels cannot run on the inputs, or None if they can.

    Raises:
        InputError: if kernels are asked for by name and cannot run; with the reason.
    """
    if impl == "auto":
        reason = why_not() if on_gpu else None
        if reason:
            warn_once(f"{reason}; the slower PyTorch form takes their place (impl='auto').")
        return implementations["auto" if on_gpu and reason is None else "torch"]
    if impl.startswith("triton") and (reason := why_not()):
        raise InputError(f"{reason}; impl={impl!r} was asked for.")
    return implementations[impl]


_warned: set[str] = set()


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """Warn, unless this process has been told the same before."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


class Numerics(NamedTuple):
    """The type and precision of products; sums are float32 throughout."""

    compute: Any  # a type of triton.language
    precision: str


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of stored intermediates for inputs of a type."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def numerics(dtype: torch.dtype, gpu: Gpu, crowded: bool = False) -> Numerics:
    """Choose the numbers that the kernels compute in for inputs of a type.

    bf16 stays bf16; fp16 has too small a range for sums and is computed as float32 with 10-bit products. A product of
    float32 is a sum of three tf32 products. Where shared memory is ``crowded``, it is a sum of six bf16 products, which
    is as exact and holds three halves of a number there instead of four; neither the interpreter nor Triton 3.5 knows
    these. On AMD GPUs products of float32 are exact.
    """
    import triton.language as tl

    if dtype == torch.bfloat16:
        return Numerics(tl.bfloat16, "ieee" if gpu.amd else "tf32")
    if gpu.amd:
        return Numerics(tl.float32, "ieee")
    if dtype == torch.float16:
        return Numerics(tl.float32, "tf32")
    return Numerics(tl.float32, "bf16x6" if crowded and not INTERPRETED and triton_release() >= (3, 6) else "tf32x3")
