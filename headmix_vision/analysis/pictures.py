"""The kinds of pictures, by the names of their files."""

from collections.abc import Callable, Sequence

from headmix_vision.analysis.block_mixing import draw_block_mixing
from headmix_vision.analysis.explicit_heads import draw_explicit
from headmix_vision.analysis.figures import Picture
from headmix_vision.analysis.interleaved_heads import draw_interleaved
from headmix_vision.analysis.layers import Layer

PICTURES: dict[str, Callable[[Sequence[Layer], str], Picture | None]] = {
    "iha": draw_interleaved,
    "mea": draw_explicit,
    "mhla": draw_block_mixing,
}
