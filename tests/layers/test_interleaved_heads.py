"""Interleaved head attention over every core: what it starts as, and what it computes.

Subscripts of the oracles: b batch, n and t tokens, p and s pseudo-heads, h and m heads, d head dim.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headmix_vision.errors import InputError
from headmix_vision.layers import CORES, HeadMixAttention
from headmix_vision.ops import TokenGrid, TokenWindow, head_in_head

from .helpers import DIM, GRID, HEAD_DIM, HEADS, PREFIX, TOKENS, VARIANTS, make_layer, projected, tokens, transplant

COLLAPSES = ("per_head", "across_heads")
OPTIONS = dict.fromkeys(("qk_norm", "cpe", "output_norm", "output_gate"), True)


@pytest.mark.parametrize("collapse", COLLAPSES)
@pytest.mark.parametrize("pseudo_heads", [1, 2, 3])
@pytest.mark.parametrize(("core", "core_args"), VARIANTS)
def test_starts_as_its_core_alone(core, core_args, pseudo_heads, collapse):
    plain = make_layer(core, core_args=core_args, **OPTIONS)
    args = {"pseudo_heads": pseudo_heads, "collapse": collapse}
    layer = transplant(make_layer(core, "iha", args, core_args, **OPTIONS), plain)
    torch.testing.assert_close(layer(tokens()), plain(tokens()), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("collapse", ["first", "last", "mean"])
@pytest.mark.parametrize(("core", "core_args"), VARIANTS)
def test_copies_of_heads_leave_the_layer_as_it_was(core, core_args, collapse):
    """Over Head-in-Head the shares of the places decide: one place alone writes, and all read the same."""
    plain = make_layer(core, core_args=core_args)
    layer = transplant(make_layer(core, "iha", {"pseudo_heads": 3}, core_args), plain)
    weights = {"first": [1.0, 0, 0], "last": [0.0, 0, 1], "mean": [1 / 3, 1 / 3, 1 / 3]}[collapse]
    with torch.no_grad():
        layer.head_mix.mix.copy_(torch.eye(HEADS))
        layer.head_mix.collapse.copy_(torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(layer(tokens()), plain(tokens()), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("collapse", COLLAPSES)
@pytest.mark.parametrize("core", CORES)
def test_pseudo_heads_part(core, collapse):
    """Alike in weights and gradients they would stay copies: after some steps of Adam, in no head is one another's."""
    layer = make_layer(core, "iha", {"pseudo_heads": 3, "collapse": collapse})
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    start = {name: value.detach().clone() for name, value in layer.head_mix.named_parameters()}
    for _ in range(3):  # a step alone is a sign for each weight
        optimizer.zero_grad()
        layer(tokens()).square().sum().backward()
        optimizer.step()
    mix = layer.head_mix.mix.detach()
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (mix[:, one] - mix[:, other]).abs().amax(-1).min() > 1e-6
    assert all((start[name] != value).any() for name, value in layer.head_mix.named_parameters())


@pytest.mark.parametrize(("collapse", "expected"), [("per_head", 3 * 9 * 4 + 3 * 4), ("across_heads", 4 * 9 * 4)])
@pytest.mark.parametrize("core", CORES)
def test_parameters_beyond_those_of_the_core(core, collapse, expected):
    """3 H² P and H P, or the paper's 4 H² P with a collapse across heads; H P shares of Head-in-Head."""
    plain, layer = (
        sum(p.numel() for p in make_layer(core, *mix).parameters())
        for mix in ((), ("iha", {"pseudo_heads": 4, "collapse": collapse}))
    )
    assert layer - plain == expected + (HEADS * 4 if core == "hih" else 0)


def scramble(layer):
    """Draw the weights of a mix."""
    for parameter in layer.head_mix.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def pseudo(layer, x):
    """Pseudo-heads as the paper writes them: three of [B, N, P, H, D]."""
    weights = layer.head_mix.mix
    return [torch.einsum("phm,bnmd->bnphd", w, y) for w, y in zip(weights, projected(layer, x), strict=True)]


def collapsed(layer, out):
    """Collapse [B, N, P, H, D] and project."""
    weights = layer.head_mix.collapse
    subscripts = "hp,bnphd->bnhd" if weights.ndim == 2 else "hpm,bnpmd->bnhd"
    return layer.proj(torch.einsum(subscripts, weights, out).flatten(2))


@pytest.mark.parametrize("collapse", COLLAPSES)
@pytest.mark.parametrize("window", [None, 3])
def test_softmax_over_all_pseudo_keys_of_all_tokens(window, collapse):
    """One softmax for each head and pseudo-query, over N x P virtual tokens; a token's places see what it sees."""
    args = {"pseudo_heads": 2, "collapse": collapse}
    layer = scramble(make_layer("softmax", "iha", args, {"window": window}))
    q, k, v = pseudo(layer, tokens())
    scores = torch.einsum("bnphd,btshd->bhnpts", q, k) * HEAD_DIM**-0.5
    if window is not None:
        seen = TokenWindow.of(TokenGrid(GRID, PREFIX), window).mask(q)
        scores = scores.masked_fill(~seen[:, None, :, None], -torch.inf)
    attention = scores.flatten(-2).softmax(-1).view_as(scores)
    out = torch.einsum("bhnpts,btshd->bnphd", attention, v)
    torch.testing.assert_close(layer(tokens()), collapsed(layer, out))


@pytest.mark.parametrize("collapse", COLLAPSES)
@pytest.mark.parametrize("core", ["linear", "mhla"])
def test_linear_cores_over_all_pseudo_keys_of_all_tokens(core, collapse):
    """The weights of blocks belong to the tokens that places stand for (arXiv 2601.07832, equation 5)."""
    args = {"pseudo_heads": 2, "collapse": collapse}
    layer = scramble(make_layer(core, "iha", args, {"feature_map": "elu1", "eps": 0.0}))
    q, k, v = pseudo(layer, tokens())
    row, column = torch.meshgrid(torch.arange(5) * 2 // 5, torch.arange(6) * 3 // 6, indexing="ij")
    block = torch.cat([torch.zeros(PREFIX, dtype=torch.long), 1 + (3 * row + column).flatten()])
    mixing = layer.core.mixing()[block][:, block] if core == "mhla" else torch.ones(TOKENS, TOKENS)
    weights = torch.einsum("bnphd,btshd->bhnpts", F.elu(q) + 1, F.elu(k) + 1) * mixing[:, None, :, None]
    out = torch.einsum("bhnpts,btshd->bnphd", weights, v)
    out = out / weights.sum((-1, -2)).permute(0, 2, 3, 1)[..., None]
    torch.testing.assert_close(layer(tokens()), collapsed(layer, out))


@pytest.mark.parametrize("mask", ["static", "token"])
def test_head_in_head_writes_the_places_of_a_token_one_after_the_other(mask):
    """In either direction, with one decay for a token and each place's share of its strength."""
    layer = scramble(make_layer("hih", "iha", {"pseudo_heads": 2}, {"mask": mask, "conv_size": 0}))
    core, x = layer.core, tokens()
    nn.init.uniform_(core.shares)
    q, k, v = (F.silu(y.flatten(1, 2)) for y in pseudo(layer, x))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    beta = torch.einsum("bnh,hp->bnph", core.beta(x).sigmoid(), core.shares).flatten(1, 2)
    decay = -core.A_log.exp() * F.softplus(core.decay(x) + core.dt_bias)
    decay = torch.stack([decay, torch.zeros_like(decay)], 2).flatten(1, 2)
    masks = core.mask(x) if mask == "static" else core.mask(x).repeat_interleave(2, 1)
    forward = [*range(PREFIX, TOKENS), *range(PREFIX)]
    out = 0
    for order in (forward, forward[::-1]):
        places = torch.tensor([2 * token + place for token in order for place in (0, 1)])
        out = out + head_in_head(q, k, v, beta, decay, masks, scan=places, impl="reference").out
    torch.testing.assert_close(layer(x), collapsed(layer, out.unflatten(1, (-1, 2))))


@pytest.mark.parametrize("scans", ["forward", "bidirectional"])
def test_shares_stay_between_zero_and_one(scans):
    layer = make_layer("hih", "iha", core_args={"scans": scans})
    inside, outside = layer.core.shares.detach().clone(), layer.core.shares.detach().clone()
    outside[:, 0], outside[:, 1] = 1.5, -0.5
    outputs = []
    for shares in (inside, outside):
        with torch.no_grad():
            layer.core.shares.copy_(shares)
        outputs.append(layer(tokens()))
    torch.testing.assert_close(*outputs)
    outputs[1].sum().backward()
    gradient = layer.core.shares.grad
    assert (gradient[:, 0] >= 0).all() and (gradient[:, 1] <= 0).all() and gradient.any()  # only back inside


@pytest.mark.parametrize("core", ["softmax", "linear", "mhla"])
def test_opposite_pseudo_heads_are_not_linear_where_attention_is(core):
    """On one token repeated, attention gives its value, which is linear in it; softmax over x and -x gives tanh."""
    x, y = (tokens()[:, :1].expand(-1, TOKENS, -1) * factor for factor in (1.0, torch.randn(DIM).double()))
    plain = make_layer(core, proj_bias=False)
    torch.testing.assert_close(plain(x + y), plain(x) + plain(y))
    layer = transplant(make_layer(core, "iha", {"pseudo_heads": 2}, proj_bias=False), plain)
    with torch.no_grad():
        layer.head_mix.mix.copy_(torch.eye(HEADS)).select(1, 1).neg_()
    assert (layer(x + y) - layer(x) - layer(y)).abs().max() > 1e-2
    if core == "softmax":
        q, k, v = projected(layer, x)
        out = ((q * k).sum(-1, keepdim=True) * HEAD_DIM**-0.5).tanh() * v
        torch.testing.assert_close(layer(x), layer.proj(out.flatten(2)))


def test_one_head_has_pseudo_heads_too():
    for collapse in COLLAPSES:
        single = HeadMixAttention(8, 1, "softmax", "iha", grid=(3, 3), head_mix_args={"collapse": collapse})
        assert single(torch.randn(1, 9, 8)).shape == (1, 9, 8)


def test_masks_need_tokens_that_are_not_repeated():
    mask = torch.rand(TOKENS, TOKENS) > 0.3
    message = "need the 'softmax' core whose tokens are not repeated by a head mix, not .* with 2 pseudo-tokens"
    with pytest.raises(InputError, match=message):
        make_layer("softmax", "iha")(tokens(), attn_mask=mask)
    plain = make_layer("softmax")
    once = transplant(make_layer("softmax", "iha", {"pseudo_heads": 1}), plain)
    torch.testing.assert_close(once(tokens(), attn_mask=mask), plain(tokens(), attn_mask=mask))
