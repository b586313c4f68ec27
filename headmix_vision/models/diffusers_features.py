"""Features of diffusers that models support: class by name, caching, adapters, fp8 storage, compiling by block."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, TypeVar

import diffusers
import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.layers import MixingMatrix

C = TypeVar("C", bound=type)
ABSENT_NOTE = "An error occurred while trying to fetch"
MISSING_NOTE, UNKNOWN_NOTE = "are newly initialized:", "were not used when initializing"


def found_by_diffusers(cls: C, *names: str) -> C:
    """Enter a class into diffusers, where ``AutoModel`` and ``DiffusionPipeline.from_pretrained`` look for its name.

    Args:
        cls: the class.
        names: further names, under which earlier versions saved it.
    """
    for name in (cls.__name__, *names):
        setattr(diffusers, name, cls)
    return cls


@contextmanager
def without_notes(*texts: str) -> Iterator[None]:
    """Leave out what diffusers logs while it loads weights, where a message holds one of the texts."""

    def keep(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in texts)

    logger = logging.getLogger("diffusers.models.modeling_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


class FeaturedModel(ModelMixin, ConfigMixin, PeftAdapterMixin, CacheMixin):
    """A diffusion transformer of ``DiTBlock`` in ``blocks``, with the features of diffusers' own models.

    ``add_adapter`` needs the package peft. Layerwise casting leaves embeddings, modulations, the last layer and norms
    as they are, as it does in diffusers' own DiT; mixing matrices and other parameters outside of linear layers and
    convolutions are not cast.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ("DiTBlock",)
    _repeated_blocks: ClassVar[list[str]] = ["DiTBlock"]
    _skip_layerwise_casting_patterns: ClassVar[list[str]] = ["embedder", "norm", "adaLN_modulation", "final_layer"]

    @property
    def block_frames(self) -> int | None:
        """Frames of a row of blocks, where a clip is drawn row by row; else None."""
        return None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Load what `save_pretrained` wrote; arguments as in diffusers, which would draw missing weights at random.

        Raises:
            InputError: if weights are missing or unknown.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        with without_notes(ABSENT_NOTE, MISSING_NOTE, UNKNOWN_NOTE):  # an error says it in one line
            model, info = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **kwargs)
        # buffers of a later version are for their modules to make up
        missing = set(info["missing_keys"]) & dict(model.named_parameters()).keys()
        for problem, names in (("lacks", missing), ("has unknown", info["unexpected_keys"])):
            if names:
                raise InputError(f"{pretrained_model_name_or_path} {problem} weights, first {min(names)}.")
        return (model, info) if wants_info else model

    def _fix_state_dict_keys_on_load(self, state_dict: dict[str, Tensor]) -> None:
        """Add the block grids that folders of version 0.1.0 lack: diffusers calls this, and warns of missing ones."""
        super()._fix_state_dict_keys_on_load(state_dict)
        for name, module in self.named_modules():
            if isinstance(module, MixingMatrix):
                state_dict.setdefault(f"{name}.block_grid", torch.tensor(module.blocks.block_grid))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass (timm's name for it)."""
        if enable:
            self.enable_gradient_checkpointing()
        else:
            self.disable_gradient_checkpointing()

    def enable_cache(self, config: Any) -> None:
        """Reuse outputs of an earlier step where the first block's hardly changed: ``FirstBlockCacheConfig``.

        Raises:
            InputError: for another configuration, a model of one block, or one that draws clips row by row.
        """
        name, depth = type(self).__name__, len(self.blocks)
        if not isinstance(config, FirstBlockCacheConfig):
            raise InputError(f"{name} takes a FirstBlockCacheConfig, got {type(config).__name__}: it would not act.")
        if depth < 2 or self.block_frames is not None:
            reason = "one block" if depth < 2 else "causal='rows', whose rows are drawn outside of the cache"
            raise InputError(f"first-block caching does not apply to a model with {reason}.")
        _register_block(type(self.blocks[0]))
        super().enable_cache(config)

    def set_attention_backend(self, backend: str) -> NoReturn:
        """Refuse diffusers' choice of a kernel, which these layers do not read.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"set_attention_backend({backend!r}) does not act on {type(self).__name__}: PyTorch chooses the kernel of"
            " the softmax core (torch.nn.attention.sdpa_kernel), core_args={'impl': ...} that of the others."
        )


def _register_block(cls: type) -> None:
    # Entering a class makes diffusers import all its transformers: only when it is asked for.
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry

    TransformerBlockRegistry.register(cls, TransformerBlockMetadata(return_hidden_states_index=0))
