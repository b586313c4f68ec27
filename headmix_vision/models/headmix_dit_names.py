"""Names of the diffusion transformers in timm.

The network, and with it diffusers, is imported when a model is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from timm.models import build_model_with_cfg

from headmix_vision.errors import InputError, UnknownKeywordError, check_keywords, keywords, require_extra
from headmix_vision.models.names import Variant, register_family

if TYPE_CHECKING:
    from headmix_vision.models.headmix_dit import HeadMixDiT

__all__: list[str] = []  # timm appends the registered names

SIZES = {
    "s": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "b": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "l": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "xl": {"embed_dim": 1152, "depth": 28, "num_heads": 16},
}
PATCH_SIZES = (2, 4, 8)
LATENTS = {"input_size": 32, "in_channels": 4, "num_classes": 1000, "block_grid": (4, 4)}
# A DiT for the embedded 8x8 digits: 4 blocks of 2x2 tokens.
DIGITS = {"input_size": 8, "patch_size": 2, "in_channels": 1, "num_classes": 10}
DIGITS_DIMS = {"embed_dim": 128, "depth": 6, "num_heads": 4, "block_grid": (2, 2), "cpe": True}
# Clips: latents of 16 frames of 256 px, of UCF-101; blocks for each patch size, at most the root of the tokens.
VIDEO_BLOCKS = {2: (4, 4, 4), 4: (2, 4, 4)}
VIDEO_LATENTS = {"input_size": (16, 32, 32), "in_channels": 4, "num_classes": 101, "frame_rate": 8.0}
# Moving digits: 16 blocks of 4 frames of 4x4 tokens.
VIDEO_DIGITS = {"input_size": (16, 32, 32), "patch_size": (1, 4, 4), "in_channels": 1, "num_classes": 40}
VIDEO_DIGITS_DIMS = {**DIGITS_DIMS, "block_grid": (4, 2, 2), "frame_rate": 8.0}


def _cfg(args: dict[str, Any]) -> dict[str, Any]:
    size = args["input_size"]
    return {
        "num_classes": args["num_classes"],
        "input_size": (args["in_channels"], *(size[1:] if isinstance(size, tuple) else (size, size))),  # of a frame
        "first_conv": "x_embedder.proj",
        "classifier": None,
        "license": "apache-2.0",
    }


def _members(core: str, head_mix: str | None) -> Iterator[tuple[str, Variant]]:
    """Yield each size with each patch size, for the usual latents of 256 px, and the model of the embedded digits."""
    for size, dims in SIZES.items():
        for patch_size in PATCH_SIZES:
            arguments = {**LATENTS, "patch_size": patch_size, **dims}
            yield f"{size}_{patch_size}", Variant(arguments, _cfg(arguments))
    yield "digits", Variant({**DIGITS, **DIGITS_DIMS}, _cfg(DIGITS))


def _video_members(core: str, head_mix: str | None) -> Iterator[tuple[str, Variant]]:
    """Yield each size with each patch size, one frame long, for latents of clips, and the model of moving digits."""
    for size, dims in SIZES.items():
        for patch_size, block_grid in VIDEO_BLOCKS.items():
            patch = {"patch_size": (1, patch_size, patch_size), "block_grid": block_grid}
            yield f"{size}_{patch_size}", Variant({**VIDEO_LATENTS, **patch, **dims}, _cfg(VIDEO_LATENTS))
    yield "digits", Variant({**VIDEO_DIGITS, **VIDEO_DIGITS_DIMS}, _cfg(VIDEO_DIGITS))


_OUR_NAMES = {"img_size": "input_size", "in_chans": "in_channels"}


def _create(variant: str, pretrained: bool = False, **kwargs: Any) -> HeadMixDiT:
    for theirs, ours in _OUR_NAMES.items():
        if theirs in kwargs:
            raise UnknownKeywordError(f"{variant} takes {ours}, not {theirs}.")
    if kwargs.pop("features_only", False):
        raise InputError(f"{variant} is a generator: features_only does not apply.")
    require_extra("diffusion", variant)
    from headmix_vision.models.headmix_dit import HeadMixDiT

    def create(**arguments: Any) -> HeadMixDiT:
        check_keywords(variant, arguments, keywords(HeadMixDiT))
        return HeadMixDiT(**arguments)

    return build_model_with_cfg(create, variant, pretrained, kwargs_filter=cast(Any, tuple(_OUR_NAMES)), **kwargs)


register_family("dit", _members, _create, __name__)
register_family("dit_video", _video_members, _create, __name__)
