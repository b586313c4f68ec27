"""Draw what query tokens attend to as maps over the image, networks side by side.

N tokens of a grid, prefix tokens left out.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import normalize

from headmix_vision.analysis.attention_matrices import attention_layers, record_attention
from headmix_vision.analysis.figures import Panels, positive_scale
from headmix_vision.errors import InputError
from headmix_vision.layers import SwappedAttention
from headmix_vision.ops import TokenGrid

Place = tuple[int, ...]
_PANEL_IN = 1.3
_TEXT = """{title}: what query tokens attend to
A row for each image and query token, which has the dot. Colours are the share of a token in the absolute weights of the
query's row of the attention matrix, prefix tokens left out, mean of heads; in multiples of the share that equal weights
would have. Colours grow with its square root."""


class AttentionMap(NamedTuple):
    """Attention of one query token over all tokens.

    Attributes:
        model, layer, image: Network, attention layer and image of the map.
        place: The query token's place on the grid.
        grid: Tokens along each axis.
        shares: [N], float64, sum 1 in raster order.
    """

    model: str
    layer: int
    image: int
    place: Place
    grid: tuple[int, ...]
    shares: Tensor

    def rows(self) -> list[dict[str, Any]]:
        """List the shares as rows of a table; tokens by their number on the grid."""
        about = {"model": self.model, "layer": self.layer, "image": self.image, "grid": "x".join(map(str, self.grid))}
        query = _number(self.place, self.grid)
        return [{**about, "query": query, "key": key, "share": share} for key, share in enumerate(self.shares.tolist())]


def attention_maps(
    model: str, network: nn.Module, inputs: Sequence[Any], places: Sequence[Place], layers: Collection[int] | None
) -> list[AttentionMap]:
    """Compute the maps of query tokens of a network.

    Args:
        model: What the network is called.
        network: A network with attention layers of this package.
        inputs: Its arguments, of B images.
        places: Places of the query tokens on the grid; that in the middle when there are none.
        layers: Numbers of the attention layers; the last when None.

    Raises:
        InputError: If a place is not on the grid; and see `record_attention`.
    """
    found = attention_layers(network)
    if not found:
        raise InputError(f"{model} has no attention layers of this package")
    layer = found[-1].attention
    grid = layer.grid
    if isinstance(layer, SwappedAttention):
        grid = TokenGrid(layer.grid_of_call.shape, grid.num_prefix_tokens)
    places = list(places) or [tuple(size // 2 for size in grid.shape)]
    for place in places:
        if len(place) != len(grid.shape) or any(not 0 <= at < size for at, size in zip(place, grid.shape, strict=True)):
            raise InputError(
                f"token {','.join(map(str, place))} is not on the grid of {model}, which is"
                f" {'x'.join(map(str, grid.shape))}"
            )
    queries = [grid.num_prefix_tokens + _number(place, grid.shape) for place in places]
    maps = []
    for attention in record_attention(network, *inputs, queries=queries, layers=layers or [len(found) - 1]):
        for image in range(attention.num_images):
            weights = attention.token_weights(attention.matrices(image))[..., grid.num_prefix_tokens :]
            shares = normalize(weights, p=1, dim=-1).abs().mean(0).cpu()
            maps += [
                AttentionMap(model, attention.layer.number, image, place, grid.shape, of_query)
                for place, of_query in zip(places, shares, strict=True)
            ]
    return maps


def draw_maps(maps: Sequence[AttentionMap], pictures: Tensor | None, title: str) -> Figure:
    """Draw maps: a row for each image and query token, a column for each network and layer, the images in front.

    Args:
        maps: Of one or several networks, for the same images and places.
        pictures: The images in [0, 1], float32 [B, C, *grid]; None of latents, which have none.
        title: What stands above.
    """
    columns = list(dict.fromkeys((one.model, one.layer) for one in maps))
    rows = {f"image {image}\ntoken {','.join(map(str, place))}": (image, place) for _, _, image, place, *_ in maps}
    relative = {(one.model, one.layer, one.image, one.place): _flat(one.shares * len(one.shares), one) for one in maps}
    height, width = next(iter(relative.values())).shape
    scale = positive_scale("multiples of the uniform share", list(relative.values()), power=0.5)
    titles = [*(["image"] if pictures is not None else []), *(f"{model}\nlayer {layer}" for model, layer in columns)]
    panel_in = max(_PANEL_IN, 0.06 * width)
    panels = Panels(
        _TEXT.format(title=title), [scale], titles, dict.fromkeys(rows, height / width), panel_in, gap_in=0.2
    )
    by_model = {one.model: one for one in maps}
    for row, (image, place) in enumerate(rows.values()):
        first = 0
        if pictures is not None:
            panel, first = panels.rows[row][0], 1
            picture = _side_by_side(pictures[image].movedim(0, -1)).numpy()
            panel.imshow(np.repeat(picture, 3, -1) if picture.shape[-1] == 1 else picture, interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            _mark(panel, maps[0].grid, place, picture.shape[1], picture.shape[0])
        for column, (model, layer) in enumerate(columns, start=first):
            shown = relative[model, layer, image, place]
            panel = panels.show(row, column, shown, scale)
            _mark(panel, by_model[model].grid, place, shown.shape[1], shown.shape[0])
    return panels.figure


def _number(place: Place, grid: tuple[int, ...]) -> int:
    return int(np.ravel_multi_index(place, grid))


def _flat(values: Tensor, one: AttentionMap) -> Tensor:
    return _side_by_side(values.view(*one.grid, 1))[..., 0]


def _side_by_side(grid: Tensor) -> Tensor:
    """Lay the frames of a grid [..., H, W, C] side by side: [H, frames * W, C]."""
    frames = grid.reshape(math.prod(grid.shape[:-3]), *(1, *grid.shape[:-1])[-2:], grid.shape[-1])
    return torch.cat([*frames], dim=1)


def _mark(panel: Any, grid: tuple[int, ...], place: Place, width: int, height: int) -> None:
    """Mark a place of a grid of tokens in a panel of so many pixels."""
    frames, rows, columns = (1, 1, *grid)[-3:]
    frame, y, x = (0, 0, *place)[-3:]
    at = ((frame * columns + x + 0.5) * width / (frames * columns) - 0.5, (y + 0.5) * height / rows - 0.5)
    panel.plot(*at, "o", color="black", markeredgecolor="white", markersize=3.5, markeredgewidth=0.5)
