"""Name of Gluon that differ between releases of Triton, under one spelling; the kernels take them from here.

Gluon is not a public interface of Triton yet. Triton 3.5 and 3.6 call the barrier ``thread_barrier``; 3.8 renamed the
asynchronous copy to ``async_load``, and lets ``reinterpret`` keep the size of the memory only; 3.9 made it public.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import async_copy


def _first(owner: object, *names: str) -> object:
    """Return the first of the names that this release has; ImportError leaves the kernels out."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise ImportError(f"Gluon has none of {names}")


barrier = _first(gl, "barrier", "thread_barrier")
async_load = _first(async_copy, "async_load", "async_copy_global_to_shared")
reinterpret = _first(shared_memory_descriptor, "reinterpret", "_reinterpret")


@gluon.jit
def first_tile(memory, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """View the start of one array [1, rows, columns] of bf16 as a tile [ROWS, COLUMNS], which divides it."""
    TILES: gl.constexpr = memory.shape[1] * memory.shape[2] // (ROWS * COLUMNS)
    return reinterpret(memory, gl.bfloat16, [TILES, ROWS, COLUMNS], LAYOUT).index(0)
