"""Parts of the diffusion transformer (DiT, arXiv 2212.09748): patches, embeddings, transformer block, last layer.

B batch, C latent channels, N tokens, D width, F frames of tokens with times of their own, 1 where they share one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from diffusers.models.embeddings import get_timestep_embedding
from timm.layers import Mlp
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers import HeadMixAttention
from headmix_vision.layers.convolutions import PatchConv2d, PatchConv3d
from headmix_vision.layers.positions import Rotation, grid_places
from headmix_vision.ops.dispatch import is_plain
from headmix_vision.ops.runtime import cached_tables


class PatchEmbedding(nn.Module):
    """Projection of non-overlapping patches: [B, C, *sizes] -> [B, N, D] in raster order, contiguous."""

    def __init__(self, patch: tuple[int, ...], in_channels: int, dim: int, **factory: Any) -> None:
        super().__init__()
        convolution = PatchConv2d if len(patch) == 2 else PatchConv3d
        self.proj = convolution(in_channels, dim, cast(Any, patch), cast(Any, patch), **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).movedim(1, -1).flatten(1, -2)  # the strides of a block's output, also in a batch of one


def sincos_positions(
    dim: int, grid: tuple[int, ...], base_grid: tuple[int, ...], like: Tensor, time_step: float = 1.0, first: int = 0
) -> Tensor:
    """Compute fixed sine-cosine position embeddings of a 1-D to 3-D grid.

    On two axes they are as in MAE and DiT: the first half of the channels tells the column, the second the row. A
    grid other than ``base_grid`` covers the same extent more finely or coarsely. A third axis in front, time, adds its
    own embedding less that of place 0, so that the first frame has the positions of an image; more frames extend it,
    they do not stretch it.

    Args:
        dim: channels C, a multiple of 4.
        grid: token grid, (H, W) for images or (T, H, W) for videos.
        base_grid: the grid on which positions are whole numbers.
        like: gives device and dtype.
        time_step, first: places between two tokens along time, and the number of the first token, see
            :func:`~headmix_vision.layers.positions.grid_places`.

    Returns:
        [N, C] for the N tokens of the grid, in raster order.

    Raises:
        InputError: if ``dim`` is not a multiple of 4.
    """
    if dim % 4:
        raise InputError(f"sine-cosine positions need a width that is a multiple of 4, got {dim}.")
    if is_plain(like):
        return _cached_sincos(dim, grid, base_grid, time_step, like.device, first).to(like.dtype)
    return _sincos(dim, grid_places(grid, base_grid, time_step, like.device, first)).float().to(like.dtype)


def _sincos(dim: int, places: list[Tensor]) -> Tensor:
    """Compute the embeddings of ``sincos_positions`` in float64: [N, C]."""
    if len(places) == 1:
        return _axis(dim, places[0])
    if len(places) == 3:
        frames = _axis(dim, places[0])
        return (_sincos(dim, places[1:]) + (frames - _axis(dim, frames.new_zeros(1)))[:, None]).flatten(0, 1)
    row, column = (_axis(dim // 2, axis) for axis in places)
    column, row = column[None].expand(len(row), -1, -1), row[:, None].expand(-1, len(column), -1)
    return torch.cat([column, row], dim=2).flatten(0, 1)


def _axis(dim: int, places: Tensor) -> Tensor:
    """Compute sines, then cosines, of the places along one axis: float64 [size, dim]."""
    frequencies = 10000 ** (-torch.arange(dim // 2, dtype=torch.float64, device=places.device) / (dim // 2))
    angles = places[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@cached_tables
def _cached_sincos(
    dim: int, grid: tuple[int, ...], base_grid: tuple[int, ...], time_step: float, device: torch.device, first: int
) -> Tensor:
    return _sincos(dim, grid_places(grid, base_grid, time_step, torch.device("cpu"), first)).float().to(device)


class TimestepEmbedding(nn.Module):
    """Embed a time in [0, 1000] by sinusoids and a two-layer MLP.

    Args:
        dim: width C of the output.
        num_frequencies: channels of the sinusoidal embedding.
        sit_time: embed ``1 - t / 1000``, as SiT (arXiv 2401.08740) does.

    Shape:
        ``t`` [B], floating or integer -> [B, C].
    """

    def __init__(
        self,
        dim: int,
        num_frequencies: int = 256,
        sit_time: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_frequencies, self.sit_time = num_frequencies, sit_time
        first = nn.Linear(num_frequencies, dim, device=device, dtype=dtype)
        self.mlp = nn.Sequential(first, nn.SiLU(), nn.Linear(dim, dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Draw normal weights of standard deviation 0.02, as in DiT."""
        for name, parameter in self.mlp.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)

    def forward(self, t: Tensor) -> Tensor:
        t = 1 - t / 1000 if self.sit_time else t
        waves = get_timestep_embedding(t, self.num_frequencies, flip_sin_to_cos=True, downscale_freq_shift=0)
        return self.mlp(waves.to(next(self.mlp.parameters()).dtype))


class LabelEmbedding(nn.Module):
    """Embed class labels; training replaces a share of them by the null class, for classifier-free guidance.

    Args:
        num_classes: labels 0 to ``num_classes`` - 1; the null class is ``num_classes``.
        dim: width C.
        dropout: share of labels replaced in training; with 0 there is no null class.

    Shape:
        ``y`` [B] int64 -> [B, C].

    Raises:
        InputError: for a label out of range. Labels on an accelerator are not checked: it would have to wait.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        dropout: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_classes, self.dropout = num_classes, dropout
        self.embedding_table = nn.Embedding(num_classes + (dropout > 0), dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw normal weights of standard deviation 0.02, as in DiT."""
        nn.init.normal_(self.embedding_table.weight, std=0.02)

    def forward(self, y: Tensor) -> Tensor:
        if y.device.type == "cpu" and is_plain(y):
            check_labels(y, self.embedding_table.num_embeddings)
        if self.training and self.dropout > 0:
            y = torch.where(torch.rand(y.shape, device=y.device) < self.dropout, self.num_classes, y)
        return self.embedding_table(y)

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, dropout={self.dropout}"


def check_labels(y: Tensor, count: int) -> None:
    """Raise ``InputError`` for labels outside 0 to ``count`` - 1 (it reads the values, so it waits for the device)."""
    if y.is_floating_point() or y.ndim != 1:
        raise InputError(f"labels must be int64 [B], got {y.dtype} of shape {tuple(y.shape)}.")
    bad = y[(y < 0) | (y >= count)]
    if bad.numel():
        raise InputError(f"label {int(bad[0])} is out of range: the model takes 0 to {count - 1}.")


class DiTBlock(nn.Module):
    """Transformer block: attention and MLP, modulated by a condition (adaLN-Zero).

    Shape:
        ``x`` [B, N, D] and ``c`` [B, D], or [B, F, D] for F parts of N / F consecutive tokens -> [B, N, D].
    """

    def __init__(self, dim: int, mlp_ratio: float, attention: HeadMixAttention, **factory: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        gelu = cast(Any, partial(nn.GELU, approximate="tanh"))
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=gelu, **factory)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim, **factory))

    def forward(
        self, hidden_states: Tensor, c: Tensor, grid: tuple[int, ...], rotation: Rotation | None = None
    ) -> Tensor:  # caches of diffusers look for the first name
        return self._run(hidden_states, c, partial(self.attn, grid=grid, rotation=rotation))

    def stream(
        self, x: Tensor, c: Tensor, grid: tuple[int, ...], rotation: Rotation | None, state: Any
    ) -> tuple[Tensor, Any]:
        """Run the next tokens of a grid; see :meth:`headmix_vision.layers.HeadMixAttention.stream`."""

        def attend(tokens: Tensor) -> Tensor:
            nonlocal state
            out, state = self.attn.stream(tokens, state, grid, rotation)
            return out

        return self._run(x, c, attend), state

    def _run(self, x: Tensor, c: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = _by_frame(self.adaLN_modulation(c)).chunk(6, dim=-1)
        x = x.unflatten(1, (shift_a.shape[1], -1))  # [B, F, N / F, D]
        attended = torch.addcmul(shift_a, self.norm1(x), 1 + scale_a).flatten(1, 2)
        x = x + gate_a * attend(attended).view_as(x)
        x = x + gate_m * self.mlp(torch.addcmul(shift_m, self.norm2(x), 1 + scale_m))
        return x.flatten(1, 2)


class FinalLayer(nn.Module):
    """Modulated norm and projection to patches: [B, N, D] and a condition -> [B, N, numbers of a patch]."""

    def __init__(self, dim: int, patch_numbers: int, **factory: Any) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(dim, patch_numbers, **factory)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim, **factory))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = _by_frame(self.adaLN_modulation(c)).chunk(2, dim=-1)
        x = x.unflatten(1, (shift.shape[1], -1))
        return self.linear(torch.addcmul(shift, self.norm_final(x), 1 + scale)).flatten(1, 2)


def _by_frame(modulation: Tensor) -> Tensor:
    """Reshape a modulation [B, D] or [B, F, D] to [B, F, 1, D], the axes of tokens by frame."""
    return modulation[:, None, None] if modulation.ndim == 2 else modulation[:, :, None]
