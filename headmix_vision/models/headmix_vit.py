"""DeiT and ViT whose attention is a :class:`~headmix_vision.layers.HeadMixAttention`, registered with timm.

Everything outside the attention layer is timm's VisionTransformer; patches are projected by a matrix product.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.fx
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.layers import PatchEmbed, get_act_layer, get_norm_layer, resample_abs_pos_embed
from timm.models import build_model_with_cfg, clean_state_dict, get_pretrained_cfg
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_choice, check_counts, check_keywords, check_numbers, keywords, pair
from headmix_vision.layers import HeadMixAttention, SoftmaxCore, undecayed_parameters
from headmix_vision.layers.attention import attention_of_layers
from headmix_vision.layers.convolutions import PatchConv2d
from headmix_vision.models.names import Variant, register_family
from headmix_vision.models.swap import record_block_grid

__all__ = ["HeadMixVisionTransformer"]  # timm appends the registered names

GRID = "grid"  # in the metadata of a module
_GRID_OF_POSITIONS = "pos_embed_grid"  # among weights for `filter_pretrained`: timm's configurations keep no metadata
Grid = tuple[int, int]


class _AttentionArguments(nn.Module):
    """Placeholder of an attention layer until the token grid is known: timm builds blocks before it names the grid."""

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__()
        self.arguments = {"dim": dim, **kwargs}


class _PatchEmbed(PatchEmbed):
    """timm's embedding of patches, with its weights, computed faster."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.proj.__class__ = PatchConv2d


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
        global_every: k, at least 2, for a plain layer, without head mix and window, as the last of each k; 0 for none.
        softmax_every: k, at least 2, for a layer of the softmax core as the first of each k; 0 for none.
        cpe, lepe, input_norm, output_norm, output_gate: options of :class:`~headmix_vision.layers.HeadMixAttention`.
        kwargs: arguments of timm's VisionTransformer, except ``attn_layer``, and ``patch_drop_rate``, which must be 0.
            ``qk_norm`` normalises over the full width.

    Raises:
        InputError: if the image size does not fit the patch size, the blocks do not fit the token grid, the heads do
            not divide the width, or an option is unknown or out of range.
    """

    _is_loaded = False

    def __init__(
        self,
        *,
        core: str = "mhla",
        head_mix: str | None = None,
        block_grid: int | tuple[int, int] = (4, 4),
        core_args: dict[str, Any] | None = None,
        head_mix_args: dict[str, Any] | None = None,
        global_every: int = 0,
        softmax_every: int = 0,
        cpe: bool = False,
        lepe: int = 0,
        input_norm: bool = False,
        output_norm: bool = False,
        output_gate: bool = False,
        weight_init: Literal["skip", "reset", "jax", "jax_nlhb", "moco", ""] = "",
        **kwargs: Any,
    ) -> None:
        _check_arguments(kwargs, weight_init)
        blocks = pair("block_grid", block_grid)
        if not (kwargs.get("dynamic_img_size") or kwargs.get("dynamic_img_pad")):
            _check_image_fits(kwargs.get("img_size", 224), kwargs.get("patch_size", 16))
        kwargs.setdefault("embed_layer", _PatchEmbed)
        super().__init__(attn_layer=_AttentionArguments, weight_init="skip", **kwargs)
        layers = attention_of_layers(
            len(self.blocks),
            core=core,
            core_args=core_args,
            head_mix=head_mix,
            head_mix_args=head_mix_args,
            global_every=global_every,
            softmax_every=softmax_every,
        )
        for block, layer in zip(self.blocks, layers, strict=True):
            block.attn = HeadMixAttention(
                **cast(_AttentionArguments, block.attn).arguments,
                **layer,
                grid=self.patch_embed.grid_size,
                block_grid=blocks,
                num_prefix_tokens=self.num_prefix_tokens,
                cpe=cpe,
                lepe=lepe,
                input_norm=input_norm,
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
        image, patch = _check_image_fits(
            img_size or self.patch_embed.img_size, patch_size or self.patch_embed.patch_size
        )
        for attention in self._attentions():  # before the rest, which would stay changed if the first refused
            attention.set_grid((image[0] // patch[0], image[1] // patch[1]))
        super().set_input_size(img_size=img_size, patch_size=patch_size)

    def set_block_grid(self, block_grid: int | tuple[int, int]) -> None:
        """Change the number of token blocks and resample the mixing matrices."""
        blocks = pair("block_grid", block_grid)
        attentions = self._attentions()
        for attention in [one for one in attentions if not isinstance(one.core, SoftmaxCore)] or attentions:
            attention.set_block_grid(blocks)
        record_block_grid(self, blocks)

    def _attentions(self) -> list[HeadMixAttention]:
        return [cast(HeadMixAttention, block.attn) for block in self.blocks]

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        self._check_images(x)
        return super().forward_features(x, attn_mask, is_causal)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._check_images(x)
        return super().forward_intermediates(x, *args, **kwargs)

    def _check_images(self, x: Tensor) -> None:
        _check_channels(x, self.in_chans)
        if not self.dynamic_img_size and self.patch_embed.strict_img_size:
            _check_image_size(x, self.patch_embed.img_size)

    def _pos_embed(self, x: Tensor) -> Tensor:
        if self.dynamic_img_size:
            for attention in self._attentions():
                attention.grid = replace(attention.grid, shape=(x.shape[1], x.shape[2]))
        # Sums keep the strides of their first term: a convolution's strides would slow down the norms of all blocks.
        return super()._pos_embed(x).contiguous()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as usual, and name the token grid in the metadata of the state dict."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {})
        if prefix[:-1] in metadata:
            metadata[prefix[:-1]][GRID] = tuple(self.patch_embed.grid_size)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        """Resample a position embedding stored for another token grid, then load as usual."""
        key, stored = prefix + "pos_embed", state_dict.get(prefix + "pos_embed")
        if stored is not None and self.pos_embed is not None:
            first, own = 0 if self.no_embed_class else self.num_prefix_tokens, self.patch_embed.grid_size
            given = is_size_given(self) and not self._is_loaded  # of the file that timm loads into a new model
            grid = find_grid(self, stored.shape[1] - first, named=metadata.get(GRID), of_config=given)
            self._is_loaded = True
            if grid is None:
                raise refuse_grid(stored.shape[1] - first, own, metadata.get(GRID))
            if grid != own:
                state_dict[key] = torch.cat([stored[:, :first], carry_over(stored[:, first:], grid, own)], dim=1)
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


# A number of positions tells no grid: 36 are 4 x 9 or 6 x 6. State dicts of our models name it in their metadata, which
# torch.save keeps and safetensors does not. Of other weights it is the grid of the images' size in the configuration
# beside them, as in timm's model folders; where nothing names it, the weights are refused.


def state_dict_in(checkpoint: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the weights of a checkpoint, which may lie under one of some names, without prefixes of wrappers."""
    found = next((checkpoint[name] for name in names if isinstance(checkpoint.get(name), Mapping)), checkpoint)
    weights = OrderedDict(clean_state_dict(dict(found)))
    weights._metadata = getattr(found, "_metadata", {})  # type: ignore[attr-defined]
    return weights


def name_grid(state_dict: dict[str, Tensor], img_size: Any) -> dict[str, Tensor]:
    """Note among weights for :func:`filter_pretrained` of what size of images they are."""
    kernel = state_dict.get("patch_embed.proj.weight")
    if kernel is None or kernel.ndim != 4:
        return state_dict
    sizes = zip(pair("img_size", img_size), kernel.shape[2:], strict=True)
    return {**state_dict, _GRID_OF_POSITIONS: torch.tensor([size // patch for size, patch in sizes])}


def named_grid(state_dict: Mapping[str, Any]) -> Grid | None:
    """Return the token grid that the metadata of a state dict names."""
    return next((about[GRID] for about in getattr(state_dict, "_metadata", {}).values() if GRID in about), None)


def find_grid(
    model: VisionTransformer, count: int, named: Any = None, patch: Grid | None = None, of_config: bool | None = False
) -> Grid | None:
    """Return the token grid of weights with ``count`` positions of patches; None where nothing tells it.

    Args:
        model: the model to fill. Its configuration in timm tells the size of images.
        count: positions, without prefix tokens.
        named: the grid that the weights or the user name.
        patch: pixels of a patch of the weights along each axis; the model's own where it is None.
        of_config: whether the configuration belongs to these weights: it counts before the model's own grid then. None
            where that is not known: nothing tells the grid if both have as many positions and differ.
    """
    own: Grid = model.patch_embed.grid_size
    if named is not None:
        grid = pair("source_grid", named)
        return grid if math.prod(grid) == count else None
    config = _grid_of_config(model, patch or model.patch_embed.patch_size)
    config = config if config and math.prod(config) == count else None
    if config and (of_config or math.prod(own) != count):
        return config
    if math.prod(own) != count or (of_config is None and config not in (None, own)):
        return None
    return own


def _grid_of_config(model: VisionTransformer, patch: Grid) -> Grid | None:
    arguments, config = getattr(model, "pretrained_model_args", None) or {}, getattr(model, "pretrained_cfg", None)
    size = arguments.get("img_size") or (config or {}).get("input_size")
    if size is None:
        return None
    height, width = pair("img_size", size if isinstance(size, int) else tuple(size)[-2:])
    return height // patch[0], width // patch[1]


def is_size_stated(model: VisionTransformer) -> bool:
    """Tell whether the configuration has another size of images than the model's name, which somebody has stated."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    usual = get_pretrained_cfg(config.get("architecture") or "", allow_unregistered=True)
    return usual is not None and tuple(usual.input_size)[-2:] != tuple(config["input_size"])[-2:]


def is_size_given(model: VisionTransformer) -> bool:
    """Tell whether the configuration was given a size of images for weights that it does not name itself."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    return is_size_stated(model) and not any(config.get(source) for source in ("url", "file", "hf_hub_id"))


def refuse_grid(count: int, grid: Grid, named: Any = None) -> InputError:
    """Return the error for positions whose grid is not known, or is not the one that was named."""
    if named is not None:
        h, w = named
        return InputError(f"the weights hold {count} positions of patches, not the {h} x {w} of source_grid.")
    return InputError(
        f"the weights hold {count} positions of patches, of a grid that nothing tells, and the model has {grid[0]} x"
        f" {grid[1]}: name it, as source_grid=(H, W) of headmix_vision.models.convert.convert_state_dict, or by the"
        " images' size in pixels, pretrained_cfg_overlay={'input_size': (C, H, W)} of timm.create_model."
    )


def carry_over(positions: Tensor, source: Grid, grid: Grid) -> Tensor:
    """Resample the positions of patches, [1, N, C], from one grid to another: [1, N', C]."""
    if source == grid:
        return positions
    return resample_abs_pos_embed(positions, list(grid), list(source), num_prefix_tokens=0)


class _WithoutPositions:
    """A model whose position embedding timm's filter does not see, so that it resamples none."""

    pos_embed = None

    def __init__(self, model: VisionTransformer) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def filter_pretrained(state_dict: Mapping[str, Any], model: VisionTransformer) -> dict[str, Any]:
    """Convert weights of timm's configurations as timm does; their grid is named in the metadata of the result."""
    source = state_dict_in(state_dict, "model", "state_dict")
    noted = source.pop(_GRID_OF_POSITIONS, None)
    weights = OrderedDict(checkpoint_filter_fn(source, _WithoutPositions(model)))  # type: ignore[arg-type]
    grid = named_grid(source) if noted is None else tuple(noted.tolist())
    if grid is None and "pos_embed" in weights and model.pos_embed is not None:
        kernel = source.get("patch_embed.proj.weight")
        patch = tuple(kernel.shape[-2:]) if kernel is not None and kernel.ndim == 4 else None
        first = 0 if model.no_embed_class else model.num_prefix_tokens
        given = "state_dict" in cast("dict[str, Any]", model.pretrained_cfg) and not is_size_stated(model)
        count, own = weights["pos_embed"].shape[1] - first, model.patch_embed.grid_size
        grid = find_grid(model, count, patch=patch, of_config=None if given else True)
        if grid is None:
            raise refuse_grid(count, own)
    if grid is not None:
        weights._metadata = {"": {GRID: grid}}  # type: ignore[attr-defined]
    return weights


_COUNTS = ("in_chans", "embed_dim", "depth", "num_heads")
_RATES = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")
_CHOICES: dict[str, tuple[str, ...]] = {
    "global_pool": ("", "avg", "avgmax", "max", "token", "map", "prr"),
    "pos_embed": ("", "none", "learn"),
}
_WEIGHT_INITS = ("skip", "reset", "jax", "jax_nlhb", "moco", "")


def _check_arguments(given: dict[str, Any], weight_init: str) -> None:
    """Check what timm's VisionTransformer is given, which asserts some of it and lets the rest fail in torch."""
    check_keywords("the model", given, keywords(HeadMixVisionTransformer, leave_out=("attn_layer",)))
    check_counts(1, **{name: given[name] for name in _COUNTS if name in given})
    check_counts(0, **{name: given[name] for name in ("num_classes", "reg_tokens") if name in given})
    check_numbers(0, 1, **{name: given[name] for name in _RATES if name in given})
    for name in _CHOICES.keys() & given.keys():
        check_choice(name, given[name], _CHOICES[name])
    check_choice("weight_init", weight_init, _WEIGHT_INITS)
    ratio = given.get("mlp_ratio", 4.0)
    check_numbers(0, mlp_ratio=ratio)
    if int(given.get("embed_dim", 768) * ratio) < 1:
        raise InputError(f"mlp_ratio={ratio} leaves the MLP no width.")
    for name, find in (("norm_layer", get_norm_layer), ("act_layer", get_act_layer)):
        try:
            find(given.get(name))
        except KeyError:
            raise InputError(f"timm has no {name} {given[name]!r}.") from None
    if given.get("patch_drop_rate"):
        raise InputError(
            f"patch_drop_rate must be 0, got {given['patch_drop_rate']}: dropped patches leave holes in the token grid."
        )
    if given.get("global_pool", "token") == "token" and not given.get("class_token", True):
        raise InputError("global_pool='token' needs class_token=True.")


def _check_image_fits(
    img_size: int | tuple[int, int], patch_size: int | tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return both sizes as pairs, or raise InputError unless the image is whole patches."""
    image, patch = pair("img_size", img_size), pair("patch_size", patch_size)
    if image[0] % patch[0] or image[1] % patch[1]:
        raise InputError(f"img_size {image} is not a multiple of the patch size {patch}.")
    return image, patch


# torch.fx records these calls whole: checks need real arguments.
@torch.fx.wrap
def _check_channels(x: Tensor, channels: int) -> None:
    if x.ndim != 4 or x.shape[1] != channels:
        raise InputError(f"images must be [B, {channels}, H, W], got shape {tuple(x.shape)}.")


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
# Of the paper of MHLA, whose DeiT all have cpe=True and mean pooling (Appendix E): top-1 on ImageNet-1K in %.
PUBLISHED = {("mhla", "tiny"): 75.8, ("mhla", "small"): 81.0, ("linear", "tiny"): 69.8, ("linear", "small"): 77.6}
# A DeiT for the embedded 8x8 digits: one token per pixel, 16 blocks of 2x2 tokens.
DIGITS = {"patch_size": 1, "embed_dim": 64, "depth": 4, "num_heads": 2, "cpe": True}
DIGITS_CFG = _cfg(
    num_classes=10, input_size=(1, 8, 8), crop_pct=1.0, interpolation="bilinear", mean=(0.305,), std=(0.376,)
)


def _members(family: str) -> Callable[[str, str | None], Iterator[tuple[str, Variant]]]:
    """Return a function that yields the sizes and resolutions of a family; a size without a resolution means 224 px."""
    inception = {"mean": IMAGENET_INCEPTION_MEAN, "std": IMAGENET_INCEPTION_STD} if family == "vit" else {}
    mean = {"class_token": False, "global_pool": "avg"}

    def members(core: str, head_mix: str | None) -> Iterator[tuple[str, Variant]]:
        # DeiT pools by the mean as in the MHLA paper; with softmax it reads a class token as in timm, and so does ViT.
        pooling = mean if family == "deit" and core != "softmax" else {}
        for size, dims in SIZES.items():
            arguments = {"patch_size": 16, **dims, **pooling}
            published = PUBLISHED.get((core, size)) if family == "deit" and head_mix is None else None
            notes = published and (f"The {published} % of arXiv 2601.07832 are with cpe=True; a name alone has none.",)
            for suffix, pixels, crop in (("", 224, 0.9), ("_patch16_224", 224, 0.9), ("_patch16_384", 384, 1.0)):
                cfg = _cfg(input_size=(3, pixels, pixels), crop_pct=crop, notes=notes, **inception)
                yield f"{size}{suffix}", Variant(arguments, cfg)
        if family == "deit":
            yield "digits", Variant({**DIGITS, **mean}, DIGITS_CFG)

    return members


def _create_headmix_vit(variant: str, pretrained: bool = False, **kwargs: Any) -> HeadMixVisionTransformer:
    return build_model_with_cfg(
        HeadMixVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=filter_pretrained,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **kwargs,
    )


for _family in ("deit", "vit"):
    register_family(_family, _members(_family), _create_headmix_vit, __name__)
