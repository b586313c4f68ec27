"""Run Head-in-Head as an attention core: scan the token grid with a memory whose sub-heads correct each other.

B batch, N tokens, C width, H heads, D = C / H head dim, r sub-heads, P pseudo-tokens of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_choice, check_counts, check_numbers
from headmix_vision.layers.block_mixing import clip_keep_inward_gradient
from headmix_vision.layers.convolutions import GridConvolution
from headmix_vision.layers.cores.base import CORES, AttentionCore, LayerSpec
from headmix_vision.layers.positions import Rotation, rotate
from headmix_vision.ops import SampleGrids, TokenGrid, TokenScan
from headmix_vision.ops.dispatch import Bound, kept
from headmix_vision.ops.head_in_head.api import IMPL_NAMES, plan_head_in_head
from headmix_vision.ops.head_in_head.torch_impl import Inputs
from headmix_vision.ops.numerics import accumulation_dtype, autocast_off

torch.fx.wrap("clip_keep_inward_gradient")  # of the module that calls it

# (order, reverse) of each scan; their outputs are summed.
SCANS = {
    "forward": (("row_major", False),),
    "bidirectional": (("row_major", False), ("row_major", True)),
    "cross": (("row_major", False), ("row_major", True), ("column_major", False), ("column_major", True)),
}
MASKS = ("static", "token")


@CORES.register("hih")
class HeadInHeadCore(AttentionCore):
    """Scan the token grid by the masked delta rule of Head-in-Head.

    Queries, keys and values pass a short depthwise convolution on the grid and SiLU; queries and keys are then scaled
    to norm 1. The strength of a write is beta_max * sigmoid(linear(x)), the decay before it
    exp(-exp(A_log) softplus(linear(x) + dt_bias)).
    Scans share all weights; prefix tokens are read after the grid in a scan and before it in its reverse.

    With P pseudo-tokens of a token, these share its gates: the memory decays once, before the first of them, and
    pseudo-token p writes with a learned share in [0, 1] of the token's strength (``shares``, [H, P]). All scans read
    them in the same order. At the start the first one alone writes, so that each reads what a token without a mix
    does: a second write of the same key and value would change the memory.

    Args:
        spec: sizes of the layer; blocks are not read.
        num_sub_heads: r, a divisor of D.
        mask: ``"static"``, a parameter for each head, or ``"token"``, a projection of each token.
        scans: ``"bidirectional"`` (rows and their reverse), ``"cross"`` (columns and their reverse too) or
            ``"forward"`` (rows alone: a token does not see those after it).
        beta_max: upper bound of the strengths, above 0 and at most 2, up to which the transition is a contraction. An
            erasure is of trace beta at most: 1 replaces what one key holds, 2 what the keys of two sub-heads hold.
        conv_size: odd extent of the convolution along each axis; 0 leaves it out. Prefix tokens pass it unchanged.
        impl: of :func:`headmix_vision.ops.head_in_head`.

    Raises:
        InputError: if the sub-heads do not divide the head dim, or an option is unknown.
    """

    reads_input = True
    float32_parameters = True  # A_log and dt_bias, by whose exponentials a memory decays
    averages_places = False
    undecayed = ("shares",)
    layer_options: ClassVar[dict[str, Any]] = {"output_norm": True}

    def __init__(
        self,
        spec: LayerSpec,
        *,
        num_sub_heads: int = 4,
        mask: str = "static",
        scans: str = "bidirectional",
        conv_size: int = 3,
        beta_max: float = 1.0,
        impl: str = "auto",
    ) -> None:
        super().__init__(spec)
        check_choice("impl", impl, IMPL_NAMES)
        check_choice("mask", mask, MASKS)
        check_choice("scans", scans, tuple(SCANS))
        check_counts(1, num_sub_heads=num_sub_heads)
        check_counts(0, conv_size=conv_size)
        check_numbers(0, 2, beta_max=beta_max)
        if spec.head_dim % num_sub_heads:
            raise InputError(f"num_sub_heads={num_sub_heads} does not divide the head dim {spec.head_dim}.")
        if conv_size and conv_size % 2 == 0:
            raise InputError(f"conv_size must be odd, or 0 for none, got {conv_size}.")
        if beta_max == 0:
            raise InputError(f"beta_max must be above 0 and at most 2, got {beta_max}.")
        dim, heads, factory = spec.dim, spec.num_heads, spec.factory
        self.scans, self.beta_max, self.impl = scans, beta_max, impl
        self.conv: GridConvolution | None = None
        if conv_size:
            axes = len(spec.grid.shape)
            conv_impl = impl if impl in ("torch", "reference") else "auto"
            self.conv = GridConvolution(
                3 * heads * spec.head_dim, axes, conv_size, bias=False, silu=True, impl=conv_impl, **factory
            )
        self.mask = SubHeadMask(heads, num_sub_heads, dim if mask == "token" else None, **factory)
        self.beta = nn.Linear(dim, heads, **factory)
        self.decay = nn.Linear(dim, heads, bias=False, **factory)
        self.A_log = nn.Parameter(torch.empty(heads, **factory))
        self.dt_bias = nn.Parameter(torch.empty(heads, **factory))
        places = spec.grid.repeats
        self.shares = nn.Parameter(torch.empty(heads, places, **factory)) if places > 1 else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw rates uniform in (0, 16), time steps log-uniform in [1e-3, 0.1]; modules inside have drawn theirs."""
        self.A_log.uniform_(0, 16).clamp_(min=1e-3).log_()
        step = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        if self.shares is not None:
            self.shares.zero_()[:, 0] = 1

    def check_rotation(self) -> None:
        """Refuse rotary positions where a pair of channels would lie in two sub-heads, whose products would mix."""
        r = self.mask.num_sub_heads
        if self.head_dim // r % 2:
            raise InputError(f"rotary positions need sub-heads of even size, got {self.head_dim} / {r} channels.")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        *,
        x: Tensor,
        rotation: Rotation | None = None,
        key_mask: Tensor | None = None,
        sample_grids: SampleGrids | None = None,
    ) -> Tensor:
        scanned = self._scanned(q, k, v, grid, x, rotation, key_mask, sample_grids)
        return self._scan(grid, key_mask, sample_grids, *scanned)

    def _scan(
        self, grid: TokenGrid, key_mask: Tensor | None, sample_grids: SampleGrids | None, *scanned: Tensor
    ) -> Tensor:
        out: Tensor = (
            self.bind(grid)(*scanned) if sample_grids is None else self._scan_samples(grid, sample_grids, *scanned)
        )
        return out if key_mask is None else out.masked_fill(~key_mask[..., None, None], 0)

    def _scan_samples(self, grid: TokenGrid, sample_grids: SampleGrids, *scanned: Tensor) -> Tensor:
        """Sort the tokens of each sample for each order; steps of padding change no memory."""
        run = bind_scans(grid, "forward" if self.scans == "forward" else "bidirectional", self.impl)
        outputs = []
        for order in dict.fromkeys(order for order, _ in SCANS[self.scans]):
            layout = sample_grids.scan(order, grid.num_prefix_tokens, grid.repeats)
            if layout is None:
                outputs.append(run(*scanned))
            else:
                *tokens, mask = scanned
                moved = layout.spread(*tokens, *([mask] if self.mask.per_token else []))
                outputs += layout.collect(run(*moved, *([] if self.mask.per_token else [mask])))
        return sum(outputs[1:], outputs[0])

    def check_padding(self, sample_grids: SampleGrids | None) -> None:
        """Accept padding: its steps write nothing, and memories do not decay there."""

    def bind(self, grid: TokenGrid) -> Bound:
        """Return the call of queries, keys, values, strengths, decays and masks."""
        return bind_scans(grid, self.scans, self.impl)

    def linear_map(
        self, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid, **arguments: Any
    ) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        padding = arguments.get("key_mask"), arguments.get("sample_grids")
        q, k, v, *gates = self._scanned(q, k, v, grid, **arguments)
        return lambda values: self._scan(grid, *padding, q, k, values, *gates), v

    def _scanned(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        x: Tensor,
        rotation: Rotation | None = None,
        key_mask: Tensor | None = None,
        sample_grids: SampleGrids | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Make queries, keys, values, strengths, decays and masks of the scans."""
        if self.conv is not None:
            parts = [y.flatten(2) for y in (q, k, v)]
            if key_mask is None:
                parts = self.conv(parts, grid)
            else:
                parts = self.conv.of_padded(parts, grid, key_mask, sample_grids)
            q, k, v = [y.unflatten(-1, (-1, self.head_dim)) for y in parts]
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k = [F.normalize(y, dim=-1, eps=1e-6).type_as(v) for y in (q, k)]
        if rotation is not None:
            q, k = (rotate(y, rotation, grid).type_as(v) for y in (q, k))
        beta = self.beta_max * torch.sigmoid(self.beta(x))
        log_decay = -torch.exp(self.A_log) * F.softplus(self.decay(x) + self.dt_bias)
        mask = self.mask(x)
        if self.shares is not None:
            shares = clip_keep_inward_gradient(self.shares, 0.0, 1.0)
            beta = (beta.unsqueeze(2) * shares.mT).flatten(1, 2)
            log_decay = F.pad(log_decay.unsqueeze(2), (0, 0, 0, grid.repeats - 1)).flatten(1, 2)
            mask = mask.repeat_interleave(grid.repeats, 1) if self.mask.per_token else mask
        if key_mask is not None:
            beta, log_decay = (y.masked_fill(~key_mask[..., None], 0) for y in (beta, log_decay))
        return q, k, v, beta, log_decay, mask

    def flops(self, grid: TokenGrid) -> int:
        """Count the recurrence: r readings of errors, their rank-r correction and one reading for each place."""
        r, inner = self.mask.num_sub_heads, self.num_heads * self.head_dim
        scan = 2 * grid.num_tokens * inner * self.head_dim * (r + 2) * len(SCANS[self.scans])
        extent = self.conv.flops(grid) if self.conv is not None else 0
        gates = self.num_heads * (2 + (r * r if self.mask.per_token else 0))
        return scan + extent + 2 * grid.num_tokens // grid.repeats * self.dim * gates

    def extra_repr(self) -> str:
        return f"scans={self.scans}, beta_max={self.beta_max}, impl={self.impl}"


@kept
def bind_scans(grid: TokenGrid, scans: str, impl: str) -> Bound:
    """Bind the scans of a grid, whose outputs are summed."""
    orders = [TokenScan(grid, order, reverse) for order, reverse in SCANS[scans]]

    def plan(*tensors: Any) -> Callable[..., Tensor]:
        runs = [plan_head_in_head(Inputs._make((*tensors, None)), scan, impl) for scan in orders]

        def run(*tensors: Any) -> Tensor:
            inputs = Inputs._make((*tensors, None))
            outputs = [scan(inputs)[0] for scan in runs]
            return sum(outputs[1:], outputs[0])

        return run

    return Bound(plan)


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
