"""Features of diffusers that models support: class by name, caching, adapters, fp8 storage, compiling by block."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, TypeVar

import diffusers
from diffusers.configuration_utils import ConfigMixin
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from headmix_vision.errors import InputError

C = TypeVar("C", bound=type)


def found_by_diffusers(cls: C) -> C:
    """Enter a class into diffusers, where ``AutoModel`` and ``DiffusionPipeline.from_pretrained`` look for its name."""
    setattr(diffusers, cls.__name__, cls)
    return cls


def as_output(sample: Tensor, return_dict: bool | None) -> Any:
    """Return a tensor as it is for None, in diffusers' output for True, in a tuple for False."""
    if return_dict is None:
        return sample
    return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


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
