"""Swapped layers in timm's NaFlexVit, whose batches hold pictures of several grids, with padding.

B batch, N patches of a picture and its padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers.padding import mask_with_grids
from headmix_vision.models.call_grids import CallGrid
from headmix_vision.ops import SampleGrids


class NaFlexGrid(CallGrid):
    """Token grid of the images that NaFlexVit was last called with, all of one size.

    Args:
        model: the model; this is the forward hook of its embedding.
        shape: the grid before the first call.
    """

    varies = True

    @property
    def embed(self) -> Any:
        return self.model.embeds

    def __call__(self, embed: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
        self.seen = tuple(output[1] or ())
        if self.seen:
            self.note(self.seen)

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.seen:
            raise InputError(
                "the grids of the pictures did not reach a swapped layer: the mask of NaFlexVit, which carries them,"
                " was replaced on its way to the blocks."
            )
        return self.seen


class NaFlexEmbeds:
    """Embed patches as NaFlexVit does, and give the grid of each picture to its blocks.

    The mask, which the model hands to all blocks of a call, carries the grids. So each thread has its own, gradient
    checkpointing finds them again, and none outlives its call. The mask marks padding in the keys of all layers.

    Args:
        model: a NaFlexVit; this takes the place of its method ``_forward_embeds``.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        drops = self.model.patch_drop is not None and self.model.training
        if patch_coord is None and not drops:
            embeds: dict[str, Any] = type(self.model)._forward_embeds(self.model, x, None, patch_valid, attn_mask)
            return embeds
        if attn_mask is not None:
            raise InputError("swapped layers take padding from patch_valid: give no attn_mask beside it.")
        return self._embed_samples(x, patch_coord, patch_valid)

    @torch.compiler.disable  # sizes of grids are read from the device
    def _embed_samples(self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None) -> dict[str, Any]:
        model = self.model
        if patch_coord is None:
            shape: tuple[int, int] = tuple(model.embeds.dynamic_feat_size(x.shape[-2:]))
            grids = SampleGrids.of([shape] * len(x), device=x.device)
        else:
            grids = SampleGrids.of_coordinates(patch_coord, patch_valid)
        instead = x.new_zeros(())  # of the mask that the model would make of patch_valid
        embeds: dict[str, Any] = type(model)._forward_embeds(model, x, patch_coord, patch_valid, instead)
        if embeds["keep_indices"] is not None:
            grids = grids.take(embeds["keep_indices"])
        return embeds | {"attn_mask": mask_with_grids(grids, model.num_prefix_tokens, embeds["patches"].dtype)}
