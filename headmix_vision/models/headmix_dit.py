"""The diffusion transformer (DiT, arXiv 2212.09748) with mixed heads, a model of diffusers.

B batch, C latent channels, H x W latent size, p patch size, N = HW / p² tokens, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from einops import rearrange
from timm.layers import Mlp
from torch import Tensor, nn

from headmix_vision.checks import check_counts, check_flags, check_numbers, pair
from headmix_vision.errors import InputError
from headmix_vision.layers import HeadMixAttention, MixingMatrix, undecayed_parameters
from headmix_vision.layers.embeddings import LabelEmbedding, TimestepEmbedding, sincos_positions
from headmix_vision.models.depth import attention_of_layer


class PatchEmbedding(nn.Module):
    """Projects non-overlapping patches: [B, C, H, W] -> [B, N, D] in raster order."""

    def __init__(self, patch_size: int, in_channels: int, dim: int, **factory: Any) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, patch_size, patch_size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class DiTBlock(nn.Module):
    """Runs attention and MLP, modulated by a condition: ``x`` [B, N, D] and ``c`` [B, D] -> [B, N, D] (adaLN-Zero)."""

    def __init__(self, dim: int, mlp_ratio: float, attention: HeadMixAttention, **factory: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        gelu = cast(Any, partial(nn.GELU, approximate="tanh"))
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=gelu, **factory)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim, **factory))

    def forward(self, x: Tensor, c: Tensor, grid: tuple[int, int]) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
        x = x + gate_a * self.attn(torch.addcmul(shift_a, self.norm1(x), 1 + scale_a), grid=grid)
        return x + gate_m * self.mlp(torch.addcmul(shift_m, self.norm2(x), 1 + scale_m))


class FinalLayer(nn.Module):
    """Runs a modulated norm and projects to patches: [B, N, D] -> [B, N, p² · channels]."""

    def __init__(self, dim: int, patch_size: int, out_channels: int, **factory: Any) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(dim, patch_size**2 * out_channels, **factory)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim, **factory))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=-1)
        return self.linear(torch.addcmul(shift, self.norm_final(x), 1 + scale))


class HeadMixDiT(ModelMixin, ConfigMixin):
    """A class-conditional diffusion transformer with a choice of attention; weights are named as in the official DiT.

    The resolution may change from call to call: positions cover the same extent. The blocks of a block-wise core grow;
    their number, and with it the mixing matrix, stays.

    Args:
        input_size: latent (or image) size in training, H and W or one number for both.
        patch_size: p, a divisor of every latent size.
        in_channels: C.
        embed_dim, depth, num_heads, mlp_ratio: width D, blocks, attention heads, MLP width as a multiple of D.
        num_classes: the null class is ``num_classes``; 0 makes an unconditional model.
        class_dropout: share of training labels replaced by the null class; 0 leaves the model without one, hence
            without classifier-free guidance.
        learned_variance: predict the variance too: 2C output channels, as in the official checkpoints.
        core: ``"softmax"``, ``"linear"``, ``"mhla"`` or ``"hih"``.
        head_mix: mix across feature heads, or None.
        block_grid: token blocks along height and width, for block-wise cores.
        core_args: options of the core, see :mod:`headmix_vision.layers.cores`.
        cpe, output_gate, output_norm, qk_norm: options of :class:`~headmix_vision.layers.HeadMixAttention`.
        head_mix_args: options of the head mix, see :mod:`headmix_vision.layers.head_mixes`.
        global_every: k, at least 2, for a plain layer, without head mix and window, as the last of each k; 0 for none.
        device, dtype: of the parameters; they are no part of the configuration.

    Shape:
        ``x`` [B, C, H, W], ``t`` [B] in [0, 1000] (or one number), ``y`` [B] int64 -> [B, C or 2C, H, W]; with the
        learned variance the second C channels interpolate its logarithm.

    Raises:
        InputError: if the input size is no multiple of the patch size or, in patches, below the block grid; if the
            width is no multiple of 4; if channels, times or labels do not fit, or a label is out of range; if an option
            is unknown or out of range.
    """

    ignore_for_config = ("device", "dtype")
    _supports_gradient_checkpointing = True
    _no_split_modules = ("DiTBlock",)

    @register_to_config
    def __init__(
        self,
        input_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
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
        block_grid: int | tuple[int, int] = (4, 4),
        core_args: dict[str, Any] | None = None,
        cpe: bool = False,
        output_gate: bool = False,
        output_norm: bool = False,
        qk_norm: bool = False,
        head_mix_args: dict[str, Any] | None = None,
        global_every: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(1, patch_size=patch_size, in_channels=in_channels, embed_dim=embed_dim, depth=depth)
        check_counts(0, num_classes=num_classes)
        check_flags(learned_variance=learned_variance)
        check_numbers(0, mlp_ratio=mlp_ratio)
        check_numbers(0, 1, class_dropout=class_dropout)
        if class_dropout == 1:
            raise InputError("class_dropout must be below 1, got 1: no label would be learned.")
        if embed_dim % 4:
            raise InputError(f"embed_dim must be a multiple of 4, of sines and cosines on two axes, got {embed_dim}.")
        if int(embed_dim * mlp_ratio) < 1:
            raise InputError(f"mlp_ratio={mlp_ratio} leaves the MLP no width.")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        blocks = pair("block_grid", block_grid)
        self.patch_size, self.in_channels, self.num_classes = patch_size, in_channels, num_classes
        self.out_channels = 2 * in_channels if learned_variance else in_channels
        self.input_size = pair("input_size", input_size)
        self.base_grid = self._grid(*self.input_size)
        self.embed_dim = embed_dim

        self.x_embedder = PatchEmbedding(patch_size, in_channels, embed_dim, **factory)
        self.t_embedder = TimestepEmbedding(embed_dim, **factory)
        labels = LabelEmbedding(num_classes, embed_dim, class_dropout, **factory) if num_classes else None
        self.y_embedder = labels
        self.blocks = nn.ModuleList(
            DiTBlock(
                embed_dim,
                mlp_ratio,
                HeadMixAttention(
                    embed_dim,
                    num_heads,
                    **attention_of_layer(index, depth, global_every, head_mix, head_mix_args, core_args),
                    core=core,
                    grid=self.base_grid,
                    block_grid=blocks,
                    qk_norm=qk_norm,
                    cpe=cpe,
                    output_norm=output_norm,
                    output_gate=output_gate,
                    qkv_bias=True,
                    **factory,
                ),
                **factory,
            )
            for index in range(depth)
        )
        self.final_layer = FinalLayer(embed_dim, patch_size, self.out_channels, **factory)
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
        """All arguments of the constructor, as plain values: `HeadMixDiT(**architecture)` is the same model."""
        values = {name: value for name, value in self.config.items() if not name.startswith("_")}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def has_null_class(self) -> bool:
        """Tell whether label ``num_classes`` stands for no class, which classifier-free guidance needs."""
        return self.y_embedder is not None and self.y_embedder.dropout > 0

    def forward(self, x: Tensor, t: Tensor | float, y: Tensor | None = None) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise InputError(f"x must be [B, {self.in_channels}, H, W], got {tuple(x.shape)}.")
        grid = self._grid(x.shape[2], x.shape[3])
        c = self._condition(x, t, y)
        x = self.x_embedder(x)
        x = x + sincos_positions(self.embed_dim, grid, self.base_grid, like=x)
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, c, grid)
            else:
                x = block(x, c, grid)
        return self._to_images(self.final_layer(x, c), grid)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        p = self.patch_size
        if height % p or width % p or not (height and width):
            raise InputError(f"latent size {height}x{width} is no multiple of the patch size {p}.")
        return height // p, width // p

    def _condition(self, x: Tensor, t: Tensor | float, y: Tensor | None) -> Tensor:
        t = torch.as_tensor(t, device=x.device)
        if t.ndim > 1 or (t.ndim == 1 and t.shape[0] not in (1, x.shape[0])):
            raise InputError(f"t must be one number or [B] with B = {x.shape[0]}, got shape {tuple(t.shape)}.")
        c = self.t_embedder(t.expand(x.shape[0]))
        if self.y_embedder is None:
            if y is not None:
                raise InputError("labels given, but the model is unconditional (num_classes=0).")
            return c
        if y is None:
            highest = self.num_classes - 1 + self.has_null_class
            raise InputError(f"the model needs labels y [B], 0 to {highest}.")
        if y.ndim != 1 or y.shape[0] not in (1, x.shape[0]):
            raise InputError(f"labels y must be [B] with B = {x.shape[0]}, got shape {tuple(y.shape)}.")
        return c + self.y_embedder(y)

    def _to_images(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        sizes = {"h": grid[0], "w": grid[1], "p": self.patch_size, "q": self.patch_size}
        return rearrange(patches, "b (h w) (p q c) -> b c (h p) (w q)", **sizes)

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

    def set_block_grid(self, block_grid: int | tuple[int, int]) -> None:
        """Change the number of token blocks and resample the mixing matrices."""
        blocks = pair("block_grid", block_grid)
        for block in self.blocks:
            cast(HeadMixAttention, block.attn).set_block_grid(blocks)
        self.register_to_config(block_grid=blocks)
