"""The frame of gathers whose adjoints are gathers too: autograd's own adjoint of indexing is a scatter-add.

That is slow on a CPU and unordered on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class IndexMap(torch.autograd.Function):
    """A linear map of a tensor by index tables, which torch.func can batch; a subclass has its forward and backward."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])


def with_tangents(index_map: type[IndexMap]) -> type[IndexMap]:
    """Return the map with its derivative in forward mode, which torch.compile cannot trace: the map itself."""

    class WithTangents(index_map):  # type: ignore[valid-type, misc]
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs[1:])
            ctx.save_for_forward(*inputs[1:])

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
            return WithTangents.apply(tangents[0], *ctx.saved_tensors)

    return WithTangents
