"""Feature maps of linear attention: elementwise, applied to queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

FEATURE_MAPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    # eps keeps the features, and so the normaliser, above zero.
    "relu": lambda x, eps: x.clamp(min=0).add_(eps),
    "elu1": lambda x, eps: F.elu(x) + (1 + eps),
    "identity": lambda x, eps: x,
}


def apply_feature_map(x: Tensor, name: str, eps: float) -> Tensor:
    """Map features elementwise: ``relu(x) + eps``, ``elu(x) + 1 + eps`` or ``x``."""
    return FEATURE_MAPS[name](x, eps)
