"""Keep index tables and launch plans, record and launch kernels.

This file can be imported without Triton.
"""

from __future__ import annotations

import math
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from headmix_vision.ops.hardware import INTERPRETED, Gpu, gpu_behind, right_assembler

P = ParamSpec("P")
R = TypeVar("R")


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
    """Part of a launch's cache key that one tensor gives: shape, strides, dtype, device and alignment.

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
                return _unless_interrupted(compile_kernel)
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


def _unless_interrupted(compile_kernel: Callable[[], R]) -> R:
    """Compile a kernel, once more if SIGINT or SIGTERM ended a compiler that Triton had started.

    Ctrl-C and schedulers send them to all processes of a command, and training then finishes its step.
    """
    try:
        return compile_kernel()
    except Exception as error:
        ended = [x for x in (error, error.__context__) if isinstance(x, subprocess.CalledProcessError)]
        if not any(x.returncode in (-signal.SIGINT, -signal.SIGTERM) for x in ended):
            raise
    return compile_kernel()


def alignment(*tensors: Layout) -> int:
    """Return the largest of 8, 4, 2, 1 that divides all strides but the last dim's, so that rows load in wide words."""
    if not all(x.aligned for x in tensors):
        return 1
    return math.gcd(8, *(stride for x in tensors for stride in x.strides[:-1]))
