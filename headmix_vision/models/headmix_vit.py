"""DeiT and ViT whose attention is a :class:`~headmix_vision.layers.HeadMixAttention`, registered with timm.

Everything outside the attention layer is timm's VisionTransformer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.fx
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.layers import resample_abs_pos_embed, to_2tuple
from timm.models import build_model_with_cfg
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers import HeadMixAttention, undecayed_parameters
from headmix_vision.models.names import Variant, register_family

__all__ = ["HeadMixVisionTransformer"]  # timm appends the registered names


class _AttentionArguments(nn.Module):
    """Stands in for an attention layer until the token grid is known: timm builds blocks before telling it."""

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__()
        self.arguments = {"dim": dim, **kwargs}


class HeadMixVisionTransformer(VisionTransformer):
    """timm's VisionTransformer with mixed heads.

    With ``dynamic_img_size`` the blocks follow the grid of each call: M stays, the blocks grow. When gradient
    checkpointing is on as well, run the backward pass before a forward pass with another aspect ratio.

    Args:
        core: ``"softmax"``, ``"linear"``, ``"mhla"`` or ``"hih"``.
        head_mix: mix across feature heads, or None.
        block_grid: token blocks along height and width, for block-wise cores.
        core_args: options of the core, see :mod:`headmix_vision.layers.cores`.
        head_mix_args: options of the head mix, see :mod:`headmix_vision.layers.head_mixes`.
        cpe, output_norm, output_gate: options of :class:`~headmix_vision.layers.HeadMixAttention`.
        kwargs: arguments of timm's VisionTransformer. ``qk_norm`` normalises over the full width.

    Raises:
        InputError: if the image size does not fit the patch size, the blocks do not fit the token grid, the heads do
            not divide the width, an option is unknown, or ``patch_drop_rate`` is set, which removes tokens from
            the grid.
    """

    def __init__(
        self,
        *,
        core: str = "mhla",
        head_mix: str | None = None,
        block_grid: int | tuple[int, int] = (4, 4),
        core_args: dict[str, Any] | None = None,
        head_mix_args: dict[str, Any] | None = None,
        cpe: bool = False,
        output_norm: bool = False,
        output_gate: bool = False,
        weight_init: Literal["skip", "reset", "jax", "jax_nlhb", "moco", ""] = "",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("patch_drop_rate", 0.0) > 0:
            raise InputError("patch_drop_rate removes tokens from the grid which the attention layer relies on.")
        if not (kwargs.get("dynamic_img_size") or kwargs.get("dynamic_img_pad")):
            _check_image_fits(kwargs.get("img_size", 224), kwargs.get("patch_size", 16))
        super().__init__(attn_layer=_AttentionArguments, weight_init="skip", **kwargs)
        for block in self.blocks:
            block.attn = HeadMixAttention(
                **cast(_AttentionArguments, block.attn).arguments,
                core=core,
                head_mix=head_mix,
                grid=self.patch_embed.grid_size,
                block_grid=to_2tuple(block_grid),
                num_prefix_tokens=self.num_prefix_tokens,
                core_args=core_args,
                head_mix_args=head_mix_args,
                cpe=cpe,
                output_norm=output_norm,
                output_gate=output_gate,
            )
        self.weight_init_mode = "reset" if weight_init == "skip" else weight_init
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | undecayed_parameters(self)

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Change the resolution and resample position embeddings; the mixing matrix keeps its block grid."""
        _check_image_fits(img_size or self.patch_embed.img_size, patch_size or self.patch_embed.patch_size)
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for attention in self._attentions():
            attention.set_grid(self.patch_embed.grid_size)

    def set_block_grid(self, block_grid: int | tuple[int, int]) -> None:
        """Change the number of token blocks and resample the mixing matrices."""
        for attention in self._attentions():
            attention.set_block_grid(to_2tuple(block_grid))

    def _attentions(self) -> list[HeadMixAttention]:
        return [cast(HeadMixAttention, block.attn) for block in self.blocks]

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        self._check_images(x)
        return super().forward_features(x, attn_mask, is_causal)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._check_images(x)
        return super().forward_intermediates(x, *args, **kwargs)

    def _check_images(self, x: Tensor) -> None:
        if not self.dynamic_img_size and self.patch_embed.strict_img_size:
            _check_image_size(x, self.patch_embed.img_size)

    def _pos_embed(self, x: Tensor) -> Tensor:
        if self.dynamic_img_size:
            for attention in self._attentions():
                attention.grid = replace(attention.grid, shape=(x.shape[1], x.shape[2]))
        return super()._pos_embed(x)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Resample a position embedding stored for another resolution, then load as usual."""
        key, stored = prefix + "pos_embed", state_dict.get(prefix + "pos_embed")
        if stored is not None and self.pos_embed is not None and stored.shape[1] != self.pos_embed.shape[1]:
            first = 0 if self.no_embed_class else self.num_prefix_tokens
            grid = resample_positions(stored[:, first:], self.patch_embed.grid_size)
            state_dict[key] = torch.cat([stored[:, :first], grid], dim=1)
        super()._load_from_state_dict(state_dict, prefix, *args)


def resample_positions(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resample the position embeddings of patches, [1, N, C], to another grid: [1, N', C].

    N positions are taken to be of the grid itself if it has as many, else of a square.

    Raises:
        InputError: if N is no square.
    """
    count = positions.shape[1]
    if count == math.prod(grid):
        return positions
    if not is_square(count):
        raise InputError(f"{count} stored positions are no square grid, and the model's {grid} has {math.prod(grid)}.")
    side = math.isqrt(count)
    return resample_abs_pos_embed(positions, list(grid), [side, side], num_prefix_tokens=0)


def is_square(count: int) -> bool:
    """Tell whether a number of patches can be a square grid."""
    return count > 0 and math.isqrt(count) ** 2 == count


def _check_image_fits(img_size: int | tuple[int, int], patch_size: int | tuple[int, int]) -> None:
    image, patch = to_2tuple(img_size), to_2tuple(patch_size)
    if image[0] % patch[0] or image[1] % patch[1]:
        raise InputError(f"img_size {image} is no multiple of the patch size {patch}.")


@torch.fx.wrap
def _check_image_size(x: Tensor, img_size: tuple[int, int]) -> None:
    if tuple(x.shape[-2:]) != tuple(img_size):
        raise InputError(
            f"images are {x.shape[-2]}x{x.shape[-1]} pixels, the model takes {img_size[0]}x{img_size[1]}: "
            "resize them, or use set_input_size or dynamic_img_size."
        )


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


SIZES = {
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
}
# A DeiT for the embedded 8x8 digits: one token per pixel, 16 blocks of 2x2 tokens.
DIGITS = {"patch_size": 1, "embed_dim": 64, "depth": 4, "num_heads": 2, "cpe": True}
DIGITS_CFG = _cfg(
    num_classes=10, input_size=(1, 8, 8), crop_pct=1.0, interpolation="bilinear", mean=(0.305,), std=(0.376,)
)


def _members(family: str) -> Callable[[str], Iterator[tuple[str, Variant]]]:
    """Return a function that yields the sizes and resolutions of a family; a size without a resolution means 224 px."""
    inception = {"mean": IMAGENET_INCEPTION_MEAN, "std": IMAGENET_INCEPTION_STD} if family == "vit" else {}
    mean = {"class_token": False, "global_pool": "avg"}

    def members(core: str) -> Iterator[tuple[str, Variant]]:
        # DeiT pools by the mean as in the MHLA paper; with softmax it reads a class token as in timm, and so does ViT.
        pooling = mean if family == "deit" and core != "softmax" else {}
        for size, dims in SIZES.items():
            arguments = {"patch_size": 16, **dims, **pooling}
            for suffix, pixels, crop in (("", 224, 0.9), ("_patch16_224", 224, 0.9), ("_patch16_384", 384, 1.0)):
                cfg = _cfg(input_size=(3, pixels, pixels), crop_pct=crop, **inception)
                yield f"{size}{suffix}", Variant(arguments, cfg)
        if family == "deit":
            yield "digits", Variant({**DIGITS, **mean}, DIGITS_CFG)

    return members


def _create_headmix_vit(variant: str, pretrained: bool = False, **kwargs: Any) -> HeadMixVisionTransformer:
    return build_model_with_cfg(
        HeadMixVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **kwargs,
    )


for _family in ("deit", "vit"):
    register_family(_family, _members(_family), _create_headmix_vit, __name__)
