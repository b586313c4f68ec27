"""Convolve patches that do not overlap: each is a row of one matrix product.

B batch, C channels, D width, P numbers of a patch.
"""

from __future__ import annotations

import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn


class PatchConv2d(nn.Conv2d):
    """Compute a convolution whose stride is its kernel, without padding, dilation and groups, as a matrix product.

    cuDNN's gradient of the weights is slow for so few channels. The output lies channels last: tokens are contiguous.

    Shape:
        [B, C, \\*sizes], multiples of the kernel -> [B, D, \\*grid].
    """

    def forward(self, x: Tensor) -> Tensor:
        return _project_patches(x, self.weight, self.bias)


class PatchConv3d(nn.Conv3d):
    """Compute :class:`PatchConv2d` of clips."""

    def forward(self, x: Tensor) -> Tensor:
        return _project_patches(x, self.weight, self.bias)


@torch.fx.wrap  # torch.fx records the call whole
def _project_patches(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    patch = weight.shape[2:]
    for axis, size in enumerate(patch):
        x = x.unflatten(2 + 2 * axis, (-1, size))
    grid, within = range(2, x.ndim, 2), range(3, x.ndim, 2)
    rows = x.permute(0, *grid, 1, *within).flatten(-1 - len(patch))  # [B, *grid, P]
    return F.linear(rows, weight.flatten(1), bias).movedim(-1, 1)
