"""The diffusion transformer with mixed heads on videos, a model of diffusers.

B batch, C latent channels, T x H x W latent frames and size, (t, p, p) a patch, N = T/t · H/p · W/p tokens, D width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # a pipeline looks for it beside the class
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor

from headmix_vision.checks import check_choice, check_counts, check_positive, triple
from headmix_vision.errors import InputError
from headmix_vision.layers.cores.mhla import MHLACore
from headmix_vision.models.diffusers_features import as_output, found_by_diffusers
from headmix_vision.models.grid_dit import POSITIONS, DiTBlock, GridDiT
from headmix_vision.ops import MHLAState


class ClipState(NamedTuple):
    """What the layers keep of the first frames of a clip.

    Attributes:
        grid: tokens along time, height and width, of the whole clip or, for ``causal="rows"``, of a row of blocks.
        num_tokens: tokens of the frames taken.
        layers: the state of each layer, see :meth:`headmix_vision.layers.HeadMixAttention.stream`.
    """

    grid: tuple[int, ...]
    num_tokens: int
    layers: tuple[tuple[MHLAState, ...], ...]

    def of(self, samples: Tensor) -> ClipState:
        """Return the state of some samples, given by their places in the batch, int64 [n]."""
        layers = (tuple(one._replace(summaries=one.summaries[samples]) for one in layer) for layer in self.layers)
        return self._replace(layers=tuple(layers))


@found_by_diffusers
class HeadMixVideoDiT(GridDiT):
    """A class-conditional diffusion transformer on clips: all tokens of space and time attend to each other.

    Frames and sizes may change from call to call. In space positions cover the same extent; in time they are seconds,
    so that more frames, or another frame rate, extend a clip or sample it otherwise and do not stretch it. A still is a
    clip of one frame. A clip of fewer frames than there are blocks along time has a block for each frame.

    Args:
        input_size: latent frames, height and width in training.
        patch_size: (t, p, p), divisors of every latent size; one number p is (1, p, p). With t = 1 a still is one
            frame, and every frame has a noise level of its own.
        frame_rate: frames of the input a second in training: those of the latents, where an autoencoder makes fewer.
        positions: ``"sincos"``, added to the tokens, or ``"rope"``, three-dimensional rotations of queries and keys
            (with a linear core of their features, in the numerator alone).
        block_grid: token blocks along time, height and width, for block-wise cores.
        cpe: False, True for a convolution over 3 x 3 x 3 tokens, or ``"factorised"`` for 3 x 3 and then 3 in time.
        softmax_every: k, at least 2, for a layer of the softmax core as the first of each k; 0 for none.

    The other arguments are those of :class:`~headmix_vision.models.HeadMixDiT`.

    Shape:
        ``x`` [B, C, T, H, W], ``t`` in [0, 1000], one number, [B] or, a noise level for each frame, [B, T], ``y`` [B]
        int64 -> [B, C or 2C, T, H, W]. ``frame_rate`` is that of these clips, the one of training where it is None. A
        patch of several frames has the mean of their noise levels.

    Raises:
        InputError: as :class:`~headmix_vision.models.HeadMixDiT`; if frames are no multiple of t; for ``"rope"`` with a
            core that cannot rotate.
    """

    @register_to_config
    def __init__(
        self,
        input_size: tuple[int, int, int] = (16, 32, 32),
        patch_size: int | tuple[int, int, int] = (1, 2, 2),
        in_channels: int = 4,
        embed_dim: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        num_classes: int = 101,
        class_dropout: float = 0.1,
        learned_variance: bool = False,
        core: str = "mhla",
        head_mix: str | None = None,
        block_grid: tuple[int, int, int] = (4, 4, 4),
        core_args: dict[str, Any] | None = None,
        cpe: bool | str = False,
        lepe: int = 0,
        input_norm: bool = False,
        output_gate: bool = False,
        output_norm: bool = False,
        qk_norm: bool = False,
        head_mix_args: dict[str, Any] | None = None,
        global_every: int = 0,
        softmax_every: int = 0,
        sit_time: bool = False,
        frame_rate: float = 8.0,
        positions: str = "sincos",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("positions", positions, POSITIONS)
        check_positive(frame_rate=frame_rate)
        self.frame_rate = float(frame_rate)
        patch = (1, patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        self.patch_size = triple("patch_size", patch)
        self._build(
            input_size=triple("input_size", input_size),
            patch=self.patch_size,
            block_grid=triple("block_grid", block_grid),
            in_channels=in_channels,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            num_classes=num_classes,
            class_dropout=class_dropout,
            learned_variance=learned_variance,
            core=core,
            head_mix=head_mix,
            core_args=core_args,
            cpe=cpe,
            lepe=lepe,
            input_norm=input_norm,
            output_gate=output_gate,
            output_norm=output_norm,
            qk_norm=qk_norm,
            head_mix_args=head_mix_args,
            global_every=global_every,
            softmax_every=softmax_every,
            sit_time=sit_time,
            device=device,
            dtype=dtype,
            positions=positions,
        )

    def forward(
        self,
        x: Tensor,
        t: Tensor | float,
        y: Tensor | None = None,
        frame_rate: float | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        return as_output(self._predict(x, t, y, self._time_step(frame_rate)), return_dict)

    @property
    def block_frames(self) -> int | None:
        """Frames of a row of blocks along time, where ``causal="rows"``: a clip is as many or a multiple; else None."""
        core = cast(DiTBlock, self.blocks[0]).attn.core
        return self.patch[0] * cast(MHLACore, core).row_length if core.causal == "rows" else None

    @apply_forward_hook  # of offloading, which knows forward alone
    def stream(
        self,
        x: Tensor,
        t: Tensor | float,
        y: Tensor | None = None,
        frame_rate: float | None = None,
        *,
        num_frames: int | None = None,
        state: ClipState | None = None,
    ) -> tuple[Tensor, ClipState]:
        """Run the next frames of a clip on the state of those before, where the core is causal.

        Outputs are those of ``forward`` on all frames up to these. A state is never changed: frames can be denoised in
        many calls on the state before them, and are then pushed once, clean and at time 0, for the state after them.

        Args:
            x, t, y, frame_rate: as in ``forward``, of the next frames alone, [B, C, n, H, W]. They end with a row of
                blocks along time.
            num_frames: T, frames of the whole clip, later ones included: its blocks follow from it. With
                ``causal="rows"`` there is no need for it, and no end.
            state: returned for the frames before; None at the start.

        Returns:
            [B, C or 2C, n, H, W], and the state after these frames, of the same size for any number of them.

        Raises:
            InputError: as ``forward``; if the model is not causal, the frames end within a row of blocks, or the state
                is of another clip.
        """
        self._check_input(x)
        if self.block_frames is None:
            check_counts(1, num_frames=num_frames)
        whole = self.block_frames or cast(int, num_frames)
        piece, grid = self._grid(tuple(x.shape[2:])), self._grid((whole, *x.shape[3:]))
        first, before = (0, [None] * len(self.blocks)) if state is None else (state.num_tokens, state.layers)
        if state is not None and state.grid != grid:
            raise InputError(f"the state is of a clip of {state.grid} tokens along its axes, these frames of {grid}.")
        row = first // math.prod(grid[1:])
        left = whole - row * self.patch[0]
        if x.shape[2] > left and self.block_frames is None:
            raise InputError(f"{x.shape[2]} frames given, but of {num_frames} only {left} are left.")
        c = self._condition(x, t, y)
        tokens = self.x_embedder(x)
        added, rotation = self._positions(piece, self._time_step(frame_rate), tokens, row)
        tokens = tokens if added is None else tokens + added
        layers = []
        for block, layer in zip(self.blocks, before, strict=True):
            tokens, layer = cast(DiTBlock, block).stream(tokens, c, grid, rotation, layer)
            layers.append(layer)
        out = self._unpatch(self.final_layer(tokens, c), piece)
        return out, ClipState(grid, first + tokens.shape[1], tuple(layers))

    def _time_step(self, frame_rate: float | None) -> float:
        """Return the time from token to token of clips of a frame rate, in frames of training."""
        if frame_rate is None:
            frame_rate = self.frame_rate
        else:
            check_positive(frame_rate=frame_rate)
        return self.patch[0] * (self.frame_rate / frame_rate)

    def _embed_times(self, x: Tensor, t: Tensor) -> Tensor:
        """Embed times as images have them, [B, D], or those of the frames, [B, T / t, D]."""
        if t.ndim < 2:
            return super()._embed_times(x, t)
        batch, frames = x.shape[0], x.shape[2]
        if t.ndim > 2 or t.shape[0] not in (1, batch) or t.shape[1] != frames:
            raise InputError(f"t must be one number, [B] or [B, T] with B, T = {batch, frames}, got {tuple(t.shape)}.")
        if self.patch[0] > 1:
            t = t.double().unflatten(1, (-1, self.patch[0])).mean(2)
        return self.t_embedder(t.expand(batch, -1).flatten()).unflatten(0, (batch, -1))

    def set_block_grid(self, block_grid: tuple[int, int, int]) -> None:
        """Change the number of token blocks and resample the mixing matrices."""
        self._set_block_grid(triple("block_grid", block_grid))
