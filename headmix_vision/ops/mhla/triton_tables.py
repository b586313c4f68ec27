"""Index tables of the kernels in compiled graphs, which launch them themselves.

A graph takes all tables of a call as one tensor, which does not move. H heads, M blocks, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops.dispatch import NotRecorded, way_in_graphs
from headmix_vision.ops.hardware import constant_in_graphs
from headmix_vision.ops.mhla import triton_pairwise as pairwise
from headmix_vision.ops.mhla import triton_summary as summary
from headmix_vision.ops.mhla.hopper import launch as hopper
from headmix_vision.ops.mhla.torch_impl import Settings, unpack_cached
from headmix_vision.ops.mhla.triton_launch import parts
from headmix_vision.ops.runtime import Layout, cached_tables, recorded
from headmix_vision.ops.symbolic_sizes import is_symbolic

_TABLES = ModuleType("tables")  # of graphs: torch.compile reads an attribute of a module when it comes to it


def tables_of_graph(q: Tensor, value_dim: int, packed: Sequence[int]) -> Tensor | None:
    """Return the index tables that a graph needs to launch the kernels itself; None where it calls the op.

    Args:
        q: queries or keys of a call, of which all but the numbers is read.
        value_dim: head dim of its values.
        packed: its settings.
    """
    if any(map(is_symbolic, packed)):  # a graph for grids of all sizes
        return None
    name = _name_tables(tuple(packed), q.shape[2], q.shape[3], value_dim, q.dtype, q.device)
    return None if name is None else getattr(_TABLES, name)


@constant_in_graphs
def _name_tables(packed: tuple[int, ...], *kind: Any) -> str | None:
    """Put the tables of a graph into ``_TABLES``, and return their name."""
    if way_in_graphs() == "auto" and _is_for_hopper(packed, *kind):
        return None
    tables = joined_tables(packed, *kind)
    name = f"tables_{id(tables)}"  # which keeps them
    setattr(_TABLES, name, tables)
    torch._dynamo.mark_static_address(tables, guard=False)
    return name


def _rows(call: Settings, H: int, D: int, dtype: torch.dtype, device: torch.device) -> Layout:
    """Describe packed queries, keys or values of one image."""
    N = call.blocks.num_tokens
    return Layout(torch.Size((1, N, H, D)), (N * H * D, H * D, D, 1), dtype, device, True)


def _is_for_hopper(packed: tuple[int, ...], H: int, D: int, Dv: int, dtype: torch.dtype, device: torch.device) -> bool:
    call = unpack_cached(packed)
    q, v = _rows(call, H, D, dtype, device), _rows(call, H, Dv, dtype, device)
    return call.regime == "pairwise" and hopper.takes_forward(q, q, v, call)


@lru_cache(maxsize=256)
def _index_tables(
    packed: tuple[int, ...], H: int, D: int, Dv: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """List the index tables that the portable kernels of both passes take."""
    call = unpack_cached(packed)
    M, pack = call.blocks.num_blocks, 1
    q, v = _rows(call, H, D, dtype, device), _rows(call, H, Dv, dtype, device)
    mixing = Layout(torch.Size((M, M)), (M, 1), torch.float32, device, True)
    tables: list[Tensor] = []
    with recorded({}):  # the plans of graphs, which have no Gluon kernels
        if call.regime == "pairwise":
            tables.append(pairwise._pairwise_forward(q, q, v, mixing, call).table)
            for_query = pairwise._pairwise_backward_query(q, q, v, v, v, mixing, pack, call)
            for plan in (for_query, pairwise._pairwise_backward_key(q, q, v, v, mixing, pack, call)):
                tables += plan.places[:2]
        elif call.causal:
            tables.append(parts(call.blocks, summary.parts_of_a_block(call), device))
        else:
            of_forward = summary._summarize(q, v, call), summary._apply(q, v, call)
            of_backward = summary._backward_query(q, v, pack, call), summary._backward_key(q, v, pack, call)
            tables += (plan.table for plan in (*of_forward, *of_backward))
    return tuple({id(table): table for table in tables}.values())


@cached_tables
def joined_tables(packed: tuple[int, ...], *kind: Any) -> Tensor:
    """Join all index tables: int32 [numbers]."""
    return torch.cat([table.flatten() for table in _index_tables(packed, *kind)])


def traced_tables(joined: Tensor | None, q: Tensor, value_dim: int, settings: Sequence[int]) -> dict[int, Tensor]:
    """Return the traced tensor for each index table.

    They are copies: PyTorch takes a table for an output where a token from it makes the address of one.
    """
    if joined is None:
        raise NotRecorded
    tables = _index_tables(tuple(settings), q.shape[2], q.shape[3], value_dim, q.dtype, q.device)
    traced = joined.split([table.numel() for table in tables])
    return {id(table): x.clone().view(table.shape) for table, x in zip(tables, traced, strict=True)}
