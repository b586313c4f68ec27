"""Head-in-Head as an attention core: scans over the token grid with a memory whose sub-heads correct each other.

B batch, N tokens, C width, H heads, D = C / H head dim, r sub-heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers.cores.base import AttentionCore, refuse_masks
from headmix_vision.layers.grid_convolution import GridConvolution
from headmix_vision.layers.sub_head_mask import SubHeadMask
from headmix_vision.ops import TokenScan, head_in_head

# (order, reverse) of each scan; their outputs are summed.
SCANS = {
    "forward": (("row_major", False),),
    "bidirectional": (("row_major", False), ("row_major", True)),
    "cross": (("row_major", False), ("row_major", True), ("column_major", False), ("column_major", True)),
}
MASKS = ("static", "token")

torch.fx.wrap("refuse_masks")  # recorded whole, as the sum of scans below: checks need real arguments


class HeadInHeadCore(AttentionCore):
    """The masked delta rule of Head-in-Head, scanned over the token grid.

    Queries, keys and values pass a short depthwise convolution on the grid and SiLU, queries and keys are normalised to
    norm 1. The strength of a write is beta_max * sigmoid(linear(x)), the decay before it
    exp(-exp(A_log) softplus(linear(x) + dt_bias)).
    Scans share all weights; prefix tokens are read after the grid in a scan and before it in its reverse.

    Args:
        dim: width C of the layer; D = C / H.
        num_sub_heads: r, a divisor of D.
        mask: ``"static"``, a parameter for each head, or ``"token"``, a projection of each token.
        scans: ``"bidirectional"`` (rows and their reverse), ``"cross"`` (columns and their reverse too) or
            ``"forward"`` (rows alone: a token does not see those after it).
        beta_max: upper bound of the strengths, above 0 and at most 2, up to which the transition is a contraction. An
            erasure is of trace beta at most: 1 replaces what one key holds, 2 what the keys of two sub-heads hold.
        conv_size: odd extent of the convolution along each axis; 0 leaves it out. Prefix tokens pass it unchanged.
        impl: of :func:`headmix_vision.ops.head_in_head`.
        num_heads, grid, block_grid, num_prefix_tokens, attn_drop: as in :class:`AttentionCore`; blocks are not read.

    Raises:
        InputError: if the sub-heads do not divide the head dim, or an option is unknown.
    """

    reads_input = True

    def __init__(
        self,
        num_heads: int,
        grid: tuple[int, ...],
        block_grid: tuple[int, ...],
        num_prefix_tokens: int = 0,
        attn_drop: float = 0.0,
        *,
        dim: int,
        num_sub_heads: int = 4,
        mask: str = "static",
        scans: str = "bidirectional",
        conv_size: int = 3,
        beta_max: float = 1.0,
        impl: str = "auto",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, grid, block_grid, num_prefix_tokens, attn_drop)
        for name, value, allowed in (("mask", mask, MASKS), ("scans", scans, tuple(SCANS))):
            if value not in allowed:
                raise InputError(f"{name} must be one of {allowed}, got {value!r}.")
        if num_sub_heads < 1 or dim // num_heads % num_sub_heads:
            raise InputError(f"num_sub_heads={num_sub_heads} does not divide the head dim {dim // num_heads}.")
        if conv_size and (conv_size < 0 or conv_size % 2 == 0):
            raise InputError(f"conv_size must be odd, or 0 for none, got {conv_size}.")
        if not 0 < beta_max <= 2:
            raise InputError(f"beta_max must be above 0 and at most 2, got {beta_max}.")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.num_prefix_tokens, self.scans, self.beta_max, self.impl = num_prefix_tokens, scans, beta_max, impl
        self.conv: GridConvolution | None = None
        if conv_size:
            self.conv = GridConvolution(3 * dim, len(grid), conv_size, bias=False, device=device, dtype=dtype)
        self.mask = SubHeadMask(num_heads, num_sub_heads, dim if mask == "token" else None, device, dtype)
        self.beta = nn.Linear(dim, num_heads, device=device, dtype=dtype)
        self.decay = nn.Linear(dim, num_heads, bias=False, device=device, dtype=dtype)
        self.A_log = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates uniform in (0, 16), time steps log-uniform in [1e-3, 0.1]; the modules inside have drawn theirs."""
        self.A_log.uniform_(0, 16).clamp_(min=1e-3).log_()
        step = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: tuple[int, ...],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        x: Tensor | None = None,
    ) -> Tensor:
        refuse_masks(type(self).__name__, attn_mask, is_causal)
        assert x is not None
        if self.conv is not None:
            packed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1)
            q, k, v = self.conv(packed, grid, self.num_prefix_tokens).chunk(3, dim=-1)
            q, k, v = (y.unflatten(-1, (self.num_heads, self.head_dim)) for y in (q, k, v))
        v = F.silu(v)
        q, k = (F.normalize(F.silu(y), dim=-1, eps=1e-6).type_as(v) for y in (q, k))
        beta = self.beta_max * torch.sigmoid(self.beta(x))
        log_decay = -torch.exp(self.A_log) * F.softplus(self.decay(x) + self.dt_bias)
        return _sum_of_scans(
            q, k, v, beta, log_decay, self.mask(x), grid, self.num_prefix_tokens, self.scans, self.impl
        )

    def extra_repr(self) -> str:
        return f"scans={self.scans}, beta_max={self.beta_max}, impl={self.impl}"


@torch.fx.wrap
def _sum_of_scans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    mask: Tensor,
    grid: tuple[int, ...],
    num_prefix_tokens: int,
    scans: str,
    impl: str,
) -> Tensor:
    outputs = []
    for order, reverse in SCANS[scans]:
        scan = TokenScan.from_grid(grid, order, reverse, num_prefix_tokens)
        outputs.append(head_in_head(q, k, v, beta, log_decay, mask, scan=scan, impl=impl)[0])
    return sum(outputs[1:], outputs[0])
