"""The socket of head mixes, over every core: the shipped ones, and one that changes the number of the core's heads."""

import copy

import pytest
import torch
import torch.fx
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headmix_vision.errors import InputError
from headmix_vision.layers import CORES, HEAD_MIXES, HeadMix
from headmix_vision.ops import TokenGrid

from .helpers import GRID, HEADS, PREFIX, TOKENS, make_layer, projected, tokens, transplant


class Widen(HeadMix):
    """Make pseudo-tokens of each token, in `factor` times as many heads, and average what the core says of them."""

    def __init__(self, spec, places=1, factor=2):
        super().__init__(spec)
        self.repeats, self.core_heads, self.factor = places, factor * spec.num_heads, factor
        copies = torch.eye(spec.num_heads).repeat_interleave(factor, 1)
        self.weight = nn.Parameter(copies[:, None].repeat(3, 1, places, 1).to(spec.dtype))  # [3, H, places, G]

    def before(self, q, k, v):
        mixed = torch.einsum("cbnhd,chpg->cbnpgd", torch.stack([q, k, v]), self.weight)
        return mixed.flatten(2, 3).unbind(0)

    def after(self, out):
        return out.unflatten(1, (-1, self.repeats)).unflatten(3, (-1, self.factor)).mean((2, 4))


MIXES = {"iha": {"pseudo_heads": 2, "collapse": "across_heads"}, "mea": {"component_heads": 2}, "widen": {"places": 2}}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(HEAD_MIXES, "widen", Widen)


@pytest.mark.parametrize("core", CORES)
def test_a_mix_may_give_the_core_more_heads(core):
    plain = make_layer(core, core_args={"conv_size": 0} if core == "hih" else {})
    for args in ({"factor": 1}, {"factor": 2}, {"places": 3}):
        if core == "hih" and args != {"factor": 1}:
            continue  # its gates belong to its heads, and each place writes
        layer = transplant(make_layer(core, "widen", args, {"conv_size": 0} if core == "hih" else {}), plain)
        torch.testing.assert_close(layer(tokens()), plain(tokens()))
        layer(tokens()).square().sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


def every_option(core):
    options = dict.fromkeys(("cpe", "qk_norm", "output_norm", "output_gate", "scale_norm"), True)
    return options | {
        "grid": (2, 4),
        "block_grid": (2, 2),
        "core_args": {"window": (1, 3)} if core == "softmax" else {},
    }


@pytest.mark.parametrize("head_mix", ["iha", "mea"])
@pytest.mark.parametrize("core", CORES)
def test_every_core_with_every_option(core, head_mix):
    options = every_option(core)
    layer, x = make_layer(core, head_mix, MIXES[head_mix], **options), tokens(PREFIX + 8)
    out = layer(x)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    torch.testing.assert_close(copy.deepcopy(layer)(x), out)
    traced = torch.fx.symbolic_trace(layer, concrete_args={"grid": None, "rotation": None})
    torch.testing.assert_close(traced(x), out)
    again = make_layer(core, head_mix, MIXES[head_mix], **options)
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(again(x), out)


@pytest.mark.parametrize(
    ("core", "head_mix"),
    [  # each core with one of the mixes, the rest among the long matrices
        pytest.param(core, mix, marks=() if (mix == "iha") == (core in ("softmax", "mhla")) else pytest.mark.slow)
        for core in CORES
        for mix in ("iha", "mea")
    ],
)
def test_every_core_compiles_with_every_option(core, head_mix):
    layer, x = make_layer(core, head_mix, MIXES[head_mix], **every_option(core)), tokens(PREFIX + 8)
    torch.compiler.reset()  # one method is compiled for many layers here: more often than dynamo allows
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("head_mix", MIXES)
@pytest.mark.parametrize("core", CORES)
def test_other_grids(core, head_mix):
    layer, larger = make_layer(core, head_mix, MIXES[head_mix], cpe=True), tokens(PREFIX + 72)
    out = layer(larger, grid=(8, 9))
    layer.set_grid((8, 9))
    torch.testing.assert_close(layer(larger), out)
    if core == "mhla":
        layer.set_block_grid((4, 4))
        assert layer.core.mixing().shape == (17, 17) and layer(larger).shape == larger.shape


@pytest.mark.parametrize("grid", [(6,), (2, 3, 2)])
@pytest.mark.parametrize("head_mix", ["iha", "mea"])
@pytest.mark.parametrize("core", CORES)
def test_other_numbers_of_axes(core, head_mix, grid):
    """Lines and clips, whose layers start as their core alone here too."""
    args = {"window": 1} if core == "softmax" else {}
    sizes = {"grid": grid, "block_grid": (2, 1, 2)[: len(grid)], "cpe": True, "core_args": args}
    plain, x = make_layer(core, **sizes), tokens(PREFIX + torch.Size(grid).numel())
    torch.testing.assert_close(transplant(make_layer(core, head_mix, **sizes), plain)(x), plain(x))


@pytest.mark.parametrize("head_mix", ["iha", "mea"])
@pytest.mark.parametrize("core", CORES)
def test_autocast_keeps_the_sums_of_a_mix_in_float32(core, head_mix):
    """The mixed heads are float64's, rounded once."""
    layer = make_layer(core, head_mix, MIXES[head_mix], dtype=torch.float32)
    nn.init.normal_(layer.head_mix.mix)
    x = tokens().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = projected(layer, x)
        found = layer.head_mix.before(q, k, v)
        assert layer(x).dtype is torch.bfloat16
    exact = layer.double().head_mix.before(q.double(), k.double(), v.double())
    for y, expected in zip(found, exact, strict=True):
        assert y.dtype is torch.bfloat16 and (y == expected.bfloat16()).double().mean() > 0.99


@pytest.mark.parametrize(
    ("head_mix", "args"),
    [
        ("iha", {"pseudo_heads": 3, "collapse": "across_heads"}),
        ("mea", {}),
        ("mea", {"component_heads": 2}),
    ],
)
def test_operations_are_those_of_the_products(head_mix, args):
    """A collapse per head is counted without the zeros of its products, hence one across heads here."""
    mix = make_layer("softmax", head_mix, args).head_mix
    q, k, v = projected(make_layer("softmax", head_mix, args), tokens())
    with FlopCounterMode(display=False) as counter:
        q, *_ = mix.before(q, k, v)
        mix.after(q)
    assert counter.get_total_flops() == 2 * mix.flops(TokenGrid(GRID, PREFIX))  # of two images


def test_operations_of_a_layer_are_those_of_its_parts():
    plain, layer = make_layer("softmax"), make_layer("softmax", "iha", {"pseudo_heads": 3})
    attention = 4 * TOKENS**2 * 24
    assert layer.flops() - plain.flops() == 8 * attention + layer.head_mix.flops(layer.grid)
    per_head = make_layer("softmax", "iha", {"pseudo_heads": 3}).head_mix.flops(layer.grid)
    assert per_head == 2 * TOKENS * 8 * 3 * HEADS * (3 * HEADS + 1)


def keep_away(layer):
    """Keep the weights of each module elsewhere but for its call, as offloading and sharding do."""
    for module in layer.modules():
        own = dict(module.named_parameters(recurse=False))
        away = {name: nn.Parameter(p.detach().to("meta")) for name, p in own.items()}

        def call(*args, module=module, own=own, away=away, forward=module.forward, **kwargs):
            module._parameters.update(own)
            out = forward(*args, **kwargs)
            module._parameters.update(away)
            return out

        if own:
            module._parameters.update(away)
            module.forward = call


@pytest.mark.parametrize("head_mix", ["iha", "mea"])
@pytest.mark.parametrize("core", CORES)
def test_weights_are_used_in_the_call_of_their_module(core, head_mix):
    layer = make_layer(core, head_mix, cpe=True, qk_norm=True, output_norm=True, output_gate=True)
    expected = layer(tokens())
    keep_away(layer)
    torch.testing.assert_close(layer(tokens()), expected)


def test_a_composed_projection_calls_its_mix():
    layer, calls = make_layer("mhla", "mea"), []
    expected = layer(tokens())
    keep_away(layer.head_mix)
    layer.head_mix.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0]))
    torch.testing.assert_close(layer(tokens()), expected)
    assert calls == ["fold", "after"]


@pytest.mark.parametrize(("head_mix", "option"), [("iha", "pseudo_heads"), ("mea", "component_heads")])
def test_sizes_of_numpy_are_sizes(head_mix, option):
    numpy = pytest.importorskip("numpy")
    layer = make_layer("mhla", head_mix, {option: numpy.int64(2)})
    assert layer(tokens()).shape == (2, TOKENS, 24) and type(layer.flops()) is int


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_mix_is_held_to_what_it_says(monkeypatch, side):
    """A defect of the mix, not of a user: it keeps its traceback."""
    layer = make_layer("mhla", "widen", {"places": 2, "factor": 1})
    monkeypatch.setattr(layer.head_mix, side, lambda *x: x if side == "before" else x[0])
    with pytest.raises(AssertionError, match=r"head mix: \(2, .* is not .* pseudo-tokens of 3 heads"):
        layer(tokens())


IHA, MEA = {"head_mix": "iha"}, {"head_mix": "mea"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_mix": "none"}, r"head_mix must be None or one of .*'iha'.* got 'none'"),
        ({"head_mix": ["iha"]}, r"head_mix must be None or one of .* got \['iha'\]"),
        *(({"head_mix_args": args}, "head_mix_args=.* needs a head_mix") for args in ({"impl": "auto"}, "iha", 0, [])),
        *(({**IHA, "head_mix_args": args}, "head_mix_args of 'iha' must be a mapping") for args in ("x", 2, ["impl"])),
        ({**IHA, "head_mix_args": {"pseudoheads": 2}}, "has no 'pseudoheads'; did you mean pseudo_heads.*collapse"),
        ({**IHA, "head_mix_args": {"component_heads": 2}}, "head_mix_args of 'iha' has no 'component_heads'"),
        ({**MEA, "head_mix_args": {"spec": None}}, "head_mix_args of 'mea' has no 'spec'"),
        *(
            ({**IHA, "head_mix_args": {"pseudo_heads": p}}, "pseudo_heads must be a whole number of at least 1, got")
            for p in (0, -1, 2.0, True, "2", None, float("nan"))
        ),
        ({**IHA, "head_mix_args": {"collapse": "mean"}}, r"collapse must be one of \('per_head', 'across_heads'\)"),
        ({**IHA, "head_mix_args": {"impl": "cuda"}}, "impl must be one of .*'triton'.* got 'cuda'"),
        ({**MEA, "head_mix_args": {"component_heads": 4}}, "component_heads must be from 1 to 3, .* got 4"),
        *(
            ({**MEA, "head_mix_args": {"component_heads": h}}, "component_heads must be a whole number of at least 1")
            for h in (0, 1.0, True, "2")
        ),
        *(
            ({**MEA, "head_mix_args": {"key_value_heads": g}}, f"key_value_heads={g} does not divide the 3 heads")
            for g in (2, 4)
        ),
        ({**MEA, "head_mix_args": {"key_value_heads": 0}}, "key_value_heads must be a whole number of at least 1"),
        (
            {**MEA, "head_mix_args": {"key_value_heads": 1, "component_heads": 2}},
            "component_heads must be from 1 to 1, the heads composed, got 2",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message) as error:
        make_layer("mhla", **arguments)
    assert "\n" not in str(error.value)
