"""Caches index tables: built once for each device, whatever is going on when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

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

    return cast(Callable[P, R], build_apart)
