"""Numbers of the attention matrices, of each head and layer: their rank, how widely and how far queries look.

R query tokens, N tokens, H heads.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from headmix_vision.analysis.attention_matrices import LayerAttention, record_attention
from headmix_vision.analysis.line_charts import OKABE_ITO, label_ends, line_figure
from headmix_vision.analysis.measures import effective_count, mean_distance, numerical_rank, stable_rank


class Profile(NamedTuple):
    """Numbers that are computed together.

    Attributes:
        labels: The name of each number, and what it is.
        measure: From the attention of a layer and its matrices of one image [H, R, columns] to the numbers, float64 [H]
            each.
    """

    labels: dict[str, str]
    measure: Callable[[LayerAttention, Tensor], tuple[Tensor, ...]]


def _ranks(attention: LayerAttention, matrices: Tensor) -> tuple[Tensor, ...]:
    if not matrices.isfinite().all():  # LAPACK would raise
        return (matrices.new_full(matrices.shape[:1], torch.nan),) * 2
    singular_values = torch.linalg.svdvals(matrices)
    return numerical_rank(singular_values).double(), stable_rank(singular_values)


def _spread(attention: LayerAttention, matrices: Tensor) -> tuple[Tensor, ...]:
    weights, grid = attention.token_weights(matrices), attention.grid
    entropy = effective_count(weights).log().mean(-1)
    axes = [torch.arange(size, dtype=torch.float64, device=weights.device) for size in grid.shape]
    places = torch.cartesian_prod(*axes).reshape(-1, len(axes))
    tokens = torch.tensor(attention.queries, device=weights.device) - grid.num_prefix_tokens
    on_grid = tokens >= 0
    inside = weights[:, on_grid, grid.num_prefix_tokens :]
    return entropy, mean_distance(inside, places[tokens[on_grid]], places)


PROFILES = {
    "rank": Profile(
        {"rank": "rank (singular values above 1e-6 of the largest)", "stable_rank": "stable rank"},
        _ranks,
    ),
    "entropy": Profile({"entropy": "entropy of a row (nats)", "distance": "mean distance (tokens)"}, _spread),
}


def profile_layers(
    network: nn.Module,
    inputs: Sequence[Any],
    kinds: Sequence[str],
    queries: int | None = None,
    layers: Collection[int] | None = None,
) -> list[dict[str, Any]]:
    """Compute numbers of the attention matrices of a network.

    Args:
        network: A network with attention layers of this package.
        inputs: Its arguments, of B images.
        kinds: Names of `PROFILES`.
        queries: So many query tokens, drawn by a fixed seed; all when None.
        layers: Numbers of the attention layers; all when None.

    Returns:
        A row for each layer and head: `layer`, `name`, `core`, `head_mix`, `head`, `tokens`, `queries`, `images`, and
        the numbers, means over images.

    Raises:
        InputError: See `record_attention`.
    """
    rows = []
    for attention in record_attention(network, *inputs, queries=queries, layers=layers):
        numbers = _mean_of_images(attention, [PROFILES[kind] for kind in kinds])
        layer = attention.layer
        rows += [
            layer.numbers(
                core=layer.core_name,
                head_mix=layer.head_mix_name,
                head=head,
                tokens=attention.grid.num_tokens // attention.grid.repeats,
                queries=len(attention.queries),
                images=attention.num_images,
                **{name: float(of_heads[head]) for name, of_heads in numbers.items()},
            )
            for head in range(layer.attention.num_heads)
        ]
    return rows


def _mean_of_images(attention: LayerAttention, profiles: Sequence[Profile]) -> dict[str, Tensor]:
    names = [name for profile in profiles for name in profile.labels]
    of_images = []
    for image in range(attention.num_images):
        matrices = attention.matrices(image)
        of_images.append(torch.stack([x for profile in profiles for x in profile.measure(attention, matrices)]))
    return dict(zip(names, torch.stack(of_images).mean(0), strict=True))


def draw_profiles(rows: Sequence[dict[str, Any]], labels: dict[str, str], title: str) -> Figure:
    """Draw numbers over the layers: a panel for each, a line for each model, a band from least to largest head.

    Args:
        rows: As from `profile_layers`, each with its `model`.
        labels: The name of each number, and what it is.
        title: What stands above, before the number of tokens.
    """
    figure, panels = line_figure(len(labels), height_in=2.5 * len(labels), sharex=True)
    tokens = ", ".join(str(number) for number in dict.fromkeys(row["tokens"] for row in rows))
    figure.suptitle(f"{title}, {tokens} tokens")
    models = dict.fromkeys(row["model"] for row in rows)
    for axes, (name, label) in zip(panels[:, 0], labels.items(), strict=True):
        for model, colour in zip(models, cycle(OKABE_ITO)):
            of_layers: dict[int, list[float]] = {}
            for row in rows:
                if row["model"] == model:
                    of_layers.setdefault(row["layer"], []).append(row[name])
            means = [sum(heads) / len(heads) for heads in of_layers.values()]
            axes.plot([*of_layers], means, color=colour, label=model, marker=".")
            bounds = [[bound(heads) for heads in of_layers.values()] for bound in (min, max)]
            axes.fill_between([*of_layers], *bounds, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(label, loc="left")
        axes.set_ylim(0, None)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1, 0].set_xlabel("layer")
    label_ends(*panels[:, 0])
    return figure
