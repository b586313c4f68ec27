"""Draw the learned mixtures of interleaved head attention (IHA).

H heads, P pseudo-heads.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from headmix_vision.analysis.attention_matrices import Layer
from headmix_vision.analysis.figures import Panels, Picture, signed_scale
from headmix_vision.analysis.measures import effective_count, mean_cosine, relative_distance
from headmix_vision.layers import InterleavedHeads

_ROWS = ("queries", "keys", "values", "collapse")
_TEXT = """{title}: pseudo-heads
Queries, keys and values: rows are pseudo-heads, grouped by their number p (left), head by head; columns are the
heads that they are mixed from. Collapse: rows are pseudo-heads, columns the heads that their outputs are added
to{per_head}."""


def draw_interleaved(layers: Sequence[Layer], title: str) -> Picture | None:
    """Draw the mixtures of queries, keys and values, and the collapse, of each layer with IHA.

    Args:
        layers: The attention layers of a network.
        title: What the network is called.

    Returns:
        The picture, or None where no layer has IHA.
    """
    mixed = [(layer, mix) for layer in layers if isinstance(mix := layer.attention.head_mix, InterleavedHeads)]
    if not mixed:
        return None
    _, first = mixed[0]
    matrices = [_matrices(mix) for _, mix in mixed]
    heads, pseudo_heads = first.core_heads, first.repeats
    rows = {name: len(matrix) / heads for name, matrix in zip(_ROWS, matrices[0], strict=True)}
    text = _TEXT.format(title=title, per_head=", a weight for each head" if first.per_head else "")
    scale = signed_scale("weight", [matrix for of_layer in matrices for matrix in of_layer])
    titles = [layer.title for layer, _ in mixed]
    panels = Panels(text, [scale], titles, rows, _panel_width(heads, sum(rows.values())), gap_in=0.15)
    for column, of_layer in enumerate(matrices):
        for row, matrix in enumerate(of_layer):
            panel = panels.show(row, column, matrix, scale)
            step = len(matrix) // pseudo_heads  # rows of one number
            panel.hlines([step * p - 0.5 for p in range(1, pseudo_heads)], -0.5, heads - 0.5, color="0.6", lw=0.6)
            panel.set_yticks([step * p + (step - 1) / 2 for p in range(pseudo_heads)], map(str, range(pseudo_heads)))
    numbers = [layer.numbers(heads=heads, pseudo_heads=mix.repeats, **_numbers(mix)) for layer, mix in mixed]
    means = [
        f"{name} {_mean(numbers, name, 'distance_from_identity'):.2f}"
        f" ({_mean(numbers, name, 'distance_from_identity_at_start'):.2f} at the start)"
        for name in _ROWS[:3]
    ]
    means.append(f"collapse {_mean(numbers, 'collapse', 'distance_from_first_pseudo_head'):.2f} from the first alone")
    return Picture(panels.figure, numbers, f"{len(mixed)} layers; mean distance from identity: {', '.join(means)}")


def _matrices(mix: InterleavedHeads) -> list[Tensor]:
    """Lay out the weights in rows of pseudo-heads: q, k, v [P * H, H] and the collapse [P, H] or [P * H, H]."""
    collapse = mix.collapse.mT if mix.per_head else mix.collapse.permute(1, 2, 0).flatten(0, 1)
    return [*mix.mix.detach().double().flatten(1, 2), collapse.detach().double()]


def _panel_width(heads: int, height: float) -> float:
    """Choose the width of a panel, in inches: the figure is some 12 high if pixels are then large enough to see."""
    return max(min(1.05, 11 / height), 0.03 * heads)


def _numbers(mix: InterleavedHeads) -> dict[str, Any]:
    weights = mix.mix.detach().double()
    identity = torch.eye(mix.core_heads, dtype=torch.float64)
    found: dict[str, Any] = {}
    for name, of_name, start in zip(_ROWS, weights, _start(mix), strict=False):
        found[name] = {
            "distance_from_identity": relative_distance(of_name, identity.expand_as(of_name)),
            "distance_from_identity_at_start": relative_distance(start, identity.expand_as(start)),
            "distance_from_identity_by_pseudo_head": [relative_distance(one, identity) for one in of_name],
            "heads_per_pseudo_head": float(effective_count(of_name).mean()),
            "cosine_between_pseudo_heads": mean_cosine(of_name.transpose(0, 1)),
        }
    collapse = mix.collapse.detach().double()
    first = torch.zeros_like(collapse)
    first[:, 0] = 1 if mix.per_head else identity
    return found | {
        "collapse": {
            "distance_from_first_pseudo_head": relative_distance(collapse, first),
            "pseudo_heads_per_head": float(effective_count(collapse.flatten(1)).mean()),
        }
    }


def _start(mix: InterleavedHeads) -> Tensor:
    """Return weights that the mix may start with, drawn from a fixed seed: [3, P, H, H]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = deepcopy(mix)
        fresh.reset_parameters()
    return fresh.mix.detach().double()


def _mean(numbers: list[dict[str, Any]], name: str, of: str) -> float:
    return sum(of_layer[name][of] for of_layer in numbers) / len(numbers)
