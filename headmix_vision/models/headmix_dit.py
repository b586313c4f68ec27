"""The diffusion transformer (DiT, arXiv 2212.09748) with a choice of attention, on images and on clips.

B batch, C latent channels, H x W latent size, T latent frames of clips, N tokens, D width. Sizes are (H, W) or (T, H,
W): an image is a clip without a time axis.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # a pipeline looks for it beside the class
from diffusers.utils.accelerate_utils import apply_forward_hook
from einops import rearrange
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from headmix_vision.errors import (
    InputError,
    check_choice,
    check_counts,
    check_flags,
    check_numbers,
    check_positive,
    is_whole,
    per_axis,
)
from headmix_vision.layers import HeadMixAttention, undecayed_parameters
from headmix_vision.layers.attention import attention_of_layers
from headmix_vision.layers.cores.mhla import MHLACore
from headmix_vision.layers.positions import Rotation, check_rotary, rotary_tables
from headmix_vision.models.diffusers_features import FeaturedModel, found_by_diffusers
from headmix_vision.models.dit_blocks import (
    DiTBlock,
    FinalLayer,
    LabelEmbedding,
    PatchEmbedding,
    TimestepEmbedding,
    sincos_positions,
)
from headmix_vision.ops import MHLAState, TokenGrid, TokenRanks
from headmix_vision.ops.token_ranks import even_axis

POSITIONS = ("sincos", "rope")
FRAME_RATE = 8.0  # of clips in training, where nothing else is given
_OF_CLIPS = (("frame_rate", None), ("positions", "sincos"))


class ClipState(NamedTuple):
    """State of the layers after the first frames of a clip.

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


class HeadMixDiT(FeaturedModel):
    """Class-conditional diffusion transformer with a choice of attention; weights are named as in the official DiT.

    ``input_size`` decides between images, (H, W), and clips, (T, H, W). In a clip all tokens of space and time attend
    to each other. A still is a clip of one frame.

    The size may change from call to call. In space positions cover the same extent. In time they are seconds: more
    frames extend a clip, and another frame rate samples it more finely or coarsely. The blocks of a block-wise core
    grow; their number, and with it the mixing matrix, stays. A clip with fewer frames than blocks along time has a
    block for each frame.

    Args:
        input_size: latent (or image) size in training: one number for H and W, (H, W), or (T, H, W) for clips.
        patch_size: one number p or one per axis, divisors of every latent size. For clips p means (1, p, p). With one
            frame per patch a still is one frame, and every frame has its own noise level.
        in_channels: C.
        embed_dim, depth, num_heads, mlp_ratio: width D, blocks, attention heads, MLP width as a multiple of D.
        num_classes: the null class is ``num_classes``; 0 makes an unconditional model.
        class_dropout: share of training labels replaced by the null class; 0 leaves the model without one, hence
            without classifier-free guidance.
        learned_variance: predict the variance too: 2C output channels, as in the official checkpoints.
        core: ``"softmax"``, ``"linear"``, ``"mhla"`` or ``"hih"``.
        head_mix: mix across feature heads, or None.
        block_grid: token blocks along each axis, or one number for all axes, for block-wise cores.
        core_args: options of the core, see :mod:`headmix_vision.layers.cores`.
        cpe, lepe, input_norm, output_gate, output_norm, qk_norm: options of
            :class:`~headmix_vision.layers.HeadMixAttention`.
        head_mix_args: options of the head mix, see :mod:`headmix_vision.layers.head_mixes`.
        global_every: k, at least 2, for a plain layer, without head mix and window, as the last of each k; 0 for none.
        softmax_every: k, at least 2, for a layer of the softmax core as the first of each k; 0 for none.
        sit_time: embed ``1 - t / 1000``, the time of SiT from noise (0) to data (1), for its weights
            (:func:`headmix_vision.models.convert_dit.convert_dit_state_dict`).
        frame_rate: latent frames per second of clips in training; 8 where it is None. Images have none.
        positions: ``"sincos"``, added to the tokens, or ``"rope"``, rotations of queries and keys with a share of the
            channels for each axis. A linear core rotates its features, in the numerator alone.
        device, dtype: of the parameters; the configuration does not hold them.

    Shape:
        ``x`` [B, C, H, W] or [B, C, T, H, W], ``t`` in [0, 1000], one number or [B], ``y`` [B] int64 -> as ``x``, with
        a learned variance [B, 2C, ...], whose second C channels interpolate its logarithm. For clips ``t`` may be
        [B, T], a noise level for each frame; a patch of several frames takes the mean of their levels, and
        ``frame_rate`` is the rate of these clips, by default the rate of training. ``return_dict=True`` returns
        diffusers' ``Transformer2DModelOutput``, False a tuple.

    Raises:
        InputError: if a size is not a multiple of the patch size or, in patches, below the block grid; if the width is
            not a multiple of 4; if channels, times or labels do not fit, or a label is out of range; if a frame rate is
            given for images; for ``"rope"`` with a core that cannot rotate; if an option is unknown or out of range.
    """

    ignore_for_config = ("device", "dtype")

    @register_to_config
    def __init__(
        self,
        input_size: int | tuple[int, ...] = 32,
        patch_size: int | tuple[int, ...] = 2,
        in_channels: int = 4,
        embed_dim: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        class_dropout: float = 0.1,
        learned_variance: bool = False,
        core: str = "mhla",
        head_mix: str | None = None,
        block_grid: int | tuple[int, ...] = 4,
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
        frame_rate: float | None = None,
        positions: str = "sincos",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        axes = len(input_size) if isinstance(input_size, (tuple, list)) else 2
        if axes not in (2, 3):
            raise InputError(f"input_size must be one whole number or two, or three of clips, got {input_size!r}.")
        self.input_size = per_axis("input_size", input_size, axes)
        for name, sizes in (("patch_size", patch_size), ("block_grid", block_grid)):
            if isinstance(sizes, (tuple, list)) and len(sizes) != axes:
                raise InputError(f"{name}={sizes} has {len(sizes)} axes, input_size={input_size} has {axes}.")
        patch = (1, patch_size, patch_size) if axes == 3 and is_whole(patch_size) else patch_size
        self.patch_size = per_axis("patch_size", patch, axes)
        check_counts(1, in_channels=in_channels, embed_dim=embed_dim, depth=depth)
        check_counts(0, num_classes=num_classes)
        check_flags(learned_variance=learned_variance, sit_time=sit_time)
        check_numbers(0, mlp_ratio=mlp_ratio)
        check_numbers(0, 1, class_dropout=class_dropout)
        check_choice("positions", positions, POSITIONS)
        if class_dropout == 1:
            raise InputError("class_dropout must be below 1, got 1: no label would be learned.")
        if embed_dim % 4:
            raise InputError(f"embed_dim must be a multiple of 4, of sines and cosines on two axes, got {embed_dim}.")
        if int(embed_dim * mlp_ratio) < 1:
            raise InputError(f"mlp_ratio={mlp_ratio} leaves the MLP no width.")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_channels, self.num_classes, self.embed_dim = in_channels, num_classes, embed_dim
        self.out_channels = 2 * in_channels if learned_variance else in_channels
        self.base_grid, self.positions = self._grid(self.input_size), positions
        self.frame_rate = self._check_rate(frame_rate, FRAME_RATE)
        self.ranks: TokenRanks | None = None

        self.x_embedder = PatchEmbedding(self.patch_size, in_channels, embed_dim, **factory)
        self.t_embedder = TimestepEmbedding(embed_dim, sit_time=sit_time, **factory)
        labels = LabelEmbedding(num_classes, embed_dim, class_dropout, **factory) if num_classes else None
        self.y_embedder = labels
        layers = attention_of_layers(
            depth,
            core=core,
            core_args=core_args,
            head_mix=head_mix,
            head_mix_args=head_mix_args,
            global_every=global_every,
            softmax_every=softmax_every,
        )
        self.blocks = nn.ModuleList(
            DiTBlock(
                embed_dim,
                mlp_ratio,
                HeadMixAttention(
                    embed_dim,
                    num_heads,
                    **layer,
                    grid=self.base_grid,
                    block_grid=per_axis("block_grid", block_grid, axes),
                    qk_norm=qk_norm,
                    cpe=cpe,
                    lepe=lepe,
                    input_norm=input_norm,
                    output_norm=output_norm,
                    output_gate=output_gate,
                    qkv_bias=True,
                    **factory,
                ),
                **factory,
            )
            for layer in layers
        )
        self.head_dim = embed_dim // num_heads
        if positions == "rope":
            check_rotary(self.head_dim, axes)
            for block in self.blocks:
                cast(HeadMixAttention, block.attn).core.check_rotation()
        self.final_layer = FinalLayer(embed_dim, math.prod(self.patch_size) * self.out_channels, **factory)
        self.gradient_checkpointing = False
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw new weights as DiT does; every block starts as the identity and the output as zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))
        nn.init.zeros_(cast(Tensor, self.x_embedder.proj.bias))
        self.t_embedder.reset_parameters()
        if self.y_embedder is not None:
            self.y_embedder.reset_parameters()
        for layer in (*self.blocks, self.final_layer):
            for parameter in layer.adaLN_modulation[-1].parameters():
                nn.init.zeros_(parameter)
        for parameter in self.final_layer.linear.parameters():
            nn.init.zeros_(parameter)

    @property
    def architecture(self) -> dict[str, Any]:
        """All arguments of the constructor, as plain values: ``HeadMixDiT(**architecture)`` is the same model."""
        values = {name: value for name, value in self.config.items() if not name.startswith("_")}
        if not self._is_clip:  # sample folders of images were recorded without these
            values = {name: value for name, value in values.items() if (name, value) not in _OF_CLIPS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def has_null_class(self) -> bool:
        """Whether label ``num_classes`` stands for no class, which classifier-free guidance needs."""
        return self.y_embedder is not None and self.y_embedder.dropout > 0

    @property
    def block_frames(self) -> int | None:
        """Frames of a row of blocks along time, where ``causal="rows"``: a clip is as many or a multiple; else None."""
        core = cast(DiTBlock, self.blocks[0]).attn.core
        is_drawn_by_rows = self._is_clip and core.causal == "rows"
        return self.patch_size[0] * cast(MHLACore, core).row_length if is_drawn_by_rows else None

    @property
    def _is_clip(self) -> bool:
        return len(self.patch_size) == 3

    def forward(
        self,
        x: Tensor,
        t: Tensor | float,
        y: Tensor | None = None,
        frame_rate: float | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        self._check_input(x)
        grid = self._grid(tuple(x.shape[2:]))
        c = self._condition(x, t, y)
        ranks = self.ranks
        if ranks is not None:
            (first, end), patch = ranks.span(TokenGrid(grid), ranks.rank), self.patch_size[ranks.axis]
            x = x.narrow(2 + ranks.axis, first * patch, (end - first) * patch)
            c = c[:, first:end] if c.ndim == 3 and ranks.axis == 0 else c  # of each frame
        x = self.x_embedder(x)
        added, rotation = self._positions(grid, self._time_step(frame_rate), x)
        if ranks is not None:
            added = None if added is None else ranks.split(added, TokenGrid(grid), dim=0)
            rotation = rotation and cast(Rotation, tuple(ranks.split(y, TokenGrid(grid), dim=0) for y in rotation))
        x = x if added is None else x + added
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, c, grid, rotation)
            else:
                x = block(x, c, grid, rotation)
        x = self.final_layer(x, c)
        sample = self._unpatch(x if ranks is None else ranks.gather(x, TokenGrid(grid)), grid)
        if return_dict is None:
            return sample
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

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

        Outputs are as in ``forward`` on all frames up to these. A state is never changed: frames can be denoised in
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
            InputError: as ``forward``; if the model is of images or not causal, the frames end within a row of blocks,
                or the state is of another clip.
        """
        if not self._is_clip:
            raise InputError("stream applies only to clips, this model is of images: call it with the whole image.")
        self._check_input(x)
        if self.block_frames is None:
            check_counts(1, num_frames=num_frames)
        whole = self.block_frames or cast(int, num_frames)
        piece, grid = self._grid(tuple(x.shape[2:])), self._grid((whole, *x.shape[3:]))
        first, before = (0, [None] * len(self.blocks)) if state is None else (state.num_tokens, state.layers)
        if state is not None and state.grid != grid:
            raise InputError(f"the state is of a clip of {state.grid} tokens along its axes, these frames of {grid}.")
        row = first // math.prod(grid[1:])
        left = whole - row * self.patch_size[0]
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

    def context_parallel(self, group: TokenRanks | ProcessGroup | DeviceMesh | None, axis: int | None = None) -> None:
        """Divide the tokens of each sample among the ranks of a group.

        As in diffusers, every rank is called with the same whole input and returns the whole output; in between it has
        the tokens of a part of the image or clip. In an attention layer the ranks exchange summaries of blocks, whose
        size does not depend on the number of tokens, and with ``cpe`` the tokens at the edges of each part.

        In training every rank computes the same loss, from the same noise and labels; labels are dropped alike where
        the random numbers of the ranks are alike. Gradients are then those of the tokens of a rank: their sum is that
        of the loss (``model.ranks.sum_gradients(model.parameters())``; DistributedDataParallel and FSDP take the mean,
        so that the loss must be multiplied by the size of the group).

        Args:
            group: a process group, a device mesh of one dimension, what ``ranks`` was before, or None to end it.
            axis: of (H, W) or (T, H, W), from 0, along which images or clips are parted. None takes the first of
                which each rank has as many tokens, and as many whole blocks, at the model's own size; the first if
                there is none.

        Raises:
            InputError: for layers with a head mix, or of another core than MHLA and linear attention; and, when called,
                if there are fewer tokens along the axis than ranks.
        """
        if axis is not None:
            check_counts(0, len(self.patch_size) - 1, axis=axis)
        layers = [cast(HeadMixAttention, block.attn) for block in self.blocks]
        if group is None:
            ranks = None
        elif isinstance(group, TokenRanks):
            ranks = replace(group, axis=group.axis if axis is None else axis)
            check_counts(0, len(self.patch_size) - 1, axis=ranks.axis)
        else:
            ranks = TokenRanks.of(group, axis or 0)
            if axis is None:
                counts = self.config["block_grid"]
                counts = (counts,) * len(self.patch_size) if isinstance(counts, int) else counts
                ranks = replace(ranks, axis=even_axis(self.base_grid, counts, ranks.size))
        for layer in layers if ranks else ():
            layer.check_ranks()  # all, before any is changed
        for layer in layers:
            layer.context_parallel(ranks)
        self.ranks = ranks

    spread_tokens = context_parallel  # the former name

    def _check_input(self, x: Tensor) -> None:
        if x.ndim != 2 + len(self.patch_size) or x.shape[1] != self.in_channels:
            axes = ", ".join(("T", "H", "W")[-len(self.patch_size) :])
            raise InputError(f"x must be [B, {self.in_channels}, {axes}], got {tuple(x.shape)}.")

    def _check_rate(self, frame_rate: float | None, default: float | None) -> float | None:
        """Return a frame rate, or the default where it is None; images have none."""
        if frame_rate is None:
            return float(default) if self._is_clip and default is not None else None
        check_positive(frame_rate=frame_rate)
        if not self._is_clip:
            raise InputError(f"frame_rate={frame_rate} applies only to clips, this model is of images: leave it out.")
        return float(frame_rate)

    def _time_step(self, frame_rate: float | None) -> float:
        """Return the time from token to token of clips of a frame rate, in frames of training."""
        rate = self._check_rate(frame_rate, self.frame_rate)
        return 1.0 if rate is None else self.patch_size[0] * (cast(float, self.frame_rate) / rate)

    def _positions(
        self, grid: tuple[int, ...], time_step: float, like: Tensor, first: int = 0
    ) -> tuple[Tensor | None, Rotation | None]:
        """Return what is added to the tokens of a grid, [N, D], or their rotation, and None for the other.

        ``first`` is the number of the first token along time.
        """
        if self.positions == "rope":
            return None, rotary_tables(self.head_dim, grid, self.base_grid, time_step, like, first)
        return sincos_positions(self.embed_dim, grid, self.base_grid, like, time_step, first), None

    def _grid(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not all(sizes) or any(size % p for size, p in zip(sizes, self.patch_size, strict=True)):
            given = "x".join(map(str, sizes))
            p = "x".join(map(str, self.patch_size))
            raise InputError(f"latent size {given} is not a multiple of the patch size {p}.")
        return tuple(size // p for size, p in zip(sizes, self.patch_size, strict=True))

    def _embed_times(self, x: Tensor, t: Tensor) -> Tensor:
        """Embed a time, or one of each sample: [B, D]; or one of each frame of clips: [B, T / p, D]."""
        batch, frames = x.shape[:3:2]
        if self._is_clip and t.ndim == 2 and t.shape[0] in (1, batch) and t.shape[1] == frames:
            if self.patch_size[0] > 1:
                t = t.double().unflatten(1, (-1, self.patch_size[0])).mean(2)
            return self.t_embedder(t.expand(batch, -1).flatten()).unflatten(0, (batch, -1))
        if t.ndim > 1 or (t.ndim == 1 and t.shape[0] not in (1, batch)):
            sizes = f", [B] or [B, T] with B, T = {batch, frames}" if self._is_clip else f" or [B] with B = {batch}"
            raise InputError(f"t must be one number{sizes}, got shape {tuple(t.shape)}.")
        return self.t_embedder(t.expand(batch))

    def _condition(self, x: Tensor, t: Tensor | float, y: Tensor | None) -> Tensor:
        c = self._embed_times(x, torch.as_tensor(t, device=x.device))
        if self.y_embedder is None:
            if y is not None:
                raise InputError("labels given, but the model is unconditional (num_classes=0).")
            return c
        if y is None:
            highest = self.num_classes - 1 + self.has_null_class
            raise InputError(f"the model needs labels y [B], 0 to {highest}.")
        if y.ndim != 1 or y.shape[0] not in (1, x.shape[0]):
            raise InputError(f"labels y must be [B] with B = {x.shape[0]}, got shape {tuple(y.shape)}.")
        labels = self.y_embedder(y)
        return c + (labels if c.ndim == 2 else labels[:, None])

    def _unpatch(self, patches: Tensor, grid: tuple[int, ...]) -> Tensor:
        t, h, w = (1, *grid)[-3:]
        i, j, k = (1, *self.patch_size)[-3:]
        sizes = {"t": t, "h": h, "w": w, "i": i, "j": j, "k": k}
        frames = rearrange(patches, "b (t h w) (i j k c) -> b c (t i) (h j) (w k)", **sizes)
        return frames if len(grid) == 3 else frames.squeeze(2)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay leaves alone: mixing matrices, masks and the label table."""
        return {"y_embedder.embedding_table.weight"} | undecayed_parameters(self)

    def set_block_grid(self, block_grid: int | tuple[int, ...]) -> None:
        """Change the number of token blocks along each axis and resample the mixing matrices."""
        block_grid, hybrid = per_axis("block_grid", block_grid, len(self.patch_size)), self.config.softmax_every
        for index, block in enumerate(self.blocks):
            if not hybrid or index % hybrid:
                cast(HeadMixAttention, block.attn).set_block_grid(block_grid)
        self.register_to_config(block_grid=block_grid)


HeadMixVideoDiT = found_by_diffusers(HeadMixDiT, "HeadMixVideoDiT")
"""An earlier name, which saved models of clips bear; indexes of their pipelines name a module of its own, too."""
sys.modules[f"{__package__}.headmix_video_dit"] = sys.modules[__name__]
