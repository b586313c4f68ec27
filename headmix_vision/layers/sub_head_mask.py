"""Compute the mask of Head-in-Head, which weighs what one sub-head remembers in the correction of another.

B batch, N tokens, C width, H heads, r sub-heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmix_vision.errors import check_counts
from headmix_vision.ops.runtime import accumulation_dtype, autocast_off


class SubHeadMask(nn.Module):
    """Compute r x r masks A Aᵀ; A holds the absolute weights, its rows scaled to norm 1.

    They are symmetric and positive semidefinite, with ones on the diagonal and entries in [0, 1], so that the
    transition of :func:`headmix_vision.ops.head_in_head` cannot grow the state. One sub-head has the mask 1 and no
    weights.

    Args:
        num_heads: H.
        num_sub_heads: r.
        dim: None for one mask per head, a parameter drawn uniformly around zero; the width C of the tokens for masks
            which are a linear projection of each token.

    Shape:
        ``x`` [B, N, C] -> [H, r, r], or [B, N, H, r, r] with ``dim``; in float32 or float64.

    Raises:
        InputError: if there is no sub-head.
    """

    undecayed = ("weight",)  # weight decay would pull weights towards zero for no reason
    ones: Tensor

    def __init__(
        self,
        num_heads: int,
        num_sub_heads: int,
        dim: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(1, num_sub_heads=num_sub_heads)
        self.num_heads, self.num_sub_heads = num_heads, num_sub_heads
        shape = (num_heads, num_sub_heads, num_sub_heads)
        self.proj: nn.Linear | None = None
        if num_sub_heads == 1:
            self.register_buffer("ones", torch.ones(shape, device=device, dtype=dtype), persistent=False)
        elif dim is None:
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.reset_parameters()
        else:
            self.proj = nn.Linear(dim, num_heads * num_sub_heads**2, bias=False, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.num_sub_heads == 1:
            self.ones.fill_(1)
        elif self.proj is None:
            bound = self.num_sub_heads**-0.5  # the bound of a linear map of r inputs; the rows are normalised anyway
            self.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        if self.num_sub_heads == 1:
            return self.ones
        if self.proj is None:
            return normalize_mask(self.weight)
        return normalize_mask(self.proj(x).unflatten(-1, (self.num_heads, self.num_sub_heads, self.num_sub_heads)))

    @property
    def per_token(self) -> bool:
        """Return whether each token has masks of its own."""
        return self.proj is not None

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_sub_heads={self.num_sub_heads}"


@torch.fx.wrap
def normalize_mask(weight: Tensor) -> Tensor:
    """Compute A Aᵀ, A = |weight| with rows of norm 1: [..., r, r] of any floating type -> float32 or float64."""
    with autocast_off(weight):
        rows = F.normalize(weight.to(accumulation_dtype(weight.dtype)).abs(), dim=-1)
        return rows @ rows.transpose(-1, -2)
