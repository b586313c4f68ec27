"""Numbers of attention matrices: of attention whose numbers are known, and how they are averaged and drawn."""

import math

import pytest
import torch

from headmix_vision.analysis.attention_matrices import record_attention
from headmix_vision.analysis.measures import mean_distance, numerical_rank, stable_rank
from headmix_vision.analysis.profiles import PROFILES, draw_profiles, profile_layers
from headmix_vision.layers import HeadMixAttention

GRID = (3, 4)
NUMBERS = ("rank", "stable_rank", "entropy", "distance")


def profile(layer: HeadMixAttention, images: int = 1, **options) -> list[dict]:
    x = torch.randn(images, layer.grid.num_tokens, 8, generator=torch.Generator().manual_seed(0))
    return profile_layers(layer, [x], [*PROFILES], **options)


def make_layer(**options) -> HeadMixAttention:
    torch.manual_seed(0)
    return HeadMixAttention(8, 2, **{"core": "softmax", "grid": GRID, "block_grid": (1, 1), **options})


@pytest.mark.parametrize("prefix", [0, 1])
def test_of_uniform_attention(prefix: int):
    layer = make_layer(num_prefix_tokens=prefix)
    layer.qkv.weight.data.zero_()
    distances = [math.dist((a, b), (c, d)) for a in range(3) for b in range(4) for c in range(3) for d in range(4)]
    expected = {"rank": 1, "stable_rank": 1, "entropy": math.log(12 + prefix), "distance": sum(distances) / 144}
    for head, row in enumerate(profile(layer)):
        assert (row["layer"], row["name"], row["core"], row["head_mix"], row["head"]) == (0, "", "softmax", "", head)
        assert (row["tokens"], row["queries"], row["images"]) == (12 + prefix, 12 + prefix, 1)
        assert {name: row[name] for name in NUMBERS} == pytest.approx(expected)


def test_of_attention_to_oneself():
    (row, _) = profile(make_layer(core_args={"window": 1}))
    assert [row[name] for name in NUMBERS] == pytest.approx([12, 12, 0, 0])


def test_numbers_are_means_over_images():
    layer = make_layer(core="hih", core_args={"num_sub_heads": 2})
    x = torch.randn(3, 12, 8, generator=torch.Generator().manual_seed(0))
    both = profile_layers(layer, [x], ["entropy"])
    each = [profile_layers(layer, [x[i : i + 1]], ["entropy"]) for i in range(3)]
    for head in (0, 1):
        mean = sum(rows[head]["entropy"] for rows in each) / 3
        assert both[head]["entropy"] == pytest.approx(mean) and both[head]["images"] == 3


def test_sampled_queries_bound_the_rank():
    whole, sampled = profile(make_layer())[0], profile(make_layer(), queries=5)[0]
    assert (whole["rank"], sampled["rank"], sampled["queries"]) == (12, 5, 5)


def test_numbers_that_are_not_finite_are_nan():
    layer = make_layer()
    layer.qkv.weight.data[0] = math.nan
    assert all(math.isnan(profile(layer)[0][name]) for name in NUMBERS)


def test_measures():
    values = torch.tensor([[2.0, 1.0, 2.1e-6, 1.9e-6], [0, 0, 0, 0]]).double()
    assert numerical_rank(values).tolist() == [3, 0]
    assert stable_rank(values).tolist() == pytest.approx([1.25, 0])
    places = torch.tensor([[0.0, 0.0], [3.0, 4.0]]).double()
    weights = torch.tensor([[3.0, -1.0], [0.0, 2.0]])
    assert float(mean_distance(weights, places, places)) == pytest.approx(5 / 4 / 2)


def test_lines_are_means_of_heads():
    layers = torch.nn.Sequential(make_layer(), make_layer(core="linear"))
    rows = [
        {"model": name, **row}
        for name in ("a", "b")
        for row in profile_layers(layers, [torch.randn(1, 12, 8)], ["rank"])
    ]
    assert [attention.layer.core_name for attention in record_attention(layers, torch.randn(1, 12, 8))] == [
        "softmax",
        "linear",
    ]
    figure = draw_profiles(rows, PROFILES["rank"].labels, "ranks")
    rank, _ = figure.axes
    means = [sum(row["rank"] for row in rows[:4] if row["layer"] == layer) / 2 for layer in (0, 1)]
    assert [line.get_label() for line in rank.lines] == ["a", "b"]
    assert rank.lines[1].get_ydata().tolist() == means
