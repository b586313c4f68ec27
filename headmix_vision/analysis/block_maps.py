"""Draw the learned block mixing matrices of MHLA as maps over the image.

M blocks, T x Y x X the block grid, T = 1 for images.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor

from headmix_vision.analysis.attention_matrices import Layer
from headmix_vision.analysis.figures import Panels, Picture, positive_scale, signed_scale
from headmix_vision.analysis.measures import effective_count, mean_distance, relative_distance
from headmix_vision.layers import MHLACore, MixingMatrix
from headmix_vision.ops import TokenBlocks

_ROWS = ("learned", "change")
_TEXT = """{title}: block mixing, {blocks} blocks
Each small map belongs to the query block that has its dot, and shows the weights of all key blocks at their places,
and their change since the start. Rows of the matrix are scaled to sum 1{frames}{prefix}."""
_FRAMES = ". Frames of keys stand side by side, frames of queries one below the other"
_PREFIX = ". The cell above a map is the block of the prefix tokens, the map above all is for its queries"


class _Matrix(NamedTuple):
    """The matrix of a layer, or of one of its heads; float64.

    Attributes:
        learned, start: [M, M], its weights and those that it starts with, rows scaled to sum 1.
        row_sums: [M], what the rows summed to.
    """

    layer: Layer
    head: int | None
    learned: Tensor
    start: Tensor
    row_sums: Tensor

    @property
    def title(self) -> str:
        return self.layer.title if self.head is None else f"{self.layer.title}, head {self.head}"


def draw_block_mixing(layers: Sequence[Layer], title: str) -> Picture | None:
    """Draw the mixing matrix of each layer with the core MHLA, and its difference from the initial one.

    Args:
        layers: The attention layers of a network.
        title: What the network is called.

    Returns:
        The picture, or None where no layer has the core MHLA.
    """
    cores = [(layer, core) for layer in layers if isinstance(core := layer.attention.core, MHLACore)]
    if not cores:
        return None
    blocks = cores[0][1].mixing.blocks
    matrices = [matrix for layer, core in cores for matrix in _matrices(layer, core.mixing)]
    maps = [(lay_out(one.learned, blocks), lay_out(one.learned - one.start, blocks)) for one in matrices]
    height, width = maps[0][0].shape
    text = _TEXT.format(
        title=title,
        blocks="x".join(map(str, blocks.block_grid)),
        frames=_FRAMES if len(blocks.block_grid) == 3 else "",
        prefix=_PREFIX if blocks.num_prefix_blocks else "",
    )
    pixel_in = max(1.5 / max(height, width), 0.03)
    learned, changed = zip(*maps, strict=True)
    scales = [positive_scale("share of the weight", learned), signed_scale("change of the share", changed)]
    titles, rows = [one.title for one in matrices], dict.fromkeys(_ROWS, height / width)
    panels = Panels(text, scales, titles, rows, pixel_in * width, gap_in=0.25)
    for column, of_matrix in enumerate(maps):
        for row, scale in enumerate(scales):
            panel = panels.show(row, column, of_matrix[row], scale)
            _add_dots(panel, blocks, pixel_in)
    numbers = [_numbers(one, blocks) for one in matrices]
    change = sum(one["distance_from_start"] for one in numbers) / len(numbers)
    return Picture(panels.figure, numbers, f"{len(cores)} layers; mean distance from the start: {change:.2f}")


def lay_out(weights: Tensor, blocks: TokenBlocks) -> Tensor:
    """Lay out a matrix as maps over the block grid, which themselves lie on the block grid.

    Args:
        weights: [M, M], query blocks by key blocks, the prefix block first.
        blocks: The partition into these blocks.

    Returns:
        [height, width], NaN between the maps.
    """
    places = _places(blocks)
    queries, keys = places.queries, places.keys
    height = int(queries[:, 0].max() + keys[:, 0].max()) + 1
    width = int(queries[:, 1].max() + keys[:, 1].max()) + 1
    picture = weights.new_full((height, width), math.nan)
    at = queries[:, None] + keys[None]
    picture[at[..., 0], at[..., 1]] = weights
    return picture


class _Places(NamedTuple):
    """Rows and columns: [M, 2] of the corner of each query block's map, and of each key block within a map."""

    queries: Tensor
    keys: Tensor


def _places(blocks: TokenBlocks) -> _Places:
    frames, height, width = (1,) * (3 - len(blocks.block_grid)) + blocks.block_grid
    prefix, gap = blocks.num_prefix_blocks, 1 if frames == 1 else 2
    t, y, x = torch.cartesian_prod(*map(torch.arange, (frames, height, width))).reshape(-1, 3).T
    keys = torch.stack([prefix + y, t * (width + 1) + x], dim=1)
    map_height, map_width = prefix + height + gap, frames * (width + 1) - 1 + gap
    queries = torch.stack([(prefix + t * height + y) * map_height, x * map_width], dim=1)
    if prefix:
        corner = torch.zeros(1, 2, dtype=torch.long)
        keys, queries = torch.cat([corner, keys]), torch.cat([corner, queries])
    return _Places(queries, keys)


def _add_dots(panel: Axes, blocks: TokenBlocks, pixel_in: float) -> None:
    """Mark in each map the block that it belongs to."""
    places = _places(blocks)
    y, x = (places.queries + places.keys).T.numpy()
    size = min(3.5, 72 * pixel_in * 0.5)
    panel.plot(x, y, "o", color="black", markeredgecolor="white", markeredgewidth=size / 8, markersize=size)


def _matrices(layer: Layer, mixing: MixingMatrix) -> list[_Matrix]:
    fresh = deepcopy(mixing)
    fresh.reset_parameters()
    learned, start = mixing().detach().double(), fresh().detach().double()
    parts = (_shares(learned), _shares(start), learned.sum(-1))
    if learned.ndim == 2:
        return [_Matrix(layer, None, *parts)]
    return [_Matrix(layer, head, *of_head) for head, of_head in enumerate(zip(*parts, strict=True))]


def _shares(weights: Tensor) -> Tensor:
    """Scales rows to sum 1."""
    return weights / weights.sum(-1, keepdim=True)


def _numbers(matrix: _Matrix, blocks: TokenBlocks) -> dict[str, Any]:
    learned, start = matrix.learned, matrix.start
    return matrix.layer.numbers(**{} if matrix.head is None else {"head": matrix.head}) | {
        "block_grid": [*blocks.block_grid],
        "prefix_blocks": blocks.num_prefix_blocks,
        "distance_from_start": relative_distance(learned, start),
        "blocks_per_query": float(effective_count(learned).mean()),
        "blocks_per_query_at_start": float(effective_count(start).mean()),
        "own_share": float(learned.diagonal().mean()),
        "own_share_at_start": float(start.diagonal().mean()),
        "distance_in_tokens": _mean_distance(learned, blocks),
        "distance_in_tokens_at_start": _mean_distance(start, blocks),
        "distance_in_tokens_if_uniform": _mean_distance(torch.ones_like(start), blocks),
        "row_sums": [float(matrix.row_sums.min()), float(matrix.row_sums.max())],
    }


def _mean_distance(weights: Tensor, blocks: TokenBlocks) -> float:
    """Compute how far queries look, in tokens: weighted mean distance of block centres, without the prefix block."""
    centers, prefix = blocks.block_centers(), blocks.num_prefix_blocks
    return float(mean_distance(weights[prefix:, prefix:], centers, centers))
