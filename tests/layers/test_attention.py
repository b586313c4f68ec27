import copy
import pickle

import pytest
import timm.layers
import torch
import torch._inductor.config

from headmix_vision.layers import CORES, ConvPositionEncoding, HeadMixAttention
from headmix_vision.ops import TokenBlocks, TokenGrid, TokenWindow, mhla
from headmix_vision.ops.hardware import NO_KERNELS
from headmix_vision.ops.token_grid import with_shape

CORE_NAMES = tuple(CORES)


def make_layer(core="mhla", **kwargs):
    torch.manual_seed(0)
    return HeadMixAttention(24, 3, core=core, **{"grid": (5, 6), "block_grid": (2, 3), **kwargs})


def test_softmax_core_equals_timms_attention():
    ours = make_layer("softmax", qkv_bias=True).eval()
    theirs = timm.layers.Attention(24, 3, qkv_bias=True).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 30, 24)
    torch.testing.assert_close(ours(x), theirs(x))
    mask = torch.rand(2, 1, 30, 30) > 0.3
    torch.testing.assert_close(ours(x, attn_mask=mask), theirs(x, attn_mask=mask))


@pytest.mark.parametrize(("grid", "window", "prefix"), [((5, 6), 3, 1), ((5, 6), (1, 5), 0), ((2, 4, 3), (1, 3, 3), 2)])
def test_softmax_in_a_window(grid, window, prefix):
    """The mask of the window (tests/ops/test_token_window.py) given to a layer without one."""
    layer, plain = (
        make_layer("softmax", grid=grid, block_grid=(1,) * len(grid), num_prefix_tokens=prefix, core_args=args).eval()
        for args in ({"window": window}, {})
    )
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, layer.grid.num_tokens, 24)
    seen = TokenWindow.of(layer.grid, window)
    assert not torch.equal(layer(x), plain(x))
    torch.testing.assert_close(layer(x), plain(x, attn_mask=seen.mask(x)))
    assert plain.flops() - layer.flops() == 4 * 24 * (layer.grid.num_tokens**2 - seen.num_pairs)
    for arguments in ({"attn_mask": seen.mask(x)}, {"is_causal": True}):
        with pytest.raises(ValueError, match="attn_mask and is_causal cannot be joined with a window"):
            layer(x, **arguments)


def test_a_window_that_reaches_all_tokens_changes_nothing():
    sizes = {"grid": (1, 1), "num_prefix_tokens": 3, "block_grid": (1, 1)}
    layer, plain = (make_layer("softmax", core_args=args, **sizes) for args in ({"window": 1}, {}))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 4, 24)
    torch.testing.assert_close(layer(x), plain(x))
    assert layer.flops() == plain.flops()


def test_a_window_larger_than_another_grid_is_refused_and_changes_nothing():
    layer = make_layer("softmax", core_args={"window": 5})
    x = torch.randn(2, 30, 24)
    before = layer(x)
    for use in (layer.set_grid, lambda grid: layer(torch.randn(2, 32, 24), grid=grid)):
        with pytest.raises(ValueError, match=r"window \(5, 5\) is larger than the token grid \(4, 8\)"):
            use((4, 8))
    assert torch.equal(layer(x), before) and layer.grid.shape == (5, 6)
    layer.set_grid((6, 7))
    assert layer(torch.randn(2, 42, 24)).shape == (2, 42, 24)


def test_mhla_core_is_the_op_between_two_projections():
    layer = make_layer(num_prefix_tokens=1).double()
    x = torch.randn(2, 31, 24, dtype=torch.float64)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 3, 8)).unbind(2)
    blocks = TokenBlocks.from_grid((5, 6), (2, 3), 1)
    expected = layer.proj(mhla(q, k, v, layer.core.mixing(), blocks, impl="reference").flatten(2))
    torch.testing.assert_close(layer(x), expected)


def test_linear_core_is_mhla_in_one_block():
    layer, one_block = make_layer("linear"), make_layer(block_grid=(1, 1))
    one_block.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 30, 24)
    torch.testing.assert_close(layer(x), one_block(x))


@pytest.mark.parametrize("core", CORE_NAMES)
@pytest.mark.parametrize(
    "name", ["cpe", "lepe", "input_norm", "qk_norm", "output_norm", "output_gate", "scale_norm", ""]
)
def test_every_option_changes_the_output_and_trains(core, name):
    options = {name: 5 if name == "lepe" else True} if name else {}
    layer = make_layer(core, num_prefix_tokens=2, **options)
    x = torch.randn(2, 32, 24)
    out = layer(x)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    if options:
        plain = make_layer(core, num_prefix_tokens=2)
        plain.load_state_dict({n: p for n, p in layer.state_dict().items() if n in plain.state_dict()})
        assert (plain(x) - out).abs().max() > 1e-4


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_cpe_is_a_depthwise_convolution_on_the_grid(axes):
    grid = (4, 3, 5)[:axes]
    cpe = ConvPositionEncoding(6, axes)
    x = torch.randn(2, 2 + torch.Size(grid).numel(), 6)
    out = cpe(x, TokenGrid(grid, 2))
    image = x[:, 2:].reshape(2, *grid, 6).movedim(-1, 1)
    assert torch.equal(out[:, :2], x[:, :2])
    torch.testing.assert_close(out[:, 2:].reshape(2, *grid, 6).movedim(-1, 1), image + cpe.proj(image))


def test_lepe_adds_the_convolved_values_to_the_heads_of_the_grid():
    layer, plain = make_layer(lepe=3, num_prefix_tokens=2), make_layer(num_prefix_tokens=2)
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "lepe" not in name})
    x = torch.randn(2, 32, 24)
    values = layer.qkv(x)[:, 2:, 48:].mT.unflatten(2, (5, 6))
    convolved = torch.nn.functional.linear(layer.lepe.proj(values).flatten(2).mT, layer.proj.weight)
    added = layer(x) - plain(x)
    torch.testing.assert_close(added[:, 2:], convolved)
    assert added[:, :2].abs().max() < 1e-6
    assert layer.flops() - plain.flops() == 2 * 30 * 24 * 9


@pytest.mark.parametrize("normalizer", ["source_block", None])
def test_mixing_weights_of_any_sign(normalizer):
    layer = make_layer(core_args={"mixing_clip": False, "normalizer": normalizer})
    q, k, v = (torch.randn(2, 30, 3, 8) for _ in range(3))
    blocks = layer.core.mixing.blocks
    with torch.no_grad():
        layer.core.mixing.weight[0, 1] = -3.0
    expected = mhla(q, k, v, layer.core.mixing.weight, blocks, normalizer=normalizer, impl="reference")
    torch.testing.assert_close(layer.core(q, k, v, layer.grid), expected)
    layer.core.mixing.weight[0, 1].backward()
    assert layer.core.mixing.weight.grad[0, 1] == 1


def test_three_axes():
    layer = make_layer(grid=(2, 4, 5), block_grid=(2, 2, 1), cpe=True)
    assert layer(torch.randn(1, 40, 24)).shape == (1, 40, 24)


def test_set_grid_keeps_the_mixing():
    layer = make_layer(cpe=True)
    before = layer.core.mixing.weight
    layer.set_grid((8, 9))
    assert layer(torch.randn(1, 72, 24)).shape == (1, 72, 24)
    assert layer.core.mixing.weight is before
    layer.core.set_block_grid((4, 4))
    assert layer.core.mixing().shape == (16, 16)


@pytest.mark.parametrize("core", ["linear", "mhla", "hih"])
def test_a_core_is_bound_once_for_each_grid(core):
    layer, x = make_layer(core), torch.randn(2, 30, 24)
    names, bound = [*layer.state_dict()], layer.core.bind(layer.grid)
    out = layer(x)
    assert make_layer(core).core.bind(TokenGrid(layer.grid.shape)) is bound  # layers share it
    assert layer.core.bind(with_shape(layer.grid, (6, 5))) is not bound
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert again.core.bind(again.grid) is bound and [*again.state_dict()] == names
        assert torch.equal(again(x), out)
    if core == "mhla":
        q, k, v = torch.randn(3, 2, 30, 2, 12).unbind()
        assert torch.equal(bound(q, k, v, layer.core.mixing()), layer.core(q, k, v, layer.grid))


@pytest.mark.parametrize(
    ("core", "core_args"),
    [("softmax", {}), *((core, {"feature_map": "elu1"}) for core in ("linear", "mhla")), ("hih", {"scans": "forward"})],
)
def test_autocast_keeps_accumulation_in_float32(core, core_args, monkeypatch):
    """The op's output is float64's, rounded once: roundings in between would move about half of the values."""
    calls = []
    layer = make_layer(core, core_args=core_args)
    bind = layer.core.bind

    def record(*args):
        bound = bind(*args)
        return lambda *tensors: calls.append((bound, tensors, bound(*tensors))) or calls[-1][2]

    monkeypatch.setattr(layer.core, "bind", record)
    x = torch.randn(2, 30, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    assert (out.float() - layer(x)).abs().max() < 0.02
    for bound, tensors, found in calls[: len(calls) // 2]:
        assert tensors[0].dtype is torch.bfloat16
        exact = bound(*(y.double() for y in tensors))
        assert (found == exact.to(found.dtype)).double().mean() > 0.95
    assert bool(calls) == (core != "softmax")  # PyTorch's own attention rounds as it likes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 does not divide the width dim=24"),
        ({"core": "quadratic"}, "core must be one of .*'mhla'.* got 'quadratic'"),
        ({"head_mix": "mae"}, "head_mix must be None"),
        *(({"block_grid": blocks}, "one whole number for each axis") for blocks in (None, 4, "22", (2.0, 3))),
        *(({name: "no"}, f"{name} must be true or false, got 'no'") for name in ("qk_norm", "output_gate")),
        *(({"lepe": value}, "lepe must be") for value in (2, -1, 2.5, True)),
        ({"lepe": 3, "head_mix": "mea"}, "lepe must be 0, or odd in a layer without a head mix, got 3"),
        ({"cpe": "no"}, "cpe must be true or false or 'factorised', got 'no'"),
        ({"cpe": "factorised"}, "cpe='factorised' needs a grid of three axes, time first, got 2"),
        ({"core_args": {"mixing_trainable": "false"}}, "mixing_trainable must be true or false, got 'false'"),
        ({"core_args": {"mixing_per_head": 3}}, "mixing_per_head must be true or false, got 3"),
        ({"grid": 5}, "a token grid must be one whole number for each axis"),
        ({"block_grid": (6, 3)}, "larger than the token grid"),
        ({"attn_drop": 0.1}, "needs the 'softmax' core"),
        ({"core_args": {"mixing_init": "none"}}, "mixing init must be one of"),
        ({"core_args": {"normalizer": "none"}}, "normalizer must be one of"),
        ({"core": "mhla", "core_args": {"window": 3}}, "core_args of 'mhla' has no 'window'"),
        ({"core": "softmax", "core_args": {"window": 4}}, r"window \(4, 4\) must be odd numbers of tokens"),
        ({"core": "softmax", "core_args": {"window": 7}}, r"window \(7, 7\) is larger than the token grid \(5, 6\)"),
        ({"core": "softmax", "core_args": {"window": True}}, "window must be one whole number for each axis, got True"),
        ({"core": "softmax", "core_args": {"window": (3,)}}, "must have the same number of axes"),
        ({"core": "linear", "core_args": {"feature_map": "none"}}, "feature_map must be one of"),
        ({"core": "hih", "core_args": {"impl": "none"}}, "impl must be one of"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        HeadMixAttention(**{"dim": 24, "num_heads": 3, "grid": (5, 6), "block_grid": (2, 3), **arguments})


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="31 tokens given, but the layer expects 30: 0 prefix tokens and a 5x6 grid"):
        make_layer()(torch.randn(1, 31, 24))
    for core in ("linear", "mhla", "hih"):
        with pytest.raises(ValueError, match="attn_mask and is_causal need the 'softmax' core"):
            make_layer(core)(torch.randn(1, 30, 24), is_causal=True)


@pytest.mark.slow
def test_compiled_layers_do_not_concatenate_the_gradients_of_their_projection():
    """The kernels write them in place, into one tensor, however the layer cuts q, k and v out of it."""
    if NO_KERNELS is not None:
        pytest.skip(NO_KERNELS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = make_layer(core_args={"impl": "triton_summary"}).to(device)
    graphs = []  # what is left of forward and backward pass to generate code for
    options = {
        "post_grad_custom_post_pass": lambda graph: graphs.append([str(node.target) for node in graph.nodes]),
        "force_disable_caches": True,
        "cpp.vec_isa_ok": False,  # else seven probes are compiled and loaded first
    }
    torch.compiler.reset()
    with torch._inductor.config.patch(options):
        torch.compile(layer, fullgraph=True)(torch.randn(2, 30, 24, device=device)).square().sum().backward()
    assert "headmix_vision.mhla_packed_gradients_kernels.default" in graphs[-1]
    assert "aten.cat.default" not in graphs[-1]
