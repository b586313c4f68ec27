"""Describe the GPU, Triton and its assembler; keep index tables and launch plans; launch kernels.

This file can be imported without Triton.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from importlib.util import find_spec
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

OLDEST_TRITON = (3, 5)
P = ParamSpec("P")
R = TypeVar("R")


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


def cached_tables(build: Callable[P, R], size: int = 256) -> Callable[P, R]:
    """Cache the last ``size`` results of a function that builds tables on the CPU and copies them to a device.

    It runs in a thread of its own. A table outlives the call that asks for it first, so nothing that holds in the
    caller's thread may reach it: neither inference mode, a tracer, a transformation or a default device, nor the memory
    pool of a CUDA graph that warms up, which is given away once the graph is captured.
    """

    @lru_cache(maxsize=size)
    def build_apart(*args: P.args, **kwargs: P.kwargs) -> R:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(build, *args, **kwargs).result()

    @wraps(build)
    def find(*args: P.args, **kwargs: P.kwargs) -> R:
        tables = build_apart(*args, **kwargs)  # type: ignore[arg-type]
        keep_for_graphs(tables if isinstance(tables, tuple) else (tables,))
        return tables

    find.cache_info, find.cache_clear = build_apart.cache_info, build_apart.cache_clear  # type: ignore[attr-defined]
    return cast(Callable[P, R], find)


_kept: dict[int, Tensor] = {}


def keep_for_graphs(tables: Iterable[Any]) -> None:
    """Keep the tensors on a CUDA device as long as the process lives, if a CUDA graph is being captured."""
    tensors = [x for x in tables if isinstance(x, Tensor) and x.is_cuda]
    if tensors and torch.cuda.is_current_stream_capturing():
        _kept.update((x.data_ptr(), x) for x in tensors)


_MOST_PLANS = 512
_forget: list[Callable[[], None]] = []


class Layout(NamedTuple):
    """What a launch may depend on of a tensor: all but its values and its address.

    Attributes:
        aligned: whether the address is a multiple of 16 bytes.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool

    @property
    def gpu(self) -> Gpu:
        """The GPU that holds the tensor."""
        return gpu_behind(self.device)


def layout(x: Tensor) -> Layout:
    if not _recording.on:
        # as Layout(...), in half the time
        return tuple.__new__(Layout, (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0))
    batch, *sizes = x.shape  # of a traced tensor; only the batch may be a symbol
    aligned = int(x.storage_offset()) * x.element_size() % 16 == 0
    return Layout(torch.Size((batch, *map(int, sizes))), tuple(map(int, x.stride())), x.dtype, x.device, aligned)


def planned(plan: Callable[..., R]) -> Callable[..., R]:
    """Cache what a function of layouts and other hashable arguments makes of them; recorded calls are not cached."""
    cached = lru_cache(maxsize=_MOST_PLANS)(plan)
    _forget.append(cached.cache_clear)

    @wraps(plan)
    def find(*args: Any) -> R:
        return plan(*args) if _recording.on else cached(*args)

    return find


class _Recording(threading.local):
    """Whether launches of this thread are recorded into a graph.

    Attributes:
        tables: the traced tensor for each index table, by the table's ``id``.
        check: compile each kernel before it is recorded.
        tape: records launches as they run; see ``replay.py``.
    """

    on = False
    check = False
    tape: Any = None
    tables: Mapping[int, Tensor] = {}


_recording = _Recording()


def is_recording() -> bool:
    return _recording.on


@contextmanager
def recorded(tables: Mapping[int, Tensor], check: bool = False) -> Iterator[None]:
    """Record launches into the graph that is being traced; see :class:`_Recording`."""
    _recording.on, _recording.tables, _recording.check = True, tables, check
    try:
        yield
    finally:
        _recording.on, _recording.tables, _recording.check = False, {}, False


_HERE = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of ``x`` is the current one; a recorded launch has a device by itself."""
    is_current = _recording.on or not x.is_cuda or x.get_device() == torch._C._cuda_getDevice()
    return _HERE if is_current else torch.cuda.device_of(x)


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


def forgotten_with_plans(table: dict[Any, Any]) -> dict[Any, Any]:
    """Return a table that :func:`forget_plans` empties, too."""
    _forget.append(table.clear)
    return table


def forget_plans() -> None:
    """Empty the caches of all planned functions, which do not see that a constant of a module is another one."""
    for forget in _forget:
        forget()


class KernelFailed(RuntimeError):
    """A kernel does not compile, or cannot be loaded; the message says which, where and why in one line."""


TABLE_TYPE = torch.int32  # of the index tables of plans
# Of the compiler, for all kernels: contract a * b + c, which Triton 3.10 stops doing by itself.
OPTIONS = {"enable_fp_fusion": True}


class Launch:
    """A kernel with all of its arguments but the tensors, which are the first, and always of the same types.

    Args:
        kernel: a function of ``triton.jit``.
        grid: how many programs.
        numbers: arguments after the tensors; None is a constant of the kernel.
        constants: the rest by name, and options of the compiler.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: Sequence[float | None], constants: Mapping[str, Any]
    ):
        self.kernel, self.numbers, self.constants = kernel, tuple(numbers), dict(constants)
        self.grid = (*grid, 1, 1)[:3]
        self._compiled: dict[tuple[bool | None, ...], Any] = {}
        self._kernels: dict[tuple[bool | None, ...], Any] = {}
        self._tables: list[int] = []  # which tensors are index tables of plans, which may be forgotten
        if torch.version.hip is not None:
            self.constants.pop("maxnreg", None)  # AMD's compiler takes no number of registers
        self._rest = (*self.numbers, *(constants[name] for name in kernel.arg_names if name in constants))

    def __call__(self, *tensors: Tensor | None) -> None:
        if _recording.on:
            return self._record(tensors)
        # Triton compiles for types, for numbers that are 1 or multiples of 16, and for addresses that are.
        pointers = [x if x is None else x.data_ptr() for x in tensors]
        aligned = tuple([x if x is None else x % 16 == 0 for x in pointers])
        run = self._compiled.get(aligned)
        if run is not None:
            run(*pointers, *self._rest)  # of tensors the launcher would ask the driver
        else:
            compiled = self._compile_and_run(tensors)  # None from the interpreter, which compiles nothing
            self._kernels[aligned], self._compiled[aligned] = compiled, compiled and compiled[self.grid]
            self._tables = [i for i, x in enumerate(tensors) if x is not None and x.dtype == TABLE_TYPE]
        if self._tables:
            keep_for_graphs([tensors[i] for i in self._tables])
        if _recording.tape is not None:
            named = dict(zip(self.kernel.arg_names, (*tensors, *self.numbers), strict=False))
            _recording.tape.launch(self._kernels[aligned], self.grid, named | self.constants)

    def _record(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Record the launch. Compiled graphs launch the kernel themselves, without a limit of registers."""
        tensors = tuple(_recording.tables.get(id(x), x) for x in tensors)
        constants = {name: value for name, value in self.constants.items() if name != "maxnreg"}
        if _recording.check and torch.cuda.is_available():
            self._compile_only(tensors, constants)
        named = dict(zip(self.kernel.arg_names, (*tensors, *self.numbers), strict=False))
        torch.library.wrap_triton(self.kernel)[self.grid](**named, **constants)

    def _compile_only(self, tensors: Sequence[Tensor | None], constants: Mapping[str, Any]) -> None:
        """Compile and load the kernel for addresses that are multiples of 16 and symbols that are."""
        types = [x if x is None else x.dtype for x in tensors]
        numbers = [16 if isinstance(number, torch.SymInt) else number for number in self.numbers]

        def load() -> None:
            self.kernel.warmup(*types, *numbers, grid=(1, 1, 1), **constants, **OPTIONS)[(1, 1, 1)]

        self._compile(tensors, load)

    def _compile_and_run(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Launch the kernel by Triton's own way, and return what it compiled."""
        launch = self.kernel[self.grid]
        if INTERPRETED:
            return launch(*tensors, *self.numbers, **self.constants)
        return self._compile(tensors, lambda: launch(*tensors, *self.numbers, **self.constants, **OPTIONS))

    def _compile(self, tensors: Sequence[Tensor | None], compile_kernel: Callable[[], R]) -> R:
        """Compile the kernel for the device of the tensors.

        Raises:
            KernelFailed: with the reason.
        """
        device = next(x.device for x in tensors if x is not None)
        try:
            with right_assembler() if gpu_behind(device).capability == (9, 0) else nullcontext():
                return compile_kernel()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler raises
            import triton

            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if "out of memory" in reason:  # the driver's, which loads the kernel
                raise torch.OutOfMemoryError(reason) from error
            name = self.kernel.__name__
            raise KernelFailed(
                f"{name} does not compile with triton {triton.__version__} on {gpu_behind(device).name}: {reason}"
            ) from error


def alignment(*tensors: Layout) -> int:
    """Return the largest of 8, 4, 2, 1 that divides all strides but the last dim's, so that rows load in wide words."""
    if not all(x.aligned for x in tensors):
        return 1
    return math.gcd(8, *(stride for x in tensors for stride in x.strides[:-1]))


def autocast_off(like: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of ``like``; the meta device has no autocast.

    A tracer records the context even where there is no autocast now: its graph may run under one.
    """
    device = like.device.type
    if device == "meta" or not (torch.is_autocast_enabled(device) or torch.compiler.is_compiling()):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float32 for float32 and narrower types, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
