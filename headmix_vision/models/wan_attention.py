"""Self-attention of a converted Wan: rotary positions of the call, processors of MHLA and softmax, states of streams.

B batch, N = T * H * W tokens, C width, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers.cores.mhla import bind_mhla_core, stream_rows
from headmix_vision.models.converted import new_mixing
from headmix_vision.ops import MHLAState, TokenGrid, TokenRanks
from headmix_vision.ops.dispatch import Bound

_OPEN_GATE = 1.2784645427610738  # SiLU of this is 1


class WanState(NamedTuple):
    """State of a causal model after the first frames of a clip, of the same size for any number of them.

    Attributes:
        frames: tokens along time taken.
        size: tokens along height and width.
        layers: states of the layers, see :class:`~headmix_vision.ops.MHLAState`.
    """

    frames: int
    size: tuple[int, ...]
    layers: tuple[tuple[MHLAState, ...], ...]


class WanStream(NamedTuple):
    """Tokens along time before the frames of a call, the layers' states before them, and, to be filled, after them."""

    frames: int
    before: Sequence[tuple[MHLAState, ...] | None]
    after: list[tuple[MHLAState, ...]]


class GridRotary(nn.Module):
    """Rotary tables of the call, cos and sin [1, N, 1, D], beside a tensor of the shape of its token grid (T, H, W).

    The grid is a tensor without memory of its own, as hooks of diffusers pass on tensors alone.
    """

    ranks: TokenRanks | None = None  # under context parallelism that takes equal parts
    stream: WanStream | None = None  # while frames are drawn on those before them

    def __init__(self, rotary: Any, patch_size: tuple[int, int, int]) -> None:
        super().__init__()
        self.rotary, self.patch_size = rotary, tuple(patch_size)

    def forward(self, hidden_states: Tensor) -> tuple[Any, ...]:
        grid = tuple(size // patch for size, patch in zip(hidden_states.shape[2:], self.patch_size, strict=True))
        tokens = math.prod(grid)
        if self.ranks is not None and tokens % self.ranks.size:
            raise InputError(
                f"{tokens} tokens of a {'x'.join(map(str, grid))} grid are no multiple of {self.ranks.size} ranks:"
                " choose another size, or ContextParallelConfig(..., ulysses_anything=True)."
            )
        if self.stream is None:
            cos, sin = self.rotary(hidden_states)
            return cos, sin, cos.new_empty(()).expand(grid)
        cos, sin = (self._from_frame(table, grid, self.stream.frames) for table in self._tables)
        return cos, sin, cos.new_empty(()).expand(grid), self.stream

    @property
    def _tables(self) -> tuple[Tensor, Tensor]:
        return self.rotary.freqs_cos, self.rotary.freqs_sin

    def _from_frame(self, table: Tensor, grid: tuple[int, ...], first: int) -> Tensor:
        """Return the table [1, N, 1, D] of tokens whose first frame has a number."""
        if first + grid[0] > len(table):
            raise InputError(f"the model has rotary positions of {len(table)} frames, got frame {first + grid[0]}.")
        parts = table.split([self.rotary.t_dim, self.rotary.h_dim, self.rotary.w_dim], dim=1)
        t, h, w = (part[at : at + size] for part, at, size in zip(parts, (first, 0, 0), grid, strict=True))
        axes = (t[:, None, None], h[None, :, None], w[None, None])
        return torch.cat([axis.expand(*grid, -1) for axis in axes], -1).flatten(0, 2)[None, :, None]


class WanSoftmaxProcessor(WanAttnProcessor):
    """Self-attention of diffusers, for the layers that keep it."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb[:2])


class WanMHLAProcessor(nn.Module):
    """MHLA (arXiv 2601.07832) from the projections and norms of a Wan self-attention layer.

    Features are ReLU + eps of the normed queries and keys, rotated by Wan's rotary positions in the numerator alone;
    each head's output has an RMSNorm of its own and, if there is a gate, is multiplied by SiLU of a projection of the
    layer's input.

    Args:
        attn: the layer. New weights take its device and type; mixing weights are float32 at least.
        config: of the model, see ``WanMHLATransformer3DModel``. Features and norm take its ``eps``.

    Shape:
        ``hidden_states`` [B, N, C] -> [B, N, C]; ``rotary_emb`` as from :class:`GridRotary`. Under context parallelism
        N and the rotary tables are of this rank's tokens, the grid is the full grid.
    """

    ranks: TokenRanks | None = None

    def __init__(self, attn: Any, config: Any) -> None:
        super().__init__()
        like, dim = attn.to_out[0].weight, attn.inner_dim
        factory = {"device": like.device, "dtype": like.dtype}
        self.normalizer, self.eps, self.causal = config.normalizer, config.eps, config.causal
        grids = tuple(config.block_grid), tuple(config.token_grid)
        self.mixing = new_mixing(*grids, "locality", like, config.clip_mixing)
        self.norm = nn.RMSNorm(dim // attn.heads, eps=config.eps, **factory)
        self.gate = nn.Linear(dim, dim, **factory) if config.output_gate else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, _OPEN_GATE)

    @property
    def _options(self) -> dict[str, Any]:
        return {"normalizer": self.normalizer, "eps": self.eps, "feature_map": "relu"}

    def bind(self, grid: TokenGrid) -> Bound:
        """Bind the op to the blocks of a token grid; InputError if the blocks do not fit it."""
        blocks = self.mixing.blocks
        row = blocks.grid.shape[0] // blocks.block_grid[0] if self.causal else None
        return bind_mhla_core(grid, self.ranks, blocks.block_grid, row, impl="auto", **self._options)

    def forward(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        assert encoder_hidden_states is None and attention_mask is None, "self-attention without a mask alone"
        cos, sin, grid, *stream = rotary_emb
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in (attn.norm_q(q), attn.norm_k(k), v))
        places = TokenGrid(tuple(grid.shape))
        sums = v.float() if v.dtype == torch.float16 else v  # over a clip's tokens they pass the range of float16
        rotation = cos[0, :, 0, ::2], sin[0, :, 0, ::2]  # diffusers holds each angle twice
        if stream:
            before = stream[0].before[len(stream[0].after)]
            out, after = stream_rows(q, k, sums, places, before, rotation, self.mixing, self._options)
            stream[0].after.append(after)
        else:
            out = self.bind(places)(q, k, sums, self.mixing(), *rotation)
        # sums that nothing divides are normed before they are rounded to float16
        out = F.rms_norm(out, self.norm.normalized_shape, self.norm.weight.type_as(out), self.eps).type_as(v).flatten(2)
        if self.gate is not None:
            out = out * F.silu(self.gate(hidden_states))
        return attn.to_out[1](attn.to_out[0](out))
