"""The list of the models of the package, with their parameters and operations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import timm
import torch
from timm.models import get_pretrained_cfg, is_model_pretrained
from torch import nn

from headmix_vision.errors import InputError, suggest
from headmix_vision.layers import HeadMixAttention
from headmix_vision.models.names import FAMILIES

# Modules, or what they belong to, that see one vector for each image, not one for each token.
_ONCE = {"head", "t_embedder", "adaLN_modulation"}


@dataclass(frozen=True, kw_only=True)
class ModelsRequest:
    """Request for a list of models.

    Args:
        patterns: Names, with `*` and `?`; all models without a pattern.
        pretrained: Only models whose weights come with the package.
    """

    patterns: Sequence[str] = ()
    pretrained: bool = False


class Listed(NamedTuple):
    """A model of the list.

    Args:
        name: Its name in timm.
        parameters: Their number.
        flops: Operations of a forward pass for one input, see `count_flops`; None if a core does not count its own.
        input_size: Channels, height and width of images or latents; of clips channels, frames, height and width.
        pretrained: Whether weights come with the package.
    """

    name: str
    parameters: int
    flops: int | None
    input_size: tuple[int, ...]
    pretrained: bool

    @property
    def gflops(self) -> str:
        """The operations in units of 10^9 for a table."""
        return "–" if self.flops is None else f"{self.flops / 1e9:.2f}"


def list_models(request: ModelsRequest) -> list[str]:
    """List the names of the models that a request asks for; see `find_names`."""
    names = find_names(request.patterns)
    return [name for name in names if is_model_pretrained(name)] if request.pretrained else names


def find_names(patterns: Sequence[str]) -> list[str]:
    """Find the names that match any of some patterns, as `timm.list_models` does; all without a pattern.

    Raises:
        InputError: A pattern matches no name.
    """
    names = sorted(name for variants in FAMILIES.values() for name in variants)
    found = set()
    for pattern in patterns or ["*"]:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            hint = suggest(pattern, names, f"they begin with {', '.join(FAMILIES)}", most=3)
            raise InputError(f"no model of this package is called {pattern}{hint}")
        found |= {*matching}
    return [name for name in names if name in found]


def describe(names: Sequence[str]) -> Iterator[Listed]:
    """Build each model, without memory for its weights, and tell its size; once where several names mean the same."""
    sizes: dict[str, tuple[int, int | None]] = {}
    means = {name: f"{family} {v.arguments}" for family, variants in FAMILIES.items() for name, v in variants.items()}
    clips = {name: variant.arguments["input_size"] for name, variant in FAMILIES["dit_video"].items()}
    for name in names:
        cfg = get_pretrained_cfg(name)
        assert cfg is not None
        model_of_size = f"{means[name]} {cfg.input_size}"
        if model_of_size not in sizes:
            with torch.device("meta"):
                model = timm.create_model(name)
            sizes[model_of_size] = sum(p.numel() for p in model.parameters()), _flops_or_none(model)
        size = (cfg.input_size[0], *clips[name]) if name in clips else cfg.input_size
        yield Listed(name, *sizes[model_of_size], size, is_model_pretrained(name))


def _flops_or_none(model: nn.Module) -> int | None:
    try:
        return count_flops(model)
    except NotImplementedError:  # AttentionCore.flops: a core need not count its operations
        return None


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
