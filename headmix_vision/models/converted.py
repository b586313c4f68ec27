"""Base class of diffusers models whose self-attention was replaced by MHLA: options, loading, mixing matrices."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from torch import Tensor

from headmix_vision.errors import InputError, check_counts
from headmix_vision.layers import MixingMatrix
from headmix_vision.models.diffusers_features import MISSING_NOTE, without_notes
from headmix_vision.ops import TokenBlocks


class ConvertedModel:
    """Base class to put before a model class of diffusers; a subclass takes the constructor arguments of both."""

    @staticmethod
    def _get_init_keys(input_class: type) -> set[str]:
        """Name all arguments that a configuration may hold, including the class of diffusers (diffusers' hook)."""
        classes = [base for base in input_class.__mro__ if issubclass(base, ConfigMixin) and "__init__" in vars(base)]
        return {name for base in classes for name in inspect.signature(vars(base)["__init__"]).parameters}

    @classmethod
    def copy_of(cls, transformer: Any, options: dict[str, Any]) -> Any:
        """Copy a model of diffusers, and put in the attention that the options ask for (``_install``).

        Raises:
            InputError: if the model runs on several devices already.
        """
        if transformer._parallel_config is not None:
            raise InputError("the model is parallel already: convert it before enable_parallelism.")
        model = copy.deepcopy(transformer)
        model.__class__ = cls
        model.register_to_config(**options)
        model._install()
        return model

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Load what `save_pretrained` wrote; arguments as in diffusers, which would draw missing weights at random.

        Raises:
            InputError: if weights are missing, as they are in a folder of the model that was converted.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        with without_notes(MISSING_NOTE):  # an error says it in one line
            loaded = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, output_loading_info=True, **kwargs
            )
        if loaded[1]["missing_keys"]:
            raise InputError(
                f"{pretrained_model_name_or_path} lacks weights of {cls.__name__}, first"
                f" {min(loaded[1]['missing_keys'])}: load an unconverted model by its own class, then convert it."
            )
        return loaded if wants_info else loaded[0]


def check_layers(layers: Sequence[int] | None, depth: int) -> list[int]:
    """Return which layers to convert, all for None, in order.

    Raises:
        InputError: if it is not a list of layers, or a layer is not a whole number from 0 to ``depth - 1``.
    """
    if layers is None:
        return list(range(depth))
    if not isinstance(layers, (list, tuple, range)):
        raise InputError(f"layers must be a list of whole numbers, got {layers!r}.")
    for layer in layers:
        check_counts(0, depth - 1, layers=layer)
    return sorted(set(layers))


def new_mixing(
    block_grid: tuple[int, ...], token_grid: tuple[int, ...], init: str, like: Tensor, clip: bool = True
) -> MixingMatrix:
    """Make a mixing matrix on the device of ``like``, in float32 or, beside weights of float64, in that."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    blocks = TokenBlocks.from_grid(token_grid, block_grid)
    return MixingMatrix(blocks, init=init, device=like.device, dtype=dtype, clip=clip)
