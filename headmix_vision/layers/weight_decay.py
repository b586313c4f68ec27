"""Which parameters of our layers weight decay leaves alone."""

from __future__ import annotations

from torch import nn

from headmix_vision.layers.block_mixing import MixingMatrix
from headmix_vision.layers.sub_head_mask import SubHeadMask


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Names of the mixing matrices and masks in a model: nothing about them should be small."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, MixingMatrix | SubHeadMask) and hasattr(module, "weight")
    }
