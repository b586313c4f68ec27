"""Causal layers: what they see, rows of blocks one after the other, and what cannot be causal."""

import itertools

import pytest
import torch

from headmix_vision.errors import InputError
from headmix_vision.layers import HeadMixAttention
from headmix_vision.layers.block_mixing import mixing_of_rows
from headmix_vision.layers.positions import rotary_tables
from headmix_vision.ops import TokenBlocks

from .helpers import DIM, HEAD_DIM, HEADS, PREFIX, make_layer, tokens


def causal(core_args=None, **options):
    return make_layer("mhla", core_args={"causal": True, **(core_args or {})}, **options)


def in_pieces(layer, x, lengths, rotation=None, **options):
    outs, state, first = [], None, -layer.grid.num_prefix_tokens
    for piece in x.split(lengths, dim=1):
        own = rotation and [table[max(first, 0) : first + piece.shape[1]] for table in rotation]
        out, state = layer.stream(piece, state, rotation=own, **options)
        first += piece.shape[1]
        outs.append(out)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(
    "core_args", [{}, {"feature_map": "elu1"}, {"normalizer": None, "mixing_per_head": True}], ids=str
)
@pytest.mark.parametrize("head_mix", [None, "iha"])
def test_any_number_of_rows_in_pieces_gives_what_all_give(head_mix, core_args, rotates):
    """Rows of 2 x 6 tokens, of which 3 are trained."""
    sizes = {"grid": (6, 6), "block_grid": (3, 2), "num_prefix_tokens": 0, "head_mix": head_mix}
    layer, x = causal({"causal": "rows", **core_args}, **sizes), tokens(72)
    torch.nn.init.uniform_(layer.core.mixing.weight, 0.01, 0.9)
    rotation = rotary_tables(HEAD_DIM, (12, 6), (6, 6), 1.0, like=x) if rotates else None
    expected = layer(x, grid=(12, 6), rotation=rotation)
    for lengths in ([12] * 6, [24, 48], [72]):
        torch.testing.assert_close(in_pieces(layer, x, lengths, rotation=rotation), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("core_args", [{}, {"normalizer": None, "mixing_per_head": True}], ids=str)
@pytest.mark.parametrize("options", [{}, {"head_mix": "mea", "output_gate": True, "output_norm": True}], ids=str)
def test_rows_of_blocks_in_pieces_give_what_all_give(options, core_args, rotates):
    """5 x 6 tokens behind 2 prefix tokens: the first row of blocks has 3 rows of tokens."""
    layer, x = causal(core_args, **options), tokens()
    rotation = rotary_tables(HEAD_DIM, (5, 6), (5, 6), 1.0, like=x) if rotates else None
    expected = layer(x, rotation=rotation)
    for lengths in ([PREFIX + 18, 12], [PREFIX + 30]):
        torch.testing.assert_close(in_pieces(layer, x, lengths, rotation=rotation), expected, rtol=1e-12, atol=1e-12)
    grid, x = (2, 6), x[:, : PREFIX + 12]
    rotation = rotary_tables(HEAD_DIM, grid, (5, 6), 1.0, like=x) if rotates else None
    ours = in_pieces(layer, x, [PREFIX + 6, 6], grid=grid, rotation=rotation)
    torch.testing.assert_close(ours, layer(x, grid=grid, rotation=rotation), rtol=1e-12, atol=1e-12)


def test_a_token_sees_those_before_it_in_the_order_of_the_blocks():
    layer, x = causal(), tokens().requires_grad_()
    order = TokenBlocks.from_grid((5, 6), (2, 3), PREFIX).order(x)
    for place in (0, 1, 7, 20):
        (gradient,) = torch.autograd.grad(layer(x)[0, order[place]].sum(), x)
        assert gradient[0, order].any(-1).tolist() == [other <= place for other in range(len(order))]


def test_with_rows_a_token_sees_its_row_of_blocks_and_those_before_it():
    """Rows of 2 x 6 tokens, of which 3 are trained: the last of 5 sees two rows before it."""
    layer = causal({"causal": "rows"}, grid=(6, 6), block_grid=(3, 2), num_prefix_tokens=0)
    x = tokens(60).requires_grad_()
    for row, token in ((0, 3), (1, 12), (4, 50)):
        (gradient,) = torch.autograd.grad(layer(x, grid=(10, 6))[0, token].sum(), x)
        seen = [max(row - 2, 0) <= other <= row for other in range(5) for _ in range(12)]
        assert gradient[0].any(-1).tolist() == seen


def test_mixing_of_rows():
    """Trained rows as they are, others by their distance."""
    trained = torch.rand(2, 6, 6)
    parts = mixing_of_rows(trained, 2, 5).unflatten(2, (5, 2)).unflatten(1, (5, 2))
    given = trained.unflatten(2, (3, 2)).unflatten(1, (3, 2))
    for i, j in itertools.product(range(5), repeat=2):
        lag, last = i - j, min(i, 2)
        expected = given[:, last, :, last - lag] if 0 <= lag <= last else torch.zeros(2, 2, 2)
        assert torch.equal(parts[:, i, :, j], expected)


def test_operations():
    """The memory of the own block is read apart: N more reads of D (D + 1) numbers; mixed are blocks before alone."""
    M = 6 + 1
    more = causal().flops() - make_layer("mhla").flops()
    assert more == 2 * HEADS * HEAD_DIM * (HEAD_DIM + 1) * (32 + M * (M - 1) // 2 - M * M)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"core": "mhla", "head_mix": "iha"}, "causal=True cannot be joined with .* makes 2 pseudo-tokens"),
        ({"core": "mhla", "lepe": 3}, "lepe=3 cannot be joined with causal=True"),
        ({"core": "mhla", "cpe": True}, "cpe=True cannot be joined with causal=True"),
        (
            {"cpe": True, "core_args": {"causal": "rows"}, "grid": (8, 8)},
            "cpe=True cannot be joined with causal='rows'",
        ),
        ({"core_args": {"causal": "rows"}, "grid": (14, 14)}, "rows of blocks of equal length.* 14x14 .* in 4 rows"),
        ({"core_args": {"causal": "rows"}, "grid": (8, 8), "num_prefix_tokens": 1}, "and no prefix tokens"),
        ({"core_args": {"causal": "row"}}, "causal must be true or false or 'rows', got 'row'"),
        ({"core_args": {"causal": 1}}, "causal must be true or false or 'rows', got 1"),
        ({"core": "linear"}, "core_args of 'linear'.*causal"),
        ({"core": "softmax"}, "core_args of 'softmax'.*causal"),
    ],
)
def test_what_cannot_be_causal_is_refused(options, message):
    with pytest.raises(InputError, match=message) as error:
        HeadMixAttention(DIM, HEADS, **{"core_args": {"causal": True}, **options})
    assert "\n" not in str(error.value)


def test_wrong_pieces_are_refused():
    layer, x = causal(), tokens()
    for piece, state, message in (
        (
            x[:, : PREFIX + 12],
            None,
            r"pieces of a 5x6 grid plus 2 .* after 3, 5 of 5 on the first axis: 14 tokens after 0",
        ),
        (x[:, :0], None, "0 tokens after 0"),
        (x[:, :6], layer.stream(x)[1], "6 tokens after 32 do not"),
    ):
        with pytest.raises(InputError, match=message):
            layer.stream(piece, state)
    for core in ("mhla", "linear", "softmax", "hih"):
        with pytest.raises(InputError, match="cannot take tokens in pieces: this needs 'mhla' with causal=True"):
            make_layer(core).stream(x)
    with pytest.raises(InputError, match="of which none are kept"):
        causal({"normalizer": "source_block"}).stream(x)
    sizes = {"grid": (6, 6), "block_grid": (3, 2), "num_prefix_tokens": 0}
    layer = causal({"causal": "rows"}, **sizes)
    for count in (0, 6, 18):
        with pytest.raises(InputError, match=f"whole rows of blocks, 2 x 6 tokens each: got {count}"):
            layer.stream(tokens(count))
    with pytest.raises(InputError, match=r"3x6 grid has no whole rows of blocks: .* needs a multiple of 2 tokens"):
        layer(tokens(18), grid=(3, 6))
    assert layer(tokens(6), grid=(1, 6)).any(), "a single row may be short"
    with pytest.raises(InputError, match="rows of blocks of equal length"):
        layer.set_block_grid((4, 2))
    with pytest.raises(InputError, match="of which none are kept"):
        causal({"causal": "rows", "normalizer": "source_block"}, **sizes).stream(tokens(12))
