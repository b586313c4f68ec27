"""Chooses the assembler (ptxas) of kernels for Hopper: releases before 12.9 make wrong machine code there.

A product of Hopper (``wgmma``, in machine code HGMMA) finds its right factor by a descriptor: the address in shared
memory, and the swizzle of the rows. Where factors of two swizzles lie at one address one after the other, as the parts
of 64 and of 32 columns of a head of 96 dims do, ptxas 12.8 computes the later descriptors of the second from uniform
registers that it never writes. Sums are then wrong, do not repeat, or end in an illegal address.
``benchmarks/machine_code.py`` finds such code. Triton 3.6 and 3.7 assemble for Hopper with 12.8, and bring a newer
release for Blackwell: kernels for Hopper take that one.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

FIRST_RIGHT = (12, 9)
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


def _driver_major() -> int:
    """Return the major CUDA release of the driver, which does not load machine code of a later one."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:  # there is none: nothing is run here
        return 99
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
