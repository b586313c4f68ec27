"""The product of patches against the convolution that it stands for."""

import pytest
import torch
from torch import nn

from headmix_vision.layers.patch_convolution import PatchConv2d, PatchConv3d


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "plain", "patch", "sizes"),
    [(PatchConv2d, nn.Conv2d, (2, 3), (8, 6)), (PatchConv3d, nn.Conv3d, (1, 2, 3), (3, 4, 9))],
)
def test_output_and_gradients_are_those_of_the_convolution(kind, plain, patch, sizes, bias):
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
