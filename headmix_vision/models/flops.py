"""Operations of whole models."""

from __future__ import annotations

from torch import nn

from headmix_vision.layers import HeadMixAttention

# Modules, or what they belong to, that see one vector for each image, not one for each token.
_ONCE = {"head", "t_embedder", "adaLN_modulation"}


def count_flops(model: nn.Module) -> int:
    """Return the operations of a forward pass for one image of the model's size, multiply and add as two.

    Counted are the attention layers, as :meth:`headmix_vision.layers.HeadMixAttention.flops` does it, and all other
    projections and convolutions; norms, activations and other work on single numbers are not. A diffusion transformer
    is called once for each step.

    Args:
        model: a model of this package, of any device, whose classifier reads one pooled token.
    """
    layers = [module for module in model.modules() if isinstance(module, HeadMixAttention)]
    inside = {module for layer in layers for module in layer.modules()}
    tokens = layers[0].grid
    total = sum(layer.flops() for layer in layers)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)) and module not in inside:
            places = tokens.num_grid_tokens if isinstance(module, (nn.Conv2d, nn.Conv3d)) else tokens.num_tokens
            total += 2 * module.weight.numel() * (1 if _ONCE & {*name.split(".")} else places)
    return total
