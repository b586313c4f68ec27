"""The core of Head-in-Head: its mask, its parts and its scans."""

import pytest
import torch
import torch.nn.functional as F

from headmix_vision.layers import HeadInHeadCore, HeadMixAttention, LayerSpec, SubHeadMask
from headmix_vision.ops import TokenGrid, TokenScan, head_in_head

WIDTH, HEADS = 24, 3


def make_layer(grid=(4, 5), prefix=0, **core_args):
    torch.manual_seed(0)
    args = {"num_sub_heads": 2, **core_args}
    layer = HeadMixAttention(WIDTH, HEADS, core="hih", grid=grid, num_prefix_tokens=prefix, core_args=args)
    return layer.double()


def tokens(count, seed=1):
    return torch.randn(2, count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dim", [None, WIDTH])
@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_masks_are_correlation_matrices(r, dim):
    module = SubHeadMask(HEADS, r, dim).double()
    mask = module(tokens(7))
    assert mask.shape == ((HEADS, r, r) if dim is None or r == 1 else (2, 7, HEADS, r, r))
    torch.testing.assert_close(mask, mask.mT)
    torch.testing.assert_close(mask.diagonal(dim1=-2, dim2=-1), torch.ones(mask.shape[:-1], dtype=mask.dtype))
    assert mask.min() >= 0 and mask.max() < 1 + 1e-12
    assert torch.linalg.eigvalsh(mask).min() > -1e-12
    assert r == 1 or (mask - 1).abs().max() > 0.01
    assert len(list(module.parameters())) == (r > 1)


@pytest.mark.parametrize("r", [1, 4])
def test_masks_without_memory_are_filled_when_it_is_there(r):
    mask = SubHeadMask(HEADS, r, device="meta").to_empty(device="cpu")
    for tensor in (*mask.parameters(), *mask.buffers()):
        torch.nn.init.constant_(tensor, torch.nan)
    mask.reset_parameters()
    assert mask(tokens(1)).isfinite().all() and (r > 1 or (mask(tokens(1)) == 1).all())


def test_static_masks_differ_between_heads_and_low_precision_keeps_them_in_float32():
    mask = SubHeadMask(HEADS, 4)(tokens(1))
    assert (mask[0] - mask[1]).abs().max() > 0.01
    assert SubHeadMask(HEADS, 4).bfloat16()(tokens(1)).dtype is torch.float32


@pytest.mark.parametrize("mask", ["static", "token"])
@pytest.mark.parametrize("scans", ["forward", "bidirectional", "cross"])
def test_layer_is_the_op_between_projections_convolution_and_norms(scans, mask):
    """Written out token by token of the definition, with the loop."""
    prefix, grid = 2, (4, 5)
    layer = make_layer(grid, prefix, scans=scans, mask=mask)
    core, x = layer.core, tokens(22)
    packed = layer.qkv(x)
    image = packed[:, prefix:].reshape(2, *grid, 3 * WIDTH).movedim(-1, 1)
    convolved = F.conv2d(image, core.conv.proj.weight, padding=1, groups=3 * WIDTH).flatten(2).mT
    packed = F.silu(torch.cat([packed[:, :prefix], convolved], 1))
    q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in packed.chunk(3, -1))
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    beta = 1 / (1 + (-x @ core.beta.weight.mT - core.beta.bias).exp())
    log_decay = -core.A_log.exp() * torch.log1p((x @ core.decay.weight.mT + core.dt_bias).exp())
    rows = torch.arange(20).view(grid)
    forward = [torch.cat([order.flatten() + prefix, torch.arange(prefix)]) for order in (rows, rows.mT)]
    orders = {
        "forward": forward[:1],
        "bidirectional": [forward[0], forward[0].flip(0)],
        "cross": [order for f in forward for order in (f, f.flip(0))],
    }[scans]
    expected = 0
    for order in orders:
        expected = expected + head_in_head(q, k, v, beta, log_decay, core.mask(x), scan=order, impl="reference")[0]
    torch.testing.assert_close(layer(x), layer.proj(expected.flatten(2)))


def test_bidirectional_scans_treat_an_image_and_its_reverse_alike():
    """Turning the image by 180 degrees turns the output, once the convolution is symmetric."""
    layer = make_layer()
    with torch.no_grad():
        kernel = layer.core.conv.proj.weight
        kernel.copy_((kernel + kernel.flip(-1, -2)) / 2)
    x = tokens(20)
    torch.testing.assert_close(layer(x.flip(1)), layer(x).flip(1))
    one_way = make_layer(scans="forward", conv_size=0)
    assert (one_way(x.flip(1)) - one_way(x).flip(1)).abs().max() > 1e-3


def test_cross_scans_treat_rows_and_columns_alike():
    layer = make_layer((4, 4), scans="cross", conv_size=0)
    x = tokens(16)
    transposed = x.unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2)
    expected = layer(x).unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2)
    torch.testing.assert_close(layer(transposed), expected)


@pytest.mark.parametrize("scans", ["forward", "bidirectional"])
def test_who_sees_whom(scans):
    """Prefix tokens see the whole grid; grid tokens see each other and the prefix through the reverse alone."""
    layer = make_layer((2, 3), prefix=1, scans=scans, conv_size=0)
    x = tokens(7)[:1]
    jacobian = torch.autograd.functional.jacobian(lambda y: layer(y)[0].sum(-1), x)[:, 0]  # [7 outputs, 7, C]
    seen = jacobian.abs().sum(-1) > 1e-12
    grid_order = [1, 2, 3, 4, 5, 6, 0]
    earlier = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = earlier if scans == "forward" else torch.ones_like(earlier)
    assert torch.equal(seen[grid_order][:, grid_order], expected)


@pytest.mark.parametrize("grid", [(10,), (2, 3, 4)])
def test_other_numbers_of_axes(grid):
    layer = make_layer(grid, prefix=1, scans="cross")
    count = 1 + TokenScan.from_grid(grid).num_tokens
    assert layer(tokens(count)).shape == (2, count, WIDTH)


def test_initial_gates():
    """beta starts at one half on average; a token's decay is -A dt with A in (0, 16) and dt in [1e-3, 0.1]."""
    torch.manual_seed(0)
    core = HeadInHeadCore(LayerSpec(2048, 512, 4, TokenGrid((4, 4)), (1, 1)))
    rate, step = core.A_log.exp(), F.softplus(core.dt_bias)
    assert rate.min() > 0 and rate.max() < 16 and 7 < rate.mean() < 9
    assert step.min() > 0.99e-3 and step.max() < 0.101
    assert abs(step.log().mean() - (torch.tensor([1e-3, 0.1]).log().mean())) < 0.2


@pytest.mark.parametrize(
    ("core_args", "message"),
    [
        ({"num_sub_heads": 3}, "num_sub_heads=3 does not divide the head dim 8"),
        ({"num_sub_heads": 0}, "num_sub_heads must be a whole number of at least 1"),
        ({"mask": "dense"}, "mask must be one of"),
        ({"scans": "spiral"}, "scans must be one of"),
        ({"conv_size": 4}, "conv_size must be odd"),
        ({"conv_size": -1}, "conv_size must be a whole number"),
    ],
)
def test_wrong_arguments_are_refused(core_args, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**core_args)


def test_masks_without_sub_heads_are_refused():
    with pytest.raises(ValueError, match="num_sub_heads must be a whole number of at least 1"):
        SubHeadMask(2, 0)


def test_a_write_changes_the_state_by_a_matrix_of_rank_r():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 1, 16, generator=generator, dtype=torch.float64)
    state = torch.randn(1, 1, 16, 16, generator=generator, dtype=torch.float64)
    beta, log_decay = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    for r in (1, 2, 4):
        mask = torch.eye(r, dtype=torch.float64)[None]
        _, after = head_in_head(q, k, v, beta, log_decay, mask, initial_state=state, output_final_state=True)
        assert torch.linalg.matrix_rank(after - state) == r


def test_output_of_a_first_token_is_proportional_to_beta_max():
    x = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = []
    for beta_max in (1.0, 0.5, 2.0):
        torch.manual_seed(0)
        core_args = {"num_sub_heads": 2, "beta_max": beta_max}
        layer = HeadMixAttention(8, 1, "hih", grid=(1, 1), core_args=core_args, proj_bias=False).double()
        outputs.append(layer(x))
    assert outputs[0].abs().max() > 0
    torch.testing.assert_close(outputs[1], 0.5 * outputs[0])
    torch.testing.assert_close(outputs[2], 2 * outputs[0])


@pytest.mark.parametrize("beta_max", [0.0, -1.0, 2.1])
def test_a_beta_max_out_of_range_is_refused(beta_max):
    with pytest.raises(ValueError, match="beta_max must be"):
        HeadMixAttention(8, 1, "hih", core_args={"num_sub_heads": 2, "beta_max": beta_max})
