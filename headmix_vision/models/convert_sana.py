"""Conversion of a Sana image transformer of diffusers, whose attention is linear, to MHLA.

B batch, N = H * W tokens, C width, M blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from diffusers import ContextParallelConfig, SanaTransformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # loading a pipeline, diffusers looks for it here
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_choice
from headmix_vision.layers.block_mixing import MIXING_INITS
from headmix_vision.models.converted import ConvertedModel, check_layers, new_mixing
from headmix_vision.models.diffusers_features import found_by_diffusers
from headmix_vision.ops import TokenBlocks, TokenGrid, mhla
from headmix_vision.ops.dispatch import as_axes

_EPS = 1e-15  # of Sana's denominator


class SanaMHLAProcessor(nn.Module):
    """MHLA (arXiv 2601.07832) from the projections of a Sana layer: ReLU features, denominator plus 1e-15.

    With equal mixing weights this is Sana's linear attention. Sums and their quotient are float32 at least, as there.

    Args:
        block_grid, token_grid: blocks along (H, W), and the tokens for whose blocks the mixing matrix is drawn.
        mixing_init: ``init`` of :class:`~headmix_vision.layers.MixingMatrix`.
        like: a weight of the layer, whose device and type the mixing matrix takes; float32 at least.

    Shape:
        ``hidden_states`` [B, N, C] -> [B, N, C]; ``attn.call_grid`` is its tokens (H, W), from the transformer block.
    """

    def __init__(
        self, block_grid: tuple[int, ...], token_grid: tuple[int, ...], mixing_init: str, like: Tensor
    ) -> None:
        super().__init__()
        self.mixing = new_mixing(block_grid, token_grid, mixing_init, like)

    def bind(self, grid: TokenGrid | tuple[int, ...]) -> TokenBlocks:
        """Divide a token grid (H, W) into the blocks; InputError if they do not fit it."""
        return TokenBlocks.from_grid(grid, self.mixing.blocks.block_grid)

    def forward(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        assert encoder_hidden_states is None, "self-attention alone"
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        dtype = torch.promote_types(v.dtype, torch.float32)
        q, k, v = (x.to(dtype).unflatten(-1, (attn.heads, -1)) for x in (q, k, v))
        v = F.pad(v, (0, 1), value=1.0)  # one more value of 1 sums the denominator
        sums = mhla(q, k, v, self.mixing(), self.bind(attn.call_grid), normalizer=None, feature_map="relu", eps=0.0)
        out = (sums[..., :-1] / (sums[..., -1:] + _EPS)).flatten(2).to(hidden_states.dtype)
        out = attn.to_out[1](attn.to_out[0](out))
        return out.clip(-65504, 65504) if out.dtype == torch.float16 else out


def _tell_grid(block: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Give a layer the token grid of the call, the last arguments of its transformer block."""
    cast(Any, block).attn1.call_grid = tuple(arguments[-2:])


@found_by_diffusers
class SanaMHLATransformer2DModel(ConvertedModel, SanaTransformer2DModel):
    """A Sana image transformer whose self-attention is MHLA, in all layers or some; weights are named as in diffusers.

    Weights of MHLA are ``transformer_blocks.i.attn1.processor.mixing.*``. Any size is taken that leaves each block a
    token. Threads may call one model only with images of one size.

    Args:
        block_grid: blocks along height and width.
        mhla_layers: layers with MHLA, from 0; all for None.
        mixing_init: of new mixing matrices: ``"uniform"``, which is linear attention, or ``"locality"``.
        sana: arguments of ``diffusers.SanaTransformer2DModel``.

    Shape:
        as ``diffusers.SanaTransformer2DModel``: latents [B, C, H, W].

    Raises:
        InputError: if a layer is out of range, blocks do not fit the model's own size, or an option is unknown.
    """

    ignore_for_config = ("sana",)
    _keep_in_fp32_modules: ClassVar[list[str]] = ["mixing"]

    @register_to_config
    def __init__(
        self,
        *,
        block_grid: tuple[int, int] = (4, 4),
        mhla_layers: Sequence[int] | None = None,
        mixing_init: str = "uniform",
        **sana: Any,
    ) -> None:
        super().__init__(**sana)
        self._install()

    def _install(self) -> None:
        """Put the processors that the configuration asks for into the self-attention layers."""
        config = cast(Any, self.config)
        token_grid = _token_grid(config)
        layers = check_layers(config.mhla_layers, len(self.transformer_blocks))
        for index, block in enumerate(self.transformer_blocks):
            block.register_forward_pre_hook(_tell_grid)
            if index in layers:
                like = block.attn1.to_out[0].weight
                processor = SanaMHLAProcessor(tuple(config.block_grid), token_grid, config.mixing_init, like)
                block.attn1.set_processor(processor)

    def enable_parallelism(self, *, config: Any, cp_plan: Any = None) -> None:
        """Divide work among devices as diffusers does, which has no context parallelism for Sana.

        Raises:
            InputError: for context parallelism.
        """
        if getattr(config, "context_parallel_config", config if isinstance(config, ContextParallelConfig) else None):
            raise InputError(
                "context parallelism does not apply to Sana, whose feed-forward layers convolve the whole image: use it"
                " for a converted Wan."
            )
        super().enable_parallelism(config=config, cp_plan=cp_plan)


def _token_grid(config: Any) -> tuple[int, int]:
    """Return the tokens of the model's own size; raise InputError if an option does not fit."""
    check_choice("mixing_init", config.mixing_init, MIXING_INITS)
    side = config.sample_size // config.patch_size
    TokenBlocks.from_grid((side, side), as_axes("block_grid", config.block_grid))
    return side, side


def sana_to_mhla(
    transformer: SanaTransformer2DModel,
    block_grid: tuple[int, int] = (4, 4),
    layers: Sequence[int] | None = None,
    mixing_init: str = "uniform",
) -> SanaMHLATransformer2DModel:
    """Copy a Sana transformer of diffusers, with MHLA in the place of its linear self-attention.

    With the uniform mixing matrix the copy computes the same function, and learns to mix from there. A pipeline takes
    the copy as its ``transformer``.

    >>> from diffusers import SanaTransformer2DModel
    >>> sana = SanaTransformer2DModel(num_layers=1, num_attention_heads=2, num_cross_attention_heads=2,
    ...     cross_attention_head_dim=32, cross_attention_dim=64, caption_channels=16)
    >>> sana_to_mhla(sana).transformer_blocks[0].attn1.processor.__class__.__name__
    'SanaMHLAProcessor'

    Args:
        transformer: the model to convert; it is not changed and shares no memory with the result.
        layers: layers that become MHLA, from 0; all for None.
        block_grid, mixing_init: see :class:`SanaMHLATransformer2DModel`.

    Raises:
        InputError: if the model is not a ``SanaTransformer2DModel``, or an option does not fit.
    """
    if type(transformer) is not SanaTransformer2DModel:
        raise InputError(f"transformer must be a diffusers.SanaTransformer2DModel, got {type(transformer).__name__}.")
    layers = check_layers(layers, len(transformer.transformer_blocks))
    options = {"block_grid": as_axes("block_grid", block_grid), "mhla_layers": layers, "mixing_init": mixing_init}
    _token_grid(SimpleNamespace(**{**transformer.config, **options}))
    for index in layers:
        processor = transformer.transformer_blocks[index].attn1.processor
        if type(processor) is not SanaLinearAttnProcessor2_0:
            raise InputError(f"transformer_blocks.{index}.attn1 has a {type(processor).__name__}, not diffusers' own.")
    return SanaMHLATransformer2DModel.copy_of(transformer, options)
