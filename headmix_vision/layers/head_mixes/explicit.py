"""Multi-head explicit attention: heads of keys and values composed from component heads.

B batch, N tokens, H heads, D head dim, h' component heads, g key-value heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.fx
from torch import Tensor, nn

from headmix_vision.checks import check_counts
from headmix_vision.errors import InputError
from headmix_vision.layers.head_mixes.base import HEAD_MIXES, HeadMix
from headmix_vision.layers.spec import LayerSpec
from headmix_vision.ops import TokenGrid
from headmix_vision.ops.precision import autocast_off


@HEAD_MIXES.register("mea")
class ExplicitHeads(HeadMix):
    """Multi-head explicit attention, MEA (arXiv 2601.19611): head-level linear composition of keys and values.

    Each head's keys and values are learned compositions of those of h' component heads, to which the projections of
    keys and values shrink. With as many components as heads the weights of the projections are composed instead, which
    is the same and costs next to nothing (unless ``impl`` is named, or a norm stands between the two). An RMSNorm of
    each head follows the core (the layer's ``output_norm``, on by default in models of this mix): without it the
    composition is a part of the projections, and the layer is its core alone.

    Args:
        spec: sizes of the layer.
        component_heads: h', from 1 to g; g by default. With h' = g the composition starts as the identity, with fewer
            as grouped queries: head i takes component ``i * h' // g``.
        key_value_heads: g, a divisor of H; H by default. Each is shared by H / g queries, as in the paper.
        impl: of :func:`headmix_vision.ops.mix_heads`.

    Attributes:
        mix: [2, g, h'], the composition of keys and of values (the paper's W).

    Raises:
        InputError: if g does not divide H, h' is not from 1 to g, or an option is unknown.
    """

    undecayed = ("mix",)  # weight decay would pull the heads towards zero for no reason
    layer_options: ClassVar[dict[str, Any]] = {"output_norm": True}

    def __init__(
        self,
        spec: LayerSpec,
        *,
        component_heads: int | None = None,
        key_value_heads: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__(spec, impl)
        composed = spec.num_heads if key_value_heads is None else key_value_heads
        components = composed if component_heads is None else component_heads
        check_counts(1, key_value_heads=composed, component_heads=components)
        if spec.num_heads % composed:
            raise InputError(f"key_value_heads={composed} does not divide the {spec.num_heads} heads of the layer.")
        if components > composed:
            raise InputError(f"component_heads must be from 1 to {composed}, the heads composed, got {components}.")
        self.projected_heads = (spec.num_heads, components, components)
        self.folds = components == spec.num_heads and impl == "auto"
        self.queries_per_head = spec.num_heads // composed
        self.mix = nn.Parameter(torch.empty(2, composed, components, **spec.factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Let each head be one component: itself, or that of its group where components are fewer."""
        _, composed, components = self.mix.shape
        component = torch.arange(composed, device=self.mix.device) * components // composed
        self.mix.copy_(nn.functional.one_hot(component, components))

    def before(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Heads that share a composition are written by the mix itself: every core then has as many keys as queries.
        weight = self.mix.repeat_interleave(self.queries_per_head, 1) if self.queries_per_head > 1 else self.mix
        k, v = self.mixed((k, v), weight)
        return q, k, v

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        composed = _compose_rows(weight, self.mix, self.head_dim)
        return composed, None if bias is None else _compose_rows(bias, self.mix, self.head_dim)

    def flops(self, grid: TokenGrid) -> int:
        return 2 * grid.num_tokens * self.head_dim * self.core_heads * self.mix.shape[2] * len(self.mix)

    def extra_repr(self) -> str:
        return f"component_heads={self.mix.shape[2]}, key_value_heads={self.mix.shape[1]}, impl={self.impl}"


@torch.fx.wrap
def _compose_rows(weight: Tensor, mix: Tensor, head_dim: int) -> Tensor:
    """Compose the heads of keys and values in the rows of queries, keys and values: [3 * H * D, ...] -> the same."""
    with autocast_off(weight):
        heads = weight.view(3, mix.shape[1], head_dim, -1)
        # One product for each dim of a head: the gradient of the composition, H x H sums over D * C numbers, would
        # otherwise be a single product that occupies one multiprocessor.
        composed = (mix.unsqueeze(1) @ heads[1:].transpose(1, 2)).transpose(1, 2)
        return torch.cat([heads[:1], composed]).view(weight.shape)
