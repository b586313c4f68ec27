"""Draw what a network has learned to mix: heads (IHA, MEA) and token blocks (MHLA)."""

from collections.abc import Callable, Sequence

from torch import nn

from headmix_vision.analysis.attention_layers import Layer, attention_layers
from headmix_vision.analysis.block_maps import draw_block_mixing
from headmix_vision.analysis.explicit_heads import draw_explicit
from headmix_vision.analysis.figures import Picture
from headmix_vision.analysis.interleaved_heads import draw_interleaved
from headmix_vision.errors import InputError

# The kinds of pictures, by the names of their files.
PICTURES: dict[str, Callable[[Sequence[Layer], str], Picture | None]] = {
    "iha": draw_interleaved,
    "mea": draw_explicit,
    "mhla": draw_block_mixing,
}


def draw_mixing(network: nn.Module, name: str, title: str) -> dict[str, Picture]:
    """Draw the pictures that a network has, by the names of their files.

    Raises:
        InputError: If it has none.
    """
    layers = attention_layers(network)
    drawn = {kind: draw(layers, title) for kind, draw in PICTURES.items()}
    pictures = {kind: picture for kind, picture in drawn.items() if picture is not None}
    if not pictures:
        raise InputError(f"nothing can be drawn of {name}: it has neither the head mix iha, nor mea, nor the core mhla")
    return pictures
