"""Launches Triton kernels with as little Python as possible: what follows from layouts is found once, and kept.

A small GPU program takes less time than the Python before it: choosing tiles, writing down strides, and above all
Triton's own search for the kernel that it compiled for these arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from headmix_vision.ops.kernels import Gpu, gpu_behind

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
        self._rest = (*self.numbers, *(constants[name] for name in kernel.arg_names if name in constants))

    def __call__(self, *tensors: Tensor | None) -> None:
        # Triton compiles for types, for numbers that are 1 or multiples of 16, and for addresses that are.
        aligned = tuple([None if x is None else x.data_ptr() % 16 == 0 for x in tensors])
        compiled = self._compiled.get(aligned)
        if compiled is not None:
            compiled[self.grid](*tensors, *self._rest)
        else:  # the interpreter compiles nothing
            self._compiled[aligned] = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)


def alignment(*tensors: Layout) -> int:
    """Return the largest of 8, 4, 2, 1 that divides all strides but the last dim's, so that rows load in wide words."""
    if not all(x.aligned for x in tensors):
        return 1
    return math.gcd(8, *(stride for x in tensors for stride in x.strides[:-1]))
