"""Hold the tensors of a random case, in drawn memory layouts, and the functions that compare on them.

B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Problem(NamedTuple):
    """The tensors of a case and the functions that compare on them.

    Attributes:
        inputs: inputs by name.
        outputs: names of the outputs.
        gradients: output gradients.
        run: calls the op on the inputs with an implementation.
        expect: computes the same outputs from float64 inputs, independent of the kernels.
    """

    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    gradients: Sequence[Tensor]
    run: Callable[[Sequence[Tensor], str], Sequence[Tensor]]
    expect: Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Numbers:
    """The tensors of one case, the same on every device.

    Args:
        seed: seed of all numbers.
        dtype: type of the inputs.
        device: where tensors are placed.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def weight(self, x: Tensor, kind: str) -> Tensor:
        """Place a tensor on the device, in float32 or, with kind "input", in the type of the inputs."""
        return x.to(self.device, self.dtype if kind == "input" else torch.float32)

    def inputs(self, layout: str, *tensors: Tensor) -> list[Tensor]:
        """Place tensors [B, N, ...] on the device, in the type of the inputs and a memory layout of `LAYOUTS`.

        Memory between and around the numbers of strided and surrounded tensors is NaN.
        """
        placed = [x.to(self.device, self.dtype) for x in tensors]
        if layout == "packed":
            return _pack(placed)
        return [_lay_out(x, layout) for x in placed]

    def gradient(self, layout: str, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw an output gradient; an expanded one is the gradient of a sum."""
        if layout == "expanded":
            return torch.full((), scale, device=self.device, dtype=self.dtype).expand(shape)
        return self.inputs(layout, scale * self.normal(*shape))[0]


def _pack(tensors: list[Tensor]) -> list[Tensor]:
    """Make tensors views of one: of [B, N, 3, ...] where their shapes agree, else of joined last dims."""
    if len({x.shape for x in tensors}) > 1:
        return list(torch.cat(tensors, -1).split([x.shape[-1] for x in tensors], -1))
    others = max(0, 3 - len(tensors))
    return list(torch.stack([*tensors, *[tensors[0]] * others], 2).unbind(2))[: len(tensors)]


def _lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "head_major":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "surrounded":
        around = F.pad(x, (3, 5, *(1, 2) * (x.ndim - 1)), value=torch.nan)
        return around[(*[slice(1, -2)] * (x.ndim - 1), slice(3, -5))]
    return x
