"""Convolutions on the token grid, what they share with the modules that hold their weights, and those of patches."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headmix_vision.layers.convolutions import (
    ConvPositionEncoding,
    FactorisedPositionEncoding,
    GridConvolution,
    PatchConv2d,
    PatchConv3d,
)
from headmix_vision.ops import TokenGrid

GRID = TokenGrid((3, 4, 2), 2)
LAYERS = {
    "plain": lambda: GridConvolution(6, 3),
    "silu": lambda: GridConvolution(6, 3, bias=False, silu=True),
    "cpe": lambda: ConvPositionEncoding(6, 3),
    "factorised": lambda: FactorisedPositionEncoding(6, 3),
}


def double_by_hook(conv):
    conv.register_forward_hook(lambda _, inputs, out: 2 * out)


def double_by_forward(conv):
    forward = conv.forward
    conv.forward = lambda x: 2 * forward(x)


class Adapter(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return 2 * self.conv(x)


@pytest.mark.parametrize("double", [double_by_hook, double_by_forward, Adapter])
@pytest.mark.parametrize("name", [*LAYERS, "parts"])
def test_what_is_put_on_a_convolution_is_called(name, double):
    layer, x = LAYERS["silu" if name == "parts" else name](), torch.randn(2, GRID.num_tokens, 6)

    def call(layer):
        return torch.cat(layer(list(x.chunk(3, -1)), GRID), -1) if name == "parts" else layer(x, GRID)

    expected, before = copy.deepcopy(layer), call(layer)
    with torch.no_grad():
        for parameter in expected.proj.parameters():
            parameter.mul_(2)
    layer.proj = double(layer.proj) or layer.proj
    torch.testing.assert_close(call(layer), call(expected))
    assert (call(layer) - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", LAYERS)
def test_prefix_tokens_stay_as_they_are(name):
    layer, x = LAYERS[name](), torch.randn(2, GRID.num_tokens, 6)
    for module in layer.modules():
        if isinstance(module, nn.Conv3d | nn.Conv2d):
            nn.init.normal_(module.weight)
    out, alone = layer(x, GRID), layer(x[:, 2:], TokenGrid(GRID.shape))
    assert out.shape == x.shape
    torch.testing.assert_close(out[:, :2], F.silu(x[:, :2]) if name == "silu" else x[:, :2])
    torch.testing.assert_close(out[:, 2:], alone)
    assert (alone - x[:, 2:]).abs().max() > 1e-3


def test_parts_are_convolved_as_the_whole():
    layer, x = LAYERS["silu"](), torch.randn(2, GRID.num_tokens, 6)
    torch.testing.assert_close(torch.cat(layer(list(x.chunk(3, -1)), GRID), -1), layer(x, GRID))


def test_options_of_a_replaced_convolution_are_kept():
    grid, x = TokenGrid((4, 5)), torch.randn(2, 20, 6)
    layer = ConvPositionEncoding(6, 2)
    for options in ({"padding": 2, "dilation": 2}, {"padding": 1, "padding_mode": "circular"}):
        layer.proj = conv = nn.Conv2d(6, 6, 3, groups=6, **options)
        expected = x + conv(x.mT.unflatten(2, (4, 5))).flatten(2).mT
        torch.testing.assert_close(layer(x, grid), expected)


def test_gradients_of_clips_do_not_depend_on_autocast():
    layer, x = GridConvolution(6, 3), torch.randn(2, GRID.num_tokens, 6, requires_grad=True)
    out = layer(x, GRID).sum()
    (expected,) = torch.autograd.grad(out, x, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(out, x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "plain", "patch", "sizes"),
    [(PatchConv2d, nn.Conv2d, (2, 3), (8, 6)), (PatchConv3d, nn.Conv3d, (1, 2, 3), (3, 4, 9))],
)
def test_patches_have_output_and_gradients_of_the_convolution(kind, plain, patch, sizes, bias):
    torch.manual_seed(0)
    product = kind(5, 7, patch, patch, bias=bias, dtype=torch.float64)
    convolution = plain(5, 7, patch, patch, bias=bias, dtype=torch.float64)
    convolution.load_state_dict(product.state_dict())
    x = torch.randn(2, *sizes, 5, dtype=torch.float64).movedim(-1, 1).requires_grad_()  # not contiguous
    results = []
    for module in (product, convolution):
        out = module(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    assert results[0][0].flatten(2).transpose(1, 2).is_contiguous()


def test_a_factorised_kernel_reaches_one_token_along_each_axis():
    assert [FactorisedPositionEncoding(6).reach(axis) for axis in range(3)] == [1, 1, 1]
