"""Multi-head explicit attention: heads of keys and values composed from component heads.

B batch, N tokens, H heads, D head dim, h' component heads, g key-value heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.fx
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_counts, check_flags
from headmix_vision.layers.cores.base import LayerSpec
from headmix_vision.layers.head_mixes.base import HEAD_MIXES, HeadMix
from headmix_vision.ops import TokenGrid
from headmix_vision.ops.numerics import autocast_off


@HEAD_MIXES.register("mea")
class ExplicitHeads(HeadMix):
    """Multi-head explicit attention, MEA (arXiv 2601.19611): head-level linear composition of keys and values.

    Each head's keys and values are learned compositions of those of h' component heads, to which the projections of
    keys and values shrink. An RMSNorm of each head follows the core (the layer's ``output_norm``, on by default in
    models of this mix): without it the composition is a part of the projections, and the layer is its core alone.

    Args:
        spec: sizes of the layer.
        component_heads: h', from 1 to g; g by default. With h' = g the composition starts as the identity, with fewer
            as grouped queries: head i takes component ``i * h' // g``.
        key_value_heads: g, a divisor of H; H by default. Each is shared by H / g queries, as in the paper.
        fold: compose the weights of the projections instead of keys and values, which is the same: for a few sums over
            weights the projections then make all heads. By default where h' = H, so that they do that anyway. Where
            queries and keys are normed before the composition, or the projection has an adapter or a hook, it stays
            with these.
        impl: of :func:`headmix_vision.ops.mix_heads`, for keys and values.

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
        fold: bool | None = None,
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
        if fold is not None:
            check_flags(fold=fold)
        self.folds = components == spec.num_heads if fold is None else fold
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
        k, v = self.mixed((k, v), self._mix_of_all())
        return q, k, v

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        mix = self._mix_of_all()
        composed = _compose_rows(weight, mix, self.head_dim)
        return composed, None if bias is None else _compose_rows(bias, mix, self.head_dim)

    def _mix_of_all(self) -> Tensor:
        """Return the composition of all heads, [2, H, h']: every core then has as many keys as queries."""
        return self.mix.repeat_interleave(self.queries_per_head, 1) if self.queries_per_head > 1 else self.mix

    def flops(self, grid: TokenGrid) -> int:
        return 2 * grid.num_tokens * self.head_dim * self.core_heads * self.mix.shape[2] * len(self.mix)

    def extra_repr(self) -> str:
        return f"component_heads={self.mix.shape[2]}, key_value_heads={self.mix.shape[1]}, impl={self.impl}"


@torch.fx.wrap
def _compose_rows(weight: Tensor, mix: Tensor, head_dim: int) -> Tensor:
    """Compose the heads of keys and values in the rows of projections: [(H + 2 * h') * D, ...] -> [3 * H * D, ...]."""
    with autocast_off(weight):
        _, heads, components = mix.shape
        q, k_v = weight.split([heads * head_dim, 2 * components * head_dim])
        k_v = k_v.view(2, components, head_dim, -1).transpose(1, 2)
        # One product for each dim of a head: the gradient of the composition, H x h' sums over D * C numbers, would
        # otherwise be a single product that occupies one multiprocessor.
        k_v = (mix.to(weight.dtype).unsqueeze(1) @ k_v).transpose(1, 2)
        return torch.cat([q, k_v.reshape(2 * heads * head_dim, *weight.shape[1:])])
