"""Token grids of stored position embeddings, and resampling to the grid of a model.

A number of positions tells no grid: 36 are 4 x 9 or 6 x 6. State dicts of our models name it in their metadata, which
torch.save keeps and safetensors does not. Of other weights it is the grid of the images' size in the configuration
beside them, as in timm's model folders; where nothing names it, the weights are refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import clean_state_dict, get_pretrained_cfg
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor

from headmix_vision.errors import InputError, pair

GRID = "grid"  # in the metadata of a module
_GRID_OF_POSITIONS = "pos_embed_grid"  # among weights for `filter_pretrained`: timm's configurations keep no metadata
Grid = tuple[int, int]


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
