"""The socket of head mixes, with two learned ones that use all of it, over every core."""

import copy

import pytest
import torch
import torch.fx
from torch import nn

from headmix_vision.errors import InputError
from headmix_vision.layers import CORES, HEAD_MIXES, HeadMix, HeadMixAttention
from headmix_vision.ops import TokenBlocks, TokenGrid, mhla

GRID, PREFIX, DIM, HEADS = (5, 6), 2, 24, 3
TOKENS = PREFIX + 30


class Interleave(HeadMix):
    """Makes P pseudo-tokens of each token, in `factor` times as many heads, and averages what the core says of them."""

    def __init__(self, spec, pseudo_heads=2, factor=1):
        super().__init__(spec)
        self.repeats, self.core_heads, self.factor = pseudo_heads, factor * spec.num_heads, factor
        copies = torch.eye(spec.num_heads).repeat_interleave(factor, 1)
        self.weight = nn.Parameter(copies[:, None].repeat(3, 1, pseudo_heads, 1).to(spec.dtype))  # [3, H, P, G]

    def before(self, q, k, v):
        mixed = torch.einsum("cbnhd,chpg->cbnpgd", torch.stack([q, k, v]), self.weight)
        return mixed.flatten(2, 3).unbind(0)

    def after(self, out):
        return out.unflatten(1, (-1, self.repeats)).unflatten(3, (-1, self.factor)).mean((2, 4))


class Compose(HeadMix):
    """Composes all heads of keys and values from fewer projected ones."""

    undecayed = ("weight",)
    layer_options = {"output_norm": True}  # noqa: RUF012

    def __init__(self, spec, component_heads=2):
        super().__init__(spec)
        if not 1 <= component_heads <= spec.num_heads:
            raise InputError(f"component_heads must be from 1 to {spec.num_heads}, got {component_heads}.")
        self.projected_heads = (spec.num_heads, component_heads, component_heads)
        self.weight = nn.Parameter(torch.eye(component_heads, spec.num_heads, dtype=spec.dtype) + 0.1)

    def before(self, q, k, v):
        return q, *(torch.einsum("bnhd,hg->bngd", y, self.weight) for y in (k, v))


MIXES = {"interleave": Interleave, "compose": Compose}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, mix in MIXES.items():
        monkeypatch.setitem(HEAD_MIXES, name, mix)


def make_layer(core, head_mix=None, **kwargs):
    torch.manual_seed(0)
    sizes = {"grid": GRID, "block_grid": (2, 3), "num_prefix_tokens": PREFIX, "dtype": torch.float64}
    core_args = {"num_sub_heads": 2} if core == "hih" else {}
    return HeadMixAttention(DIM, HEADS, core=core, head_mix=head_mix, core_args=core_args, **{**sizes, **kwargs})


def tokens(count=TOKENS):
    return torch.randn(2, count, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def transplant(layer, plain):
    """Give a layer the weights of one without a mix."""
    missing, unexpected = layer.load_state_dict(plain.state_dict(), strict=False)
    assert missing == ["head_mix.weight"] and not unexpected
    return layer


# A memory that is written several times is another one, and its gates are those of its heads.
COPIES = [{"pseudo_heads": 1}, {"pseudo_heads": 1, "factor": 2}, {"pseudo_heads": 3}]


@pytest.mark.parametrize(
    ("core", "args"), [(core, args) for core in CORES for args in (COPIES[:1] if core == "hih" else COPIES)]
)
def test_copies_of_heads_leave_the_layer_as_it_was(core, args):
    plain = make_layer(core)
    layer = transplant(make_layer(core, "interleave", head_mix_args=args), plain)
    torch.testing.assert_close(layer(tokens()), plain(tokens()))


@pytest.mark.parametrize("core", ["linear", "mhla"])
def test_mixed_heads_are_what_the_op_computes_on_pseudo_tokens(core):
    layer = make_layer(core, "interleave", head_mix_args={"pseudo_heads": 2})
    nn.init.normal_(layer.head_mix.weight)
    q, k, v = layer.head_mix.before(*layer.qkv(tokens()).unflatten(-1, (3, HEADS, -1)).unbind(2))
    blocks = TokenBlocks(TokenGrid(GRID, PREFIX, repeats=2), (2, 3))
    mixing = layer.core.mixing() if core == "mhla" else torch.ones(7, 7, dtype=q.dtype)
    out = mhla(q, k, v, mixing, blocks, impl="reference")
    expected = layer.proj(out.view(2, TOKENS, 2, HEADS, -1).mean(2).flatten(2))
    torch.testing.assert_close(layer(tokens()), expected)


@pytest.mark.parametrize("core", CORES)
def test_composing_from_all_heads_is_a_projection(core):
    """A head composition without a norm can be absorbed by the projections."""
    layer = make_layer(core, "compose", head_mix_args={"component_heads": HEADS}, output_norm=False)
    plain = make_layer(core, output_norm=False)
    state = layer.state_dict()
    compose = torch.kron(state.pop("head_mix.weight"), torch.eye(DIM // HEADS, dtype=torch.float64))
    q, k, v = state["qkv.weight"].chunk(3)
    plain.load_state_dict({**state, "qkv.weight": torch.cat([q, compose.mT @ k, compose.mT @ v])})
    torch.testing.assert_close(layer(tokens()), plain(tokens()))


@pytest.mark.parametrize("head_mix", MIXES)
@pytest.mark.parametrize("core", CORES)
def test_every_core_with_every_option(core, head_mix):
    options = dict.fromkeys(("cpe", "qk_norm", "output_norm", "output_gate", "scale_norm"), True)
    layer = make_layer(core, head_mix, **options)
    x = tokens()
    out = layer(x)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    torch.testing.assert_close(copy.deepcopy(layer)(x), out)
    traced = torch.fx.symbolic_trace(layer, concrete_args={"grid": None})
    torch.testing.assert_close(traced(x), out)
    torch.compiler.reset()  # one method is compiled for many layers here: more often than dynamo allows
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), out)
    again = make_layer(core, head_mix, **options)
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(again(x), out)


@pytest.mark.parametrize("head_mix", MIXES)
@pytest.mark.parametrize("core", CORES)
def test_other_grids(core, head_mix):
    layer, larger = make_layer(core, head_mix, cpe=True), tokens(PREFIX + 72)
    out = layer(larger, grid=(8, 9))
    layer.set_grid((8, 9))
    torch.testing.assert_close(layer(larger), out)
    if core == "mhla":
        layer.set_block_grid((4, 4))
        assert layer.core.mixing().shape == (17, 17) and layer(larger).shape == larger.shape


def test_projections_shrink_with_the_component_heads():
    layer = make_layer("mhla", "compose", head_mix_args={"component_heads": 1}, qk_norm=True)
    assert layer.qkv.weight.shape == (DIM + 2 * DIM // HEADS, DIM)
    assert (layer.q_norm.weight.numel(), layer.k_norm.weight.numel()) == (DIM, DIM // HEADS)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_mix_is_held_to_what_it_says(monkeypatch, side):
    """A defect of the mix, not of a user: it keeps its traceback."""
    layer = make_layer("mhla", "interleave")
    monkeypatch.setattr(layer.head_mix, side, lambda *x: x if side == "before" else x[0])
    with pytest.raises(AssertionError, match=r"head mix: \(2, .* is not .* places of 3 heads"):
        layer(tokens())


def test_wrong_arguments_and_masks_are_refused():
    with pytest.raises(InputError, match=r"head_mix must be None or one of .*'compose'.* got 'none'"):
        make_layer("mhla", "none")
    with pytest.raises(InputError, match="component_heads must be from 1 to 3, got 4"):
        make_layer("mhla", "compose", head_mix_args={"component_heads": 4})
    with pytest.raises(InputError, match=r"head_mix_args=.* needs a head_mix"):
        make_layer("mhla", head_mix_args={"component_heads": 4})
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    assert make_layer("softmax", "compose")(tokens(), attn_mask=mask).shape == (2, TOKENS, DIM)
    with pytest.raises(InputError, match="tokens are not repeated by a head mix"):
        make_layer("softmax", "interleave")(tokens(), attn_mask=mask)
