"""What the pictures show, what their numbers are, and that nothing in them overlaps."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import timm
import torch
from matplotlib.text import Text
from torch import Tensor, nn

from headmix_vision.analysis.analysis_job import PICTURES
from headmix_vision.analysis.attention_matrices import attention_layers
from headmix_vision.analysis.block_maps import draw_block_mixing, lay_out
from headmix_vision.analysis.explicit_heads import draw_explicit, similarity_order
from headmix_vision.analysis.figures import Picture
from headmix_vision.analysis.interleaved_heads import draw_interleaved
from headmix_vision.layers import HeadMixAttention
from headmix_vision.ops import TokenBlocks

NAN = float("nan")


def network(depth: int = 2, num_heads: int = 4, seed: int = 0, noise: float = 0.2, **options: Any) -> nn.ModuleList:
    """Attention layers whose mixing weights are as if they had learned something."""
    torch.manual_seed(seed)
    options = {"core": "mhla", "grid": (4, 4), "block_grid": (2, 2), **options}
    layers = nn.ModuleList(HeadMixAttention(4 * num_heads, num_heads, **options) for _ in range(depth))
    for name, parameter in layers.named_parameters():
        if "head_mix" in name or "mixing" in name:
            parameter.data += noise * torch.rand_like(parameter)
    return layers


def drawn(kind: str, layers: nn.Module) -> Picture:
    picture = PICTURES[kind](attention_layers(layers), "a network")
    assert picture is not None
    return picture


def images(picture: Picture) -> list[np.ndarray]:
    """The matrices in the panels: of the first column, then of the second and so on."""
    return [np.asarray(axes.images[0].get_array()) for axes in picture.figure.axes if axes.images]


def assert_shows(image: np.ndarray, weights: Tensor) -> None:
    np.testing.assert_allclose(image, weights.detach().double().numpy(), rtol=1e-12)


def test_interleaved_heads_stand_in_rows_of_pseudo_heads():
    for collapse in ("per_head", "across_heads"):
        layers = network(head_mix="iha", head_mix_args={"pseudo_heads": 3, "collapse": collapse})
        panels = images(drawn("iha", layers))
        assert len(panels) == 2 * 4
        mix = layers[1].head_mix
        for image, weights in zip(panels[4:7], mix.mix, strict=True):
            assert_shows(image[4 * 2 + 1], weights[2, 1])  # pseudo-head 2 of head 1
            assert image.shape == (12, 4)
        if collapse == "per_head":
            assert_shows(panels[7], mix.collapse.T)
        else:
            assert_shows(panels[7][4 * 2 + 1], mix.collapse[:, 2, 1])  # where pseudo-head 2 of head 1 goes


def test_numbers_of_interleaved_heads():
    layers = network(1, head_mix="iha", noise=0.0)
    (fresh,) = drawn("iha", layers).numbers
    assert (fresh["layer"], fresh["name"], fresh["heads"], fresh["pseudo_heads"]) == (0, "0", 4, 2)
    assert fresh["keys"]["distance_from_identity"] == fresh["collapse"]["distance_from_first_pseudo_head"] == 0
    assert fresh["keys"]["heads_per_pseudo_head"] == fresh["collapse"]["pseudo_heads_per_head"] == 1
    assert fresh["keys"]["cosine_between_pseudo_heads"] == 1 > fresh["values"]["cosine_between_pseudo_heads"]
    own, other = fresh["queries"]["distance_from_identity_by_pseudo_head"]
    assert own == 0 and other > 0.3  # the first reads for the token, the second is perturbed and waits
    assert fresh["queries"]["distance_from_identity_at_start"] == pytest.approx(other / 2**0.5, rel=0.5)
    state = torch.get_rng_state()
    assert drawn("iha", layers).numbers == [fresh]
    assert torch.equal(torch.get_rng_state(), state)

    layers[0].head_mix.mix.data.fill_(0.25)
    layers[0].head_mix.collapse.data.fill_(0.5)
    (mixed,) = drawn("iha", layers).numbers
    assert mixed["values"]["heads_per_pseudo_head"] == pytest.approx(4)
    assert mixed["values"]["distance_from_identity"] == pytest.approx(0.75**0.5)
    assert mixed["collapse"]["pseudo_heads_per_head"] == pytest.approx(2)


def test_plain_layers_between_are_left_out():
    model = timm.create_model("deit_iha_digits", depth=5, embed_dim=16, global_every=2)
    picture = draw_interleaved(attention_layers(model), "deit")
    assert picture is not None
    assert [numbers["name"] for numbers in picture.numbers] == [f"blocks.{layer}.attn" for layer in (0, 2, 4)]
    assert [axes.get_title() for axes in picture.figure.axes if "layer" in axes.get_title()] == [
        f"layer {layer}" for layer in (0, 2, 4)
    ]
    assert draw_explicit(attention_layers(model), "deit") is draw_block_mixing(attention_layers(model), "deit") is None


def test_similar_heads_are_neighbours():
    torch.manual_seed(0)
    kinds = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    rows = torch.eye(3)[kinds] * torch.rand(8, 1) + 0.01 * torch.rand(8, 3)
    order = similarity_order(rows)
    assert sorted(order) == [*range(8)] and order.index(0) < order.index(7)
    in_order = kinds[order].tolist()
    assert sum(a != b for a, b in pairwise(in_order)) == 2
    assert similarity_order(5 * rows) == order
    assert [similarity_order(rows[:count]) for count in (1, 2)] == [[0], [0, 1]]
    assert sorted(similarity_order(torch.zeros(4, 3))) == [0, 1, 2, 3]


def test_explicit_heads_stand_in_the_order_of_the_numbers():
    layers = network(head_mix="mea", num_heads=8, head_mix_args={"component_heads": 4})
    picture = drawn("mea", layers)
    panels = images(picture)
    start = torch.eye(4).repeat_interleave(2, 0)
    for layer, numbers, shown in zip(layers, picture.numbers, (panels[:4], panels[4:]), strict=True):
        heads, components = numbers["head_order"], numbers["component_order"]
        assert sorted(heads) == [*range(8)] and sorted(components) == [0, 1, 2, 3]
        for image, change, weights in zip(shown[:2], shown[2:], layer.head_mix.mix, strict=True):
            assert_shows(image, weights[heads][:, components])
            np.testing.assert_allclose(change, (weights - start)[heads][:, components].detach(), atol=1e-7)
        in_order = start[heads][:, components]
        assert torch.equal(in_order, start)  # heads with one start are neighbours here, so the start is a diagonal


def test_numbers_of_explicit_heads():
    layers = network(1, head_mix="mea", noise=0.0)
    (fresh,) = drawn("mea", layers).numbers
    same = {"distance_from_start": 0, "effective_rank": 4, "components_per_head": 1, "cosine_between_heads": 0}
    assert fresh["keys"] == fresh["values"] == pytest.approx(same)
    layers[0].head_mix.mix.data[1] = 0.5
    (mixed,) = drawn("mea", layers).numbers
    assert mixed["keys"] == pytest.approx(same)
    alike = {"distance_from_start": 1, "effective_rank": 1, "components_per_head": 4, "cosine_between_heads": 1}
    assert mixed["values"] == pytest.approx(alike)


def test_a_mixing_matrix_is_laid_out_on_its_image():
    """Maps stand where their query block is, and weights in them where the key block is."""
    weights = torch.arange(16.0).view(4, 4)
    gap = [NAN] * 5
    rows = [[0, 1, NAN, 4, 5], [2, 3, NAN, 6, 7], gap, [8, 9, NAN, 12, 13], [10, 11, NAN, 14, 15]]
    picture = lay_out(weights, TokenBlocks.from_grid((4, 4), (2, 2)))
    torch.testing.assert_close(picture, torch.tensor(rows), equal_nan=True)
    line = lay_out(weights[:2, :2], TokenBlocks.from_grid((4,), (2,)))
    torch.testing.assert_close(line, torch.tensor([[0.0, 1, NAN, 4, 5]]), equal_nan=True)


def test_prefix_tokens_have_a_cell_above_each_map_and_a_map_above_all():
    weights = torch.arange(9.0).view(3, 3)
    rows = [[0, NAN, NAN, NAN, NAN], [1, 2, NAN, NAN, NAN], [NAN] * 5, [3, NAN, NAN, 6, NAN], [4, 5, NAN, 7, 8]]
    picture = lay_out(weights, TokenBlocks.from_grid((2, 4), (1, 2), num_prefix_tokens=1))
    torch.testing.assert_close(picture, torch.tensor(rows), equal_nan=True)


@pytest.mark.parametrize("prefix", [0, 1])
def test_every_pair_of_blocks_of_a_clip_has_a_cell(prefix: int):
    blocks = TokenBlocks.from_grid((3, 4, 4), (3, 2, 2), num_prefix_tokens=prefix)
    weights = 1 + torch.arange(blocks.num_blocks**2).double().view(blocks.num_blocks, -1)
    picture = lay_out(weights, blocks)
    cells = picture[~picture.isnan()]
    assert sorted(cells.tolist()) == weights.flatten().tolist()
    first = picture[prefix * 5 :, :8]  # keys of three frames, for the first query block
    torch.testing.assert_close(first[prefix : prefix + 2, 3:5], weights[prefix, prefix + 4 :][:4].view(2, 2))


def test_block_mixing_is_drawn_as_shares_beside_their_change():
    layers = network(core_args={"mixing_per_head": True}, num_prefix_tokens=1)
    picture = drawn("mhla", layers)
    assert len(images(picture)) == 2 * 2 * 4
    assert [(n["layer"], n["head"]) for n in picture.numbers] == [
        (layer, head) for layer in (0, 1) for head in range(4)
    ]
    mixing = layers[1].core.mixing
    weights = mixing.weight[2].detach().double()
    shares = weights / weights.sum(1, keepdim=True)
    learned, change = images(picture)[12:14]
    np.testing.assert_allclose(learned, lay_out(shares, mixing.blocks), rtol=1e-6)
    mixing.reset_parameters()
    np.testing.assert_allclose(change, lay_out(shares - mixing.weight[2].detach(), mixing.blocks), atol=1e-6)
    rescaled = network(core_args={"mixing_per_head": True}, num_prefix_tokens=1)
    rescaled[1].core.mixing.weight.data *= 0.5
    (*_, numbers), (*_, halved) = picture.numbers, drawn("mhla", rescaled).numbers
    row_sums, half = numbers.pop("row_sums"), halved.pop("row_sums")
    assert half == pytest.approx([total / 2 for total in row_sums])
    assert halved.pop("block_grid") == numbers.pop("block_grid") == [2, 2]
    assert halved == pytest.approx(numbers)


def test_numbers_of_block_mixing():
    (fresh,) = drawn("mhla", network(1, noise=0.0)).numbers
    assert fresh["distance_from_start"] == pytest.approx(0, abs=1e-7)
    for name in ("blocks_per_query", "own_share", "distance_in_tokens"):
        assert fresh[name] == pytest.approx(fresh[f"{name}_at_start"])
    layers = network(1, noise=0.0, core_args={"mixing_init": "uniform"})
    (uniform,) = drawn("mhla", layers).numbers
    assert uniform["blocks_per_query"] == pytest.approx(4) and uniform["own_share"] == pytest.approx(0.25)
    away = (0 + 2 + 2 + 8**0.5) / 4  # of the centres of four blocks of 2 x 2 tokens
    assert uniform["distance_in_tokens"] == uniform["distance_in_tokens_if_uniform"] == pytest.approx(away)
    layers[0].core.mixing.weight.data.copy_(torch.eye(4))
    (local,) = drawn("mhla", layers).numbers
    assert local["own_share"] == pytest.approx(1, abs=1e-5)
    assert local["distance_in_tokens"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    "layers",
    [
        {"depth": 1, "num_heads": 1, "head_mix": "iha", "head_mix_args": {"pseudo_heads": 1}, "block_grid": (1, 1)},
        {"depth": 9, "num_heads": 3, "head_mix": "iha", "head_mix_args": {"pseudo_heads": 5}, "grid": (4,)},
        {"depth": 2, "num_heads": 16, "head_mix": "mea", "grid": (4, 4, 4), "num_prefix_tokens": 1},
        {"depth": 3, "num_heads": 12, "head_mix": "mea", "head_mix_args": {"component_heads": 1}},
    ],
)
def test_nothing_overlaps(layers: dict[str, Any]):
    axes = len(layers.get("grid", (4, 4)))
    model = network(**{"block_grid": (2,) * axes, **layers})
    for kind, draw in PICTURES.items():
        picture = draw(attention_layers(model), "deit_softmax_iha_large_patch16_384, averaged weights, step 1,000,000")
        if picture is None:
            continue
        figure = picture.figure
        figure.canvas.draw()
        boxes = [panel.get_tightbbox() for panel in figure.axes]
        boxes += [text.get_window_extent() for text in figure.findobj(Text) if text in figure.texts]
        for box in boxes:
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, kind
        for one, other in combinations(boxes, 2):
            together = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(together) < 0.5, (kind, one, other)  # in pixels
        assert max(figure.get_size_inches()) < 60
