"""The token grid of a model's current call, between its patch embedding and its swapped layers."""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError, pair


class CallGrid(ABC):
    """Base class of the forward hook of a patch embedding that keeps the grid of the call.

    A copy of the model has a grid of its own. A copy of a part, such as peft makes to train it, shares the grid of the
    model, in which the copy takes the place of the part.

    Args:
        model: the model with the patch embedding.
        shape: the grid before the first call.
    """

    varies = False

    def __init__(self, model: Any, shape: tuple[int, ...]) -> None:
        self.model = model
        self.first = self.seen = shape
        self.trained: dict[int, tuple[tuple[int, ...], ...]] = {}  # grids without a backward pass, by their size
        self.waits = True

    def note(self, shape: tuple[int, ...]) -> None:
        """Note the grid of a call that may have a backward pass."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        trained, count = self.trained if self.waits else {}, math.prod(shape)
        self.trained = {**trained, count: (*{*trained.get(count, ()), shape},)}
        self.waits = True

    def of_backward(self, count: int) -> tuple[int, ...]:
        """Return the grid of a layer that gradient checkpointing computes again, by its number of tokens."""
        self.waits = False
        shape, *others = self.trained.get(count) or (self.shape,)
        if others:
            raise InputError(
                f"gradient checkpointing cannot tell grids of {count} tokens apart: run the backward pass of one before"
                " the model is called on another."
            )
        return shape

    @property
    @abstractmethod
    def embed(self) -> Any:
        """The patch embedding that the model has now."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The grid of the current call."""
        return self.seen

    def attach(self) -> None:
        """Register the hook."""
        self.embed.register_forward_hook(self)

    @abstractmethod
    def __call__(self, embed: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        """Take the grid from a call of the embedding."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CallGrid:
        if id(self.model) not in memo:
            return self
        copied = copy.copy(self)
        copied.model = memo[id(self.model)]
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the call, whose sizes torch.export may have traced with: those have no numbers."""
        return {**self.__dict__, "seen": self.first, "trained": {}, "waits": True}


class ImageGrid(CallGrid):
    """Token grid of the images that timm's patch embedding was last called with."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, tuple(model.patch_embed.grid_size))

    @property
    def embed(self) -> Any:
        return self.model.patch_embed

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.embed.grid_size) if self.embed.strict_img_size else self.seen

    def __call__(self, embed: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        if not self.embed.strict_img_size:
            self.seen = tuple(self.embed.dynamic_feat_size(inputs[0].shape[-2:]))
            self.note(self.seen)


class PixelGrid(CallGrid):
    """Token grid of the images that the patch embedding of transformers was last called with.

    Attributes:
        mask_axes: number of axes of the mask that the model was last called with, 0 without one. Compiled models of
            transformers give a mask to their layers in any case.
    """

    def __init__(self, model: Any) -> None:
        self.mask_axes = 0
        self.patch = pair("patch_size", model.config.patch_size)
        super().__init__(model, self._of(pair("image_size", model.config.image_size)))

    @property
    def embed(self) -> Any:
        return self.model.embeddings.patch_embeddings

    def attach(self) -> None:
        super().attach()
        self.names = [*inspect.signature(type(self.model).forward).parameters][1:]
        self.model.register_forward_pre_hook(self.note_mask, with_kwargs=True)

    def note_mask(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the mask of a call of the model."""
        mask = dict(zip(self.names, args, strict=False), **kwargs).get("attention_mask")
        self.mask_axes = 0 if mask is None else mask.ndim

    def __call__(self, embed: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        self.seen = self._of(inputs[0].shape[-2:])
        self.note(self.seen)

    def _of(self, size: Sequence[int]) -> tuple[int, ...]:
        return size[0] // self.patch[0], size[1] // self.patch[1]
