"""The diffusion transformer (DiT, arXiv 2212.09748) on a grid of tokens, which images and videos share.

B batch, C latent channels, N tokens, D width, F frames of tokens with times of their own, 1 where they share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from einops import rearrange
from timm.layers import Mlp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from headmix_vision.checks import check_counts, check_flags, check_numbers
from headmix_vision.errors import InputError
from headmix_vision.layers import HeadMixAttention, MixingMatrix, undecayed_parameters
from headmix_vision.layers.embeddings import LabelEmbedding, TimestepEmbedding, sincos_positions
from headmix_vision.layers.patch_convolution import PatchConv2d, PatchConv3d
from headmix_vision.layers.positions import Rotation, check_rotary, rotary_tables
from headmix_vision.models.depth import attention_of_layer
from headmix_vision.models.diffusers_features import FeaturedModel
from headmix_vision.ops import TokenGrid, TokenRanks
from headmix_vision.ops.token_ranks import even_axis

POSITIONS = ("sincos", "rope")


class PatchEmbedding(nn.Module):
    """Projects non-overlapping patches: [B, C, *sizes] -> [B, N, D] in raster order, contiguous."""

    def __init__(self, patch: tuple[int, ...], in_channels: int, dim: int, **factory: Any) -> None:
        super().__init__()
        convolution = PatchConv2d if len(patch) == 2 else PatchConv3d
        self.proj = convolution(in_channels, dim, cast(Any, patch), cast(Any, patch), **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class DiTBlock(nn.Module):
    """Runs attention and MLP, modulated by a condition (adaLN-Zero).

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
    """Runs a modulated norm and projects to patches: [B, N, D] and a condition -> [B, N, numbers of a patch]."""

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
    """Give a modulation [B, D] or [B, F, D] the axes of tokens by frame: [B, F, 1, D]."""
    return modulation[:, None, None] if modulation.ndim == 2 else modulation[:, :, None]


class GridDiT(FeaturedModel):
    """What diffusion transformers on images and on videos share; weights are named as in the official DiT.

    A subclass registers the arguments of its constructor with diffusers and calls ``_build``, whose arguments are those
    of :class:`~headmix_vision.models.HeadMixDiT`, sizes for each axis.
    """

    ignore_for_config = ("device", "dtype")

    def _build(
        self,
        *,
        input_size: tuple[int, ...],
        patch: tuple[int, ...],
        block_grid: tuple[int, ...],
        in_channels: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
        num_classes: int,
        class_dropout: float,
        learned_variance: bool,
        core: str,
        head_mix: str | None,
        core_args: dict[str, Any] | None,
        cpe: bool | str,
        lepe: int,
        input_norm: bool,
        output_gate: bool,
        output_norm: bool,
        qk_norm: bool,
        head_mix_args: dict[str, Any] | None,
        global_every: int,
        softmax_every: int,
        sit_time: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        positions: str = "sincos",
    ) -> None:
        check_counts(1, in_channels=in_channels, embed_dim=embed_dim, depth=depth)
        check_counts(0, num_classes=num_classes)
        check_flags(learned_variance=learned_variance, sit_time=sit_time)
        check_numbers(0, mlp_ratio=mlp_ratio)
        check_numbers(0, 1, class_dropout=class_dropout)
        if class_dropout == 1:
            raise InputError("class_dropout must be below 1, got 1: no label would be learned.")
        if embed_dim % 4:
            raise InputError(f"embed_dim must be a multiple of 4, of sines and cosines on two axes, got {embed_dim}.")
        if int(embed_dim * mlp_ratio) < 1:
            raise InputError(f"mlp_ratio={mlp_ratio} leaves the MLP no width.")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.patch, self.in_channels, self.num_classes = patch, in_channels, num_classes
        self.out_channels = 2 * in_channels if learned_variance else in_channels
        self.input_size = input_size
        self.base_grid = self._grid(input_size)
        self.embed_dim, self.positions = embed_dim, positions
        self.ranks: TokenRanks | None = None

        self.x_embedder = PatchEmbedding(patch, in_channels, embed_dim, **factory)
        self.t_embedder = TimestepEmbedding(embed_dim, sit_time=sit_time, **factory)
        labels = LabelEmbedding(num_classes, embed_dim, class_dropout, **factory) if num_classes else None
        self.y_embedder = labels
        self.blocks = nn.ModuleList(
            DiTBlock(
                embed_dim,
                mlp_ratio,
                HeadMixAttention(
                    embed_dim,
                    num_heads,
                    **attention_of_layer(
                        index, depth, global_every, head_mix, head_mix_args, core_args, core, softmax_every
                    ),
                    grid=self.base_grid,
                    block_grid=block_grid,
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
            for index in range(depth)
        )
        self.head_dim = embed_dim // num_heads
        if positions == "rope":
            check_rotary(self.head_dim, len(patch))
            for block in self.blocks:
                cast(HeadMixAttention, block.attn).core.check_rotation()
        self.final_layer = FinalLayer(embed_dim, math.prod(patch) * self.out_channels, **factory)
        self.gradient_checkpointing = False
        self.init_weights()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Load what `save_pretrained` wrote; arguments as in diffusers, which would draw missing weights at random.

        Raises:
            InputError: if weights are missing or unknown.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **kwargs)
        # buffers of a later version are for their modules to make up
        missing = set(info["missing_keys"]) & dict(model.named_parameters()).keys()
        for problem, names in (("lacks", missing), ("has unknown", info["unexpected_keys"])):
            if names:
                raise InputError(f"{pretrained_model_name_or_path} {problem} weights, first {min(names)}.")
        return (model, info) if wants_info else model

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

    def _fix_state_dict_keys_on_load(self, state_dict: dict[str, Tensor]) -> None:
        """Add the block grids that folders of version 0.1.0 lack: diffusers calls this, and warns of missing ones."""
        super()._fix_state_dict_keys_on_load(state_dict)
        for name, module in self.named_modules():
            if isinstance(module, MixingMatrix):
                state_dict.setdefault(f"{name}.block_grid", torch.tensor(module.blocks.block_grid))

    @property
    def architecture(self) -> dict[str, Any]:
        """All arguments of the constructor, as plain values: `type(model)(**architecture)` is the same model."""
        values = {name: value for name, value in self.config.items() if not name.startswith("_")}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def has_null_class(self) -> bool:
        """Tell whether label ``num_classes`` stands for no class, which classifier-free guidance needs."""
        return self.y_embedder is not None and self.y_embedder.dropout > 0

    def _predict(self, x: Tensor, t: Tensor | float, y: Tensor | None, time_step: float = 1.0) -> Tensor:
        """Run the model on [B, C, *sizes]; ``time_step`` is in frames of training, from token to token."""
        self._check_input(x)
        grid = self._grid(tuple(x.shape[2:]))
        c = self._condition(x, t, y)
        ranks, tokens = self.ranks, TokenGrid(grid)
        if ranks is not None:
            (first, end), patch = ranks.span(tokens, ranks.rank), self.patch[ranks.axis]
            x = x.narrow(2 + ranks.axis, first * patch, (end - first) * patch)
            c = c[:, first:end] if c.ndim == 3 and ranks.axis == 0 else c  # of each frame
        x = self.x_embedder(x)
        added, rotation = self._positions(grid, time_step, x)
        if ranks is not None:
            added = None if added is None else ranks.split(added, tokens, dim=0)
            rotation = rotation and (ranks.split(rotation[0], tokens, dim=0), ranks.split(rotation[1], tokens, dim=0))
        x = x if added is None else x + added
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, c, grid, rotation)
            else:
                x = block(x, c, grid, rotation)
        x = self.final_layer(x, c)
        return self._unpatch(x if ranks is None else ranks.gather(x, tokens), grid)

    def spread_tokens(self, group: TokenRanks | ProcessGroup | DeviceMesh | None, axis: int | None = None) -> None:
        """Spread the tokens of each sample over the ranks of a group: context parallelism.

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
            check_counts(0, len(self.patch) - 1, axis=axis)
        layers = [cast(HeadMixAttention, block.attn) for block in self.blocks]
        if group is None:
            ranks = None
        elif isinstance(group, TokenRanks):
            ranks = replace(group, axis=group.axis if axis is None else axis)
        else:
            ranks = TokenRanks.of(group, axis or 0)
            if axis is None:
                counts = self.config["block_grid"]
                counts = (counts,) * len(self.patch) if isinstance(counts, int) else counts
                ranks = replace(ranks, axis=even_axis(self.base_grid, counts, ranks.size))
        for layer in layers if ranks else ():
            layer.check_ranks()  # all, before any is changed
        for layer in layers:
            layer.set_ranks(ranks)
        self.ranks = ranks

    def _check_input(self, x: Tensor) -> None:
        if x.ndim != 2 + len(self.patch) or x.shape[1] != self.in_channels:
            axes = ", ".join(("T", "H", "W")[-len(self.patch) :])
            raise InputError(f"x must be [B, {self.in_channels}, {axes}], got {tuple(x.shape)}.")

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
        if not all(sizes) or any(size % p for size, p in zip(sizes, self.patch, strict=True)):
            given = "x".join(map(str, sizes))
            p = "x".join(map(str, self.patch if len(self.patch) > 2 else self.patch[:1]))
            raise InputError(f"latent size {given} is no multiple of the patch size {p}.")
        return tuple(size // p for size, p in zip(sizes, self.patch, strict=True))

    def _embed_times(self, x: Tensor, t: Tensor) -> Tensor:
        """Embed a time, or one of each sample: [B, D]."""
        if t.ndim > 1 or (t.ndim == 1 and t.shape[0] not in (1, x.shape[0])):
            raise InputError(f"t must be one number or [B] with B = {x.shape[0]}, got shape {tuple(t.shape)}.")
        return self.t_embedder(t.expand(x.shape[0]))

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
        i, j, k = (1, *self.patch)[-3:]
        sizes = {"t": t, "h": h, "w": w, "i": i, "j": j, "k": k}
        frames = rearrange(patches, "b (t h w) (i j k c) -> b c (t i) (h j) (w k)", **sizes)
        return frames if len(grid) == 3 else frames.squeeze(2)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass (timm's name for it)."""
        if enable:
            self.enable_gradient_checkpointing()
        else:
            self.disable_gradient_checkpointing()

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay leaves alone: mixing matrices, masks and the label table."""
        return {"y_embedder.embedding_table.weight"} | undecayed_parameters(self)

    def _set_block_grid(self, block_grid: tuple[int, ...]) -> None:
        hybrid = self.config.softmax_every
        for index, block in enumerate(self.blocks):
            if not hybrid or index % hybrid:
                cast(HeadMixAttention, block.attn).set_block_grid(block_grid)
        self.register_to_config(block_grid=block_grid)
