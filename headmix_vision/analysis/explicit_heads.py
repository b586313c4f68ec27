"""Draw the learned compositions of multi-head explicit attention (MEA).

g key-value heads, h' component heads.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from headmix_vision.analysis.attention_matrices import Layer
from headmix_vision.analysis.figures import Panels, Picture, signed_scale
from headmix_vision.analysis.measures import cosines, effective_count, effective_rank, mean_cosine, relative_distance
from headmix_vision.layers import ExplicitHeads

_WHAT = ("keys", "values")
_ROWS = (*_WHAT, "keys: change", "values: change")
_NUMBERED = 16  # most heads whose numbers are written
_TEXT = """{title}: compositions of heads
Rows are heads, columns the components that they are composed of. Heads are in the order of their similarity: leaves of
the average linkage of their rows by cosine, keys and values side by side. A component stands where the heads stand that
start from it, so that the start is the diagonal; the change is what has been learned since."""


def draw_explicit(layers: Sequence[Layer], title: str) -> Picture | None:
    """Draw the compositions of keys and values of each layer with MEA.

    Args:
        layers: The attention layers of a network.
        title: What the network is called.

    Returns:
        The picture, or None where no layer has MEA.
    """
    mixed = [(layer, mix) for layer in layers if isinstance(mix := layer.attention.head_mix, ExplicitHeads)]
    if not mixed:
        return None
    learned, starts = [mix.mix.detach().double() for _, mix in mixed], [_start(mix) for _, mix in mixed]
    changes = [weight - start for weight, start in zip(learned, starts, strict=True)]
    _, heads, components = learned[0].shape
    text = _TEXT.format(title=title)
    scales = [signed_scale("weight", learned), signed_scale("change since the start", changes)]
    titles, rows = [layer.title for layer, _ in mixed], dict.fromkeys(_ROWS, heads / components)
    pixel_in = max(min(1.6 / components, 2.0 / heads, 0.25), 0.04)
    panels = Panels(text, scales, titles, rows, pixel_in * components, gap_in=0.3)
    numbers = []
    for column, ((layer, _), weight, start) in enumerate(zip(mixed, learned, starts, strict=True)):
        order = similarity_order(torch.cat([*weight], dim=1))
        columns = _component_order(start[0], order)
        for row, matrix in enumerate([*weight, *(weight - start)]):
            panel = panels.show(row, column, matrix[order][:, columns], scales[row // len(_WHAT)])
            if heads <= _NUMBERED:
                panel.set_yticks(range(heads), map(str, order))
            if components <= _NUMBERED and row == len(_ROWS) - 1:
                panel.set_xticks(range(components), map(str, columns), rotation=90 if components > 10 else 0)
        sizes = {"heads": heads, "components": components}
        numbers.append(layer.numbers(**sizes, **_numbers(weight, start), head_order=order, component_order=columns))
    ranks = [sum(of_layer[name]["effective_rank"] for of_layer in numbers) / len(numbers) for name in _WHAT]
    return Picture(
        panels.figure,
        numbers,
        f"{len(mixed)} layers; mean effective rank of {min(heads, components)}:"
        f" keys {ranks[0]:.2f}, values {ranks[1]:.2f}",
    )


def _numbers(weight: Tensor, start: Tensor) -> dict[str, Any]:
    return {
        name: {
            "distance_from_start": relative_distance(matrix, begin),
            "effective_rank": effective_rank(matrix),
            "components_per_head": float(effective_count(matrix).mean()),
            "cosine_between_heads": mean_cosine(matrix),
        }
        for name, matrix, begin in zip(_WHAT, weight, start, strict=True)
    }


def similarity_order(rows: Tensor) -> list[int]:
    """Order rows [n, length] so that similar ones are neighbours.

    The order is that of the leaves of hierarchical clustering: average linkage of one minus the cosine, each branch
    turned so that neighbours are as near as can be, and the whole so that the first row comes before the last.
    """
    count = len(rows)
    if count < 3:
        return [*range(count)]
    distance = (1 - cosines(rows)).clamp(min=0).fill_diagonal_(0)
    tree = linkage(squareform(distance.numpy(), checks=False), "average", optimal_ordering=True)
    order = [int(leaf) for leaf in leaves_list(tree)]
    return order if order.index(0) < order.index(count - 1) else order[::-1]


def _start(mix: ExplicitHeads) -> Tensor:
    """Return the weights that the mix starts with: [2, g, h']."""
    fresh = deepcopy(mix)
    fresh.reset_parameters()
    return fresh.mix.detach().double()


def _component_order(start: Tensor, heads: list[int]) -> list[int]:
    """Order components by the mean place of the heads which start from them: [g, h'] -> h' numbers."""
    places = torch.arange(len(heads), dtype=torch.float64)
    mean_place = (places[:, None] * start[heads]).sum(0) / start.sum(0)
    return [int(component) for component in mean_place.argsort(stable=True)]
