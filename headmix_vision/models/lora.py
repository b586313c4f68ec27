"""LoRA of converted transformers by peft: adapters and MHLA's own weights are trained, all other weights are frozen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from headmix_vision.errors import InputError, check_counts, check_positive, require_extra
from headmix_vision.files.tensors import state_sha256
from headmix_vision.models.prompted import PromptedTransformer, open_prompted

_OF_MHLA = ".attn1.processor."


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685) of a transformer; beside them only MHLA's own weights are trained.

    Args:
        rank: Rank of the adapters; 0 for none, which trains all weights.
        alpha: Factor of the adapters, times their rank; the rank when null.
        targets: Layers with adapters, by the ends of their names.

    Raises:
        MissingExtraError: If peft is not installed.
        InputError: If a value is out of range.
    """

    rank: int = 0
    alpha: float | None = None
    targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])

    def __post_init__(self) -> None:
        if self.rank:
            require_extra("lora", "model.lora")
        check_counts(0, **{"lora.rank": self.rank})
        if self.alpha is not None:
            check_positive(**{"lora.alpha": self.alpha})
        if not (
            isinstance(self.targets, list) and self.targets and all(isinstance(name, str) for name in self.targets)
        ):
            raise InputError(f"lora.targets must be a list of names, got {self.targets!r}")


class LoraTransformer(PromptedTransformer):
    """A converted transformer with adapters; its state dict lacks the frozen weights, which its copies share.

    Args:
        transformer: The converted transformer, which is changed.
        config: The adapters.

    Attributes:
        frozen_sha256: Hash of the frozen weights.

    Raises:
        InputError: If there are no such layers.
    """

    def __init__(self, transformer: Any, config: LoraConfig) -> None:
        super().__init__(transformer)
        import peft

        frozen = {name: weight for name, weight in transformer.state_dict().items() if _OF_MHLA not in name}
        self.frozen_sha256 = state_sha256(frozen)
        alpha = config.rank if config.alpha is None else config.alpha
        try:
            transformer.add_adapter(peft.LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=config.targets))
        except ValueError as error:
            raise InputError(f"model.lora does not fit the transformer: {' '.join(str(error).split())[:300]}") from None
        for name, parameter in transformer.named_parameters():
            if _OF_MHLA in name:
                parameter.requires_grad_(True)
        self.register_load_state_dict_post_hook(_keep_frozen)

    def frozen(self) -> dict[str, nn.Parameter]:
        """Return the frozen weights by name."""
        return {name: weight for name, weight in self.named_parameters() if not weight.requires_grad}

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> Any:
        """Return the weights that are trained."""
        state = super().state_dict(*args, prefix=prefix, **options)
        for name in self.frozen():
            del state[prefix + name]
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> LoraTransformer:
        for parameter in self.frozen().values():
            memo.setdefault(id(parameter), parameter)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def take_adapter(self, *, merge: bool) -> dict[str, Any]:
        """Remove the adapters, and return the arguments with which the pipeline's `save_lora_weights` writes them.

        Args:
            merge: Add them to the weights of their layers first.
        """
        from peft.utils import get_peft_model_state_dict

        weights = get_peft_model_state_dict(self.transformer, adapter_name="default")
        settings = self.transformer.peft_config["default"].to_dict()
        if merge:
            self.transformer.fuse_lora()
        self.transformer.unload_lora()
        return {"transformer_lora_layers": weights, "transformer_lora_adapter_metadata": settings}


def _keep_frozen(network: LoraTransformer, keys: Any) -> None:
    """Let weights be loaded that lack the frozen ones."""
    frozen = network.frozen()
    keys.missing_keys[:] = [
        name for name in keys.missing_keys if "transformer." + name.partition("transformer.")[2] not in frozen
    ]


def open_lora(
    folder: str, layers: Sequence[int] | None, options: dict[str, Any], config: LoraConfig, frozen_sha256: str
) -> LoraTransformer:
    """Open the transformer of a run that trained adapters, before its weights are loaded.

    Args:
        folder, layers, options: As in `open_prompted`.
        config: The adapters.
        frozen_sha256: Hash of the frozen weights in the run.

    Raises:
        InputError: Also if the frozen weights are other ones.
    """
    network = LoraTransformer(open_prompted(folder, layers, options).transformer, config)
    if network.frozen_sha256 != frozen_sha256:
        raise InputError(f"the transformer of {folder} has other weights than when its adapters were trained")
    return network
