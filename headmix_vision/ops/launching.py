"""Launches Triton kernels with as little Python as possible: what follows from layouts is found once, and kept.

A small GPU program takes less time than the Python before it: choosing tiles, writing down strides, and above all
Triton's own search for the kernel that it compiled for these arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from headmix_vision.ops.assembler import right_assembler
from headmix_vision.ops.cached_tables import keep_for_graphs
from headmix_vision.ops.kernels import INTERPRETED, Gpu, gpu_behind

R = TypeVar("R")
_MOST_PLANS = 512
_plans: list[Any] = []


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
    return Layout(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)


def planned(plan: Callable[..., R]) -> Callable[..., R]:
    """Cache what a function of layouts and other hashable arguments makes of them."""
    cached = lru_cache(maxsize=_MOST_PLANS)(plan)
    _plans.append(cached)
    return cached


def forget_plans() -> None:
    """Empty the caches of all planned functions, which do not see that a constant of a module is another one."""
    for plan in _plans:
        plan.cache_clear()


class KernelFailed(RuntimeError):
    """A kernel does not compile, or cannot be loaded; the message says which, where and why in one line."""


INDEX_TYPES = (torch.int32, torch.int64)  # of tables
# Of the compiler, for all kernels: contract a * b + c, which Triton 3.10 stops doing by itself.
OPTIONS = {"enable_fp_fusion": True}


class Launch:
    """A kernel with all of its arguments but the tensors, which are the first, and always of the same types.

    Args:
        kernel: a function of ``triton.jit``.
        grid: how many programs.
        numbers: arguments after the tensors.
        constants: the rest by name, and options of the compiler.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: Sequence[float], constants: Mapping[str, Any]):
        self.kernel, self.numbers, self.constants = kernel, tuple(numbers), dict(constants)
        self.grid = (*grid, 1, 1)[:3]
        self._compiled: dict[tuple[bool | None, ...], Any] = {}
        if torch.version.hip is not None:
            self.constants.pop("maxnreg", None)  # AMD's compiler takes no number of registers
        self._rest = (*self.numbers, *(constants[name] for name in kernel.arg_names if name in constants))

    def __call__(self, *tensors: Tensor | None) -> None:
        # Triton compiles for types, for numbers that are 1 or multiples of 16, and for addresses that are.
        aligned = tuple([None if x is None else x.data_ptr() % 16 == 0 for x in tensors])
        compiled = self._compiled.get(aligned)
        if compiled is not None:
            compiled[self.grid](*tensors, *self._rest)
        else:
            self._compiled[aligned] = self._compile_and_run(
                tensors
            )  # None from the interpreter, which compiles nothing
        if tensors[0] is not None and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            keep_for_graphs(x for x in tensors if x is not None and x.dtype in INDEX_TYPES)

    def _compile_and_run(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Launch the kernel by Triton's own way, and return what it compiled.

        Raises:
            KernelFailed: with the reason.
        """
        launch = self.kernel[self.grid]
        if INTERPRETED:
            return launch(*tensors, *self.numbers, **self.constants)
        device = next(x.device for x in tensors if x is not None)
        try:
            with right_assembler() if gpu_behind(device).capability == (9, 0) else nullcontext():
                return launch(*tensors, *self.numbers, **self.constants, **OPTIONS)
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
