"""The diffusion transformer (DiT, arXiv 2212.09748) with mixed heads on images, a model of diffusers."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # a pipeline looks for it beside the class
from torch import Tensor

from headmix_vision.checks import check_counts, pair
from headmix_vision.models.diffusers_features import as_output, found_by_diffusers
from headmix_vision.models.grid_dit import GridDiT


@found_by_diffusers
class HeadMixDiT(GridDiT):
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
        cpe, lepe, input_norm, output_gate, output_norm, qk_norm: options of
            :class:`~headmix_vision.layers.HeadMixAttention`.
        head_mix_args: options of the head mix, see :mod:`headmix_vision.layers.head_mixes`.
        global_every: k, at least 2, for a plain layer, without head mix and window, as the last of each k; 0 for none.
        softmax_every: k, at least 2, for a layer of the softmax core as the first of each k; 0 for none.
        sit_time: embed ``1 - t / 1000``, the time of SiT from noise (0) to data (1), for its weights
            (:func:`headmix_vision.models.convert_dit.convert_dit_state_dict`).
        device, dtype: of the parameters; they are no part of the configuration.

    Shape:
        ``x`` [B, C, H, W], ``t`` [B] in [0, 1000] (or one number), ``y`` [B] int64 -> [B, C or 2C, H, W]; with the
        learned variance the second C channels interpolate its logarithm. ``return_dict=True`` returns diffusers'
        ``Transformer2DModelOutput``, False a tuple.

    Raises:
        InputError: if the input size is no multiple of the patch size or, in patches, below the block grid; if the
            width is no multiple of 4; if channels, times or labels do not fit, or a label is out of range; if an option
            is unknown or out of range.
    """

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
        lepe: int = 0,
        input_norm: bool = False,
        output_gate: bool = False,
        output_norm: bool = False,
        qk_norm: bool = False,
        head_mix_args: dict[str, Any] | None = None,
        global_every: int = 0,
        softmax_every: int = 0,
        sit_time: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(1, patch_size=patch_size)
        self.patch_size = patch_size
        self._build(
            input_size=pair("input_size", input_size),
            patch=(patch_size, patch_size),
            block_grid=pair("block_grid", block_grid),
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
        )

    def forward(self, x: Tensor, t: Tensor | float, y: Tensor | None = None, return_dict: bool | None = None) -> Any:
        return as_output(self._predict(x, t, y), return_dict)

    def set_block_grid(self, block_grid: int | tuple[int, int]) -> None:
        """Change the number of token blocks and resample the mixing matrices."""
        self._set_block_grid(pair("block_grid", block_grid))
