"""Facts that decide which kernels run: the GPU, the release of Triton, and the assembler that it takes.

This file can be imported without Triton.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
OLDEST_TRITON = (3, 5)


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
    """Facts of a GPU on which kernels depend.

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

    @property
    def uses_mma_sync(self) -> bool:
        """Whether products run as mma.sync, with both operands in registers: as on A100 and RTX 30, 40 and 50."""
        return not self.amd and self.capability[0] in (8, 12)


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


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile call a function while it traces.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def gpu_behind(device: torch.device) -> Gpu:
    """Return the GPU behind the device of a tensor that the kernels can run on."""
    gpu = find_gpu(device)
    assert gpu is not None, device
    return gpu


@constant_in_graphs
def is_amd(device: torch.device) -> bool:
    """Return whether a device that the kernels can run on is an AMD GPU."""
    return bool(gpu_behind(device).amd)


@constant_in_graphs
def uses_mma_sync(device: torch.device) -> bool:
    """Return whether a device that the kernels can run on multiplies by mma.sync."""
    return gpu_behind(device).uses_mma_sync


@constant_in_graphs
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
    """Return whether Triton compiles products for tensor memory rightly, or does not use it."""
    release = triton_release()
    unused = bool(os.environ.get("DISABLE_MMA_V5")) or (gpu.capability[0] == 11 and release < (3, 7))
    return unused or release >= RIGHT_ON_TENSOR_MEMORY or bool(os.environ.get(ALLOW_UNTESTED))


FIRST_RIGHT = (12, 9)
_ASSEMBLER = "TRITON_PTXAS_PATH"
TOOLS = ("ptxas", "ptxas_blackwell")  # as Triton's settings name them


class Assembler(NamedTuple):
    """A program that assembles, and whether Triton takes it by itself."""

    path: str
    version: tuple[int, int]
    is_default: bool


def default_assembler(capability: tuple[int, int]) -> Assembler:
    """Ask Triton which assembler it takes for a compute capability; ``TRITON_PTXAS_PATH`` may name it."""
    from triton.backends.nvidia.compiler import get_ptxas

    takes_capability = bool(inspect.signature(get_ptxas).parameters)  # from Triton 3.6 on
    return _assembler(get_ptxas(*[10 * capability[0] + capability[1]] * takes_capability), is_default=True)


def _assembler(tool: Any, is_default: bool) -> Assembler:
    major, minor = map(int, tool.version.split("."))
    return Assembler(tool.path, (major, minor), is_default)


def _driver_major() -> float:
    """Return the major CUDA release of the driver, which does not load machine code of a later one."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:  # there is none: nothing is run here
        return math.inf
    return version.value // 1000


@lru_cache
def find_assembler() -> Assembler | None:
    """Return the first of Triton's assemblers that is right on Hopper and that the driver can follow, or None."""
    from triton import knobs

    tools = (getattr(knobs.nvidia, name, None) for name in TOOLS)
    candidates = [
        default_assembler((9, 0)),
        *(_assembler(tool, is_default=False) for tool in tools if tool is not None),
    ]
    right = (x for x in candidates if x.version >= FIRST_RIGHT and x.version[0] <= _driver_major())
    return next(right, None)


def why_no_assembler() -> str | None:
    """Return why kernels cannot be assembled for Hopper, or None."""
    if find_assembler() is not None:
        return None
    from triton import __version__

    version = ".".join(map(str, default_assembler((9, 0)).version))
    return (
        f"triton {__version__} (ptxas {version}) has no ptxas that makes right machine code for Hopper and that the"
        " driver follows: install a newer triton, or set TRITON_PTXAS_PATH to the ptxas of CUDA 12.9"
    )


@contextmanager
def right_assembler() -> Iterator[None]:
    """Let Triton assemble for Hopper with :func:`find_assembler`, also where it remembers another one's version."""
    assembler = find_assembler()
    if assembler is None or assembler.is_default:
        yield
        return
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas_version  # a part of the key of cached machine code

    with knobs.nvidia.scope():
        for name in TOOLS:
            if hasattr(knobs.nvidia, name):
                setattr(knobs.nvidia, name, assembler.path)
        get_ptxas_version.cache_clear()
        try:
            yield
        finally:
            get_ptxas_version.cache_clear()


def give_compilers_the_assembler() -> None:
    """Let processes that compile for torch.compile use :func:`find_assembler` on Hopper, too.

    They read ``TRITON_PTXAS_PATH`` when they start; those that run are replaced.
    """
    assembler = find_assembler()
    if assembler is None or assembler.is_default:
        return
    os.environ[_ASSEMBLER] = assembler.path
    find_assembler.cache_clear()
    compilers: Any = sys.modules.get("torch._inductor.async_compile")
    if compilers is not None:
        compilers.shutdown_compile_workers()
