"""The attention layers of a network."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from headmix_vision.layers import CORES, HEAD_MIXES, HeadMixAttention


class Layer(NamedTuple):
    """An attention layer of a network.

    Attributes:
        number: Its number among the attention layers, from 0.
        name: Its name as a module, such as `blocks.0.attn`.
        attention: The layer itself.
    """

    number: int
    name: str
    attention: HeadMixAttention

    @property
    def title(self) -> str:
        """What stands above the layer's panels."""
        return f"layer {self.number}"

    @property
    def core_name(self) -> str:
        """The name of its core."""
        return _registered(CORES, self.attention.core)

    @property
    def head_mix_name(self) -> str:
        """The name of its head mix; empty without one."""
        return _registered(HEAD_MIXES, self.attention.head_mix) if self.attention.head_mix is not None else ""

    def numbers(self, **numbers: Any) -> dict[str, Any]:
        """Put the layer's number and name in front of numbers."""
        return {"layer": self.number, "name": self.name, **numbers}


def attention_layers(network: nn.Module) -> list[Layer]:
    """List the attention layers of a network in the order of its modules."""
    found = [(name, module) for name, module in network.named_modules() if isinstance(module, HeadMixAttention)]
    return [Layer(number, name, module) for number, (name, module) in enumerate(found)]


def _registered(table: Mapping[str, type[nn.Module]], module: nn.Module) -> str:
    return next((name for name, kind in table.items() if type(module) is kind), type(module).__name__)
