"""Multi-head explicit attention over every core: what it starts as, and what it computes."""

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

from headmix_vision.layers import CORES, HeadMixAttention

from .helpers import DIM, HEAD_DIM, HEADS, TOKENS, VARIANTS, make_layer, projected, tokens, transplant


@pytest.mark.parametrize(("core", "core_args"), VARIANTS)
def test_starts_as_its_core_alone(core, core_args):
    """With the norm that its models have, and without."""
    for options in ({"output_norm": True, "qk_norm": True, "cpe": True}, {}):
        plain = make_layer(core, core_args=core_args, **options)
        layer = transplant(make_layer(core, "mea", core_args=core_args, **options), plain)
        torch.testing.assert_close(layer(tokens()), plain(tokens()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("core", CORES)
def test_composition_without_a_norm_is_a_projection(core):
    """The core takes keys and values of mixed projections, and the layer is its core alone."""
    layer, plain = make_layer(core, "mea"), make_layer(core)
    nn.init.normal_(layer.head_mix.mix)
    state = layer.state_dict()
    of_keys, of_values = (torch.kron(weight, torch.eye(HEAD_DIM).double()) for weight in state.pop("head_mix.mix"))
    q, k, v = state["qkv.weight"].chunk(3)
    plain.load_state_dict({**state, "qkv.weight": torch.cat([q, of_keys @ k, of_values @ v])})
    torch.testing.assert_close(layer(tokens()), plain(tokens()))


def test_the_norm_keeps_the_composition_from_being_a_projection():
    """A factor of a head's values, which the projection after it could take up, is lost in the norm."""
    x = 100 * tokens()  # beside which the norm's eps is small
    for output_norm in (True, False):
        layer = make_layer("softmax", "mea", output_norm=output_norm)
        before = layer(x)
        with torch.no_grad():
            layer.head_mix.mix[1, 0] *= 3
        change = (layer(x) - before).abs().max()
        assert change < 1e-5 if output_norm else change > 1


def change_by_hook(qkv):
    qkv.register_forward_hook(lambda _, inputs, out: 2 * out)


def change_by_call(qkv):
    """As offloading does, and the casting of stored weights."""
    qkv.forward = lambda x: 2 * F.linear(x, qkv.weight)


def change_by_adapter(qkv):
    class Adapter(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    qkv.__class__ = Adapter


@pytest.mark.parametrize("change", [change_by_hook, change_by_call, change_by_adapter])
def test_what_acts_on_the_call_of_the_projection_acts(change):
    """The composed projection does not call it, and is not used then."""
    layer, doubled = make_layer("mhla", "mea"), make_layer("mhla", "mea")
    for one in (layer, doubled):
        nn.init.normal_(one.head_mix.mix, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        doubled.qkv.weight *= 2
    change(layer.qkv)
    torch.testing.assert_close(layer(tokens()), doubled(tokens()))


def test_a_pruned_projection_is_trained():
    """Its weight is made anew before each call; with the one of the last step, a second step would fail."""
    layer = make_layer("mhla", "mea")
    nn.utils.prune.l1_unstructured(layer.qkv, "weight", 0.5)
    for _ in range(2):
        layer(tokens()).square().sum().backward()
    assert layer.qkv.weight_orig.grad.any()


def test_the_composition_may_have_another_type_than_the_projection():
    for low, high in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        layer = make_layer("linear", "mea").to(low)
        expected = layer(tokens().to(low))
        layer.head_mix.to(high)
        torch.testing.assert_close(layer(tokens().to(low)), expected)


def rotate(y):
    """Turn pairs of channels by the token's place, alike in all heads, as rotary embeddings do: [B, N, H, D]."""
    angle = torch.arange(y.shape[1])[:, None, None] / 10 ** torch.arange(y.shape[3] // 2)
    even, odd = y[..., ::2], y[..., 1::2]
    pairs = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(pairs, -1).flatten(-2)


@pytest.mark.parametrize("args", [{}, {"component_heads": 2}, {"key_value_heads": 1}])
def test_rotations_commute_with_the_composition(args):
    layer = make_layer("softmax", "mea", args)
    nn.init.normal_(layer.head_mix.mix)
    q, k, v = projected(layer, tokens())
    torch.testing.assert_close(layer.head_mix.before(q, rotate(k), v)[1], rotate(layer.head_mix.before(q, k, v)[1]))


def wide(heads=4, dtype=torch.float64, **args):
    torch.manual_seed(0)
    return HeadMixAttention(32, heads, "softmax", "mea", grid=(4, 4), head_mix_args=args, dtype=dtype)


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_key_value_heads_are_shared_by_groups_of_queries(groups, components):
    components = min(groups, components)
    layer = wide(key_value_heads=groups, component_heads=components)
    nn.init.normal_(layer.head_mix.mix)
    x = torch.randn(2, 16, 32).double()
    q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in layer.qkv(x).split(layer.projected_dims, -1))
    assert k.shape[1] == v.shape[1] == components
    k, v = (torch.einsum("gc,bcnd->bgnd", w, y) for w, y in zip(layer.head_mix.mix, (k, v), strict=True))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(layer(x), layer.proj(out.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(("heads", "components", "taken"), [(4, 2, [0, 0, 1, 1]), (8, 3, [0, 0, 0, 1, 1, 1, 2, 2])])
def test_fewer_components_start_as_grouped_queries(heads, components, taken):
    layer = wide(heads, component_heads=components)
    k, v = torch.randn(2, 1, 16, components, 8).double()
    _, keys, values = layer.head_mix.before(None, k, v)
    assert torch.equal(keys, k[:, :, taken]) and torch.equal(values, v[:, :, taken])


def test_projections_shrink_with_the_component_heads():
    layer = make_layer("mhla", "mea", {"component_heads": 1}, qk_norm=True)
    assert layer.qkv.weight.shape == (DIM + 2 * HEAD_DIM, DIM)
    assert (layer.q_norm.weight.numel(), layer.k_norm.weight.numel()) == (DIM, HEAD_DIM)
    assert layer.head_mix.mix.shape == (2, HEADS, 1) and layer(tokens()).shape == (2, TOKENS, DIM)
    grouped = wide(key_value_heads=2)
    assert grouped.qkv.weight.shape == (32 + 2 * 16, 32) and grouped.head_mix.mix.shape == (2, 2, 2)


@pytest.mark.parametrize("core", CORES)
def test_parameters_beyond_those_of_the_core(core):
    plain, layer = (sum(p.numel() for p in make_layer(core, mix).parameters()) for mix in (None, "mea"))
    assert layer - plain == 2 * HEADS**2


def test_masks_are_taken():
    mask = torch.rand(TOKENS, TOKENS) > 0.3
    plain = make_layer("softmax")
    layer = transplant(make_layer("softmax", "mea"), plain)
    torch.testing.assert_close(layer(tokens(), attn_mask=mask), plain(tokens(), attn_mask=mask))
    torch.testing.assert_close(layer(tokens(), is_causal=True), plain(tokens(), is_causal=True))


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("args", [{}, {"component_heads": 2}, {"key_value_heads": 1}])
def test_composing_weights_is_composing_keys_and_values(args, qkv_bias):
    results = []
    for fold in (True, False):
        layer = make_layer("mhla", "mea", {**args, "fold": fold}, qkv_bias=qkv_bias, output_norm=True)
        nn.init.normal_(layer.head_mix.mix, generator=torch.Generator().manual_seed(2))
        out = layer(tokens())
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in layer.parameters())])
    torch.testing.assert_close(*results)


def test_weights_are_composed_where_nothing_stands_between():
    class Adapted(nn.Linear):
        """Adds to what its weights say, as an adapter does."""

        def forward(self, x):
            return super().forward(x) + x.sum()

    assert make_layer("softmax", "mea").folds and not make_layer("softmax", "mea", qk_norm=True).folds
    assert not make_layer("softmax", "mea", {"component_heads": 2}).folds
    layer, adapted = make_layer("softmax", "mea"), make_layer("softmax", "mea")
    adapted.qkv = Adapted(DIM, 3 * DIM, bias=False, dtype=torch.float64)
    adapted.load_state_dict(layer.state_dict())
    assert (adapted(tokens()) - layer(tokens())).abs().max() > 1e-3
