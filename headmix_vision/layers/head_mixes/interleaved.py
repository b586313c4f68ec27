"""Interleaved head attention: learned mixtures of all heads stand beside each token as further tokens.

B batch, N tokens, H heads, D head dim, P pseudo-heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headmix_vision.errors import check_choice, check_counts
from headmix_vision.layers.cores.base import LayerSpec
from headmix_vision.layers.head_mixes.base import HEAD_MIXES, HeadMix
from headmix_vision.ops import TokenGrid

COLLAPSES = ("per_head", "across_heads")
SPREAD = 0.5  # of the pseudo-heads about the head that they start from, relative to it


@HEAD_MIXES.register("iha")
class InterleavedHeads(HeadMix):
    """Interleaved head attention, IHA (arXiv 2602.21371).

    Pseudo-head p of head h is a learned mixture of all H heads, for queries, keys and values each. The P pseudo-heads
    of a token become P pseudo-tokens of the core, one after the other, so that every query of a head sees all
    pseudo-keys of every token in one attention. The core's P outputs for a token are then collapsed to one. This costs
    a softmax core P * P times its attention, a linear one P times.

    The layer starts as its core alone, with pseudo-heads that differ: copies which are alike in everything would get
    equal gradients and stay copies. Of the queries the first reads for the token and the others, perturbed, wait for a
    collapse that is not zero. Keys are copies, and the values, perturbed, average to the head's own. Over a core that
    does not average pseudo-tokens, as only the first writes, the first key and value are the head's own, the others
    perturbed.

    Args:
        spec: sizes of the layer.
        pseudo_heads: P, at least 1.
        collapse: ``"per_head"``, a weight for each head and pseudo-head, or ``"across_heads"``, each head from the
            pseudo-heads of all.
        impl: of :func:`headmix_vision.ops.mix_heads`.

    Attributes:
        mix: [3, P, H, H]: pseudo-head p of head h of the queries, keys and values is the sum of ``mix[:, p, h, m]``
            times head m (the paper's alpha).
        collapse: [H, P], or [H, P, H] across heads (the paper's R).

    Raises:
        InputError: if ``pseudo_heads`` is not a whole number of at least 1, or an option is unknown.
    """

    undecayed = ("mix", "collapse")  # weight decay would pull the pseudo-heads towards zero, and with them the core

    def __init__(
        self, spec: LayerSpec, *, pseudo_heads: int = 2, collapse: str = "per_head", impl: str = "auto"
    ) -> None:
        super().__init__(spec, impl)
        check_counts(1, pseudo_heads=pseudo_heads)
        check_choice("collapse", collapse, COLLAPSES)
        heads = spec.num_heads
        self.repeats, self.averages_places = int(pseudo_heads), spec.averages_places
        self.mix = nn.Parameter(torch.empty(3, pseudo_heads, heads, heads, **spec.factory))
        self.per_head = collapse == "per_head"
        self.joins_heads = not self.per_head
        shape = (heads, pseudo_heads) if self.per_head else (heads, pseudo_heads, heads)
        self.collapse = nn.Parameter(torch.empty(shape, **spec.factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set weights with which the layer computes what its core computes alone."""
        heads = self.core_heads
        queries, keys, values = self.mix.zero_()
        for perturbed in (queries, values) if self.averages_places else (queries, values, keys):
            perturbed.normal_(std=SPREAD * heads**-0.5)
            perturbed.sub_(perturbed.mean(0) if perturbed is values and self.averages_places else perturbed[0].clone())
        self.mix.diagonal(dim1=-2, dim2=-1).add_(1)
        self.collapse.zero_()
        first = self.collapse.select(1, 0)
        (first if self.per_head else first.diagonal()).fill_(1)

    def before(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.mixed((q, k, v), self.mix.flatten(1, 2))
        places = (-1, self.repeats * q.shape[1], self.core_heads, q.shape[3])
        return q.view(places), k.view(places), v.view(places)

    def after(self, out: Tensor) -> Tensor:
        weight = self.collapse.mT.diag_embed().transpose(0, 1) if self.per_head else self.collapse
        heads = out.unflatten(1, (-1, self.repeats)).flatten(2, 3)  # [B, N, P * H, D]
        return self.mixed((heads,), weight.flatten(1)[None])[0]

    def flops(self, grid: TokenGrid) -> int:
        heads, mixed = self.core_heads, self.repeats * self.core_heads
        sources = 3 * heads + (1 if self.per_head else heads)  # of a pseudo-head, and of its part of a head
        return 2 * grid.num_tokens * self.head_dim * mixed * sources

    def extra_repr(self) -> str:
        return f"pseudo_heads={self.repeats}, collapse={COLLAPSES[not self.per_head]}, impl={self.impl}"
