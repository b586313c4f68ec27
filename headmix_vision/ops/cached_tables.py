"""Caches index tables: built once for each device, whatever is going on when they are first asked for.

A captured CUDA graph keeps the addresses of the tables that it reads: those are never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

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
