"""The base class of head mixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch.fx
from torch import Tensor, nn

from headmix_vision.errors import check_choice
from headmix_vision.layers.cores.base import LayerSpec
from headmix_vision.ops import TokenGrid
from headmix_vision.ops.mix_heads.api import IMPL_NAMES, bind_mix_heads
from headmix_vision.registry import Registry


class HeadMix(nn.Module):
    """Mix information across feature heads, on both sides of the core.

    A mix is built from the :class:`LayerSpec` of its layer, the ``impl`` of :func:`headmix_vision.ops.mix_heads` and
    options of its own. It overrides what it changes of ``before``, ``after`` and ``fold``; this base class changes
    nothing. The layer calls the mix itself, with the name of one of them and its arguments, since offloading, sharding
    and hooks act on the call of a module.

    Shape:
        ``before(q, k, v)``: the projected q [B, N, Hq, D], k [B, N, Hk, D], v [B, N, Hv, D] with the numbers of heads
        that ``projected_heads`` names -> what the core gets, [B, N * repeats, core_heads, D] each, pseudo-tokens of a
        token one after the other.
        ``after(out)``: the core's output [B, N * repeats, core_heads, D] -> [B, N, H, D].

    Attributes:
        layer_options: options of the layer that models of this mix have on unless told otherwise.
        projected_heads: heads that the projections of q, k and v make.
        core_heads: heads of the core.
        repeats: pseudo-tokens of a token in the core.
        joins_heads: ``after`` adds up outputs of several heads of the core; taken for true where it is overridden.
        folds: the layer takes the weights of its projection from ``fold`` and leaves ``before`` out; not where a norm
            stands between the two, or the projection has an adapter or a hook.
    """

    layer_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, spec: LayerSpec, impl: str = "auto") -> None:
        super().__init__()
        check_choice("impl", impl, IMPL_NAMES)
        self.impl = impl
        self.projected_heads: tuple[int, int, int] = (spec.num_heads,) * 3
        self.core_heads, self.head_dim = spec.num_heads, spec.head_dim
        self.repeats = 1
        self.joins_heads = type(self).after is not HeadMix.after
        self.folds = False

    def forward(self, side: Literal["before", "fold", "after"], *tensors: Tensor | None) -> Any:
        """Run one side of the mix: the method of this name."""
        return getattr(self, side)(*tensors)

    def before(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn projected heads into heads of the core."""
        return q, k, v

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the weight [3 * H * D, C] and bias of a projection that makes what ``before`` makes of this one's."""
        raise NotImplementedError

    def after(self, out: Tensor) -> Tensor:
        """Turn the core's heads into heads of the layer."""
        return out

    def mixed(self, inputs: tuple[Tensor, ...], weights: Tensor) -> tuple[Tensor, ...]:
        """Mix the heads of C tensors [B, N, H, D] by weights [C, G, H] in one call of the op: C of [B, N, G, D]."""
        return _mix_heads(inputs, weights, self.impl)

    def flops(self, grid: TokenGrid) -> int:
        """Return the operations of both sides for one image, whose tokens are not repeated, multiply and add as two."""
        return 0

    def core_spec(self, spec: LayerSpec) -> LayerSpec:
        """Return the sizes that the core is built for, given the layer's sizes."""
        return replace(spec, num_heads=self.core_heads, grid=spec.grid.repeat(self.repeats))


HEAD_MIXES: Registry[type[HeadMix]] = Registry()


@torch.fx.wrap  # torch.fx records the call whole: the checks inside need real arguments
def _mix_heads(inputs: tuple[Tensor, ...], weights: Tensor, impl: str) -> tuple[Tensor, ...]:
    mixed: tuple[Tensor, ...] = bind_mix_heads(impl)(*inputs, weights)
    return mixed
