"""Names of the models, every family with every core and every head mix, and the weights that come with the package.

A name is ``{family}_{attention}_{member}``, such as ``deit_mhla_small``: the attention is a core, ``mhla``, or a core
with a mix, ``mhla_iha``; a mix alone, ``iha``, is short for that mix over softmax. The module of a model calls
:func:`register_family` for each of its families, which tells timm all their names.

Each file of `weights/` holds the averaged weights after the last epoch of the recipe `digits`, seed 0, on a CPU:

    OMP_NUM_THREADS=1 headmix train-cls fit -c digits --model.name NAME --run-dir RUN --trainer.accelerator cpu
    headmix export RUN --checkpoint last --out headmix_vision/models/weights/NAME.safetensors
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from timm.models import generate_default_cfgs, register_model
from torch import nn

from headmix_vision.errors import InputError
from headmix_vision.layers import CORES, HEAD_MIXES

FOLDER = Path(__file__).parent / "weights"
TAG = "digits"
# Right among the 360 held-out digits; the recipe chooses nothing by them.
CORRECT = {"deit_hih_digits": 357, "deit_linear_digits": 344, "deit_mhla_digits": 358, "deit_softmax_digits": 351}
HELD_OUT = 360


class Variant(NamedTuple):
    """The model of a name: arguments of its constructor, and timm's default configuration."""

    arguments: dict[str, Any]
    cfg: dict[str, Any]


FAMILIES: dict[str, dict[str, Variant]] = {}


def attentions() -> dict[str, dict[str, Any]]:
    """Return the arguments of a model for each attention, by its part of the name."""
    named = {core: {"core": core, **cls.layer_options} for core, cls in CORES.items()}
    for mix, cls in HEAD_MIXES.items():
        options = {"head_mix": mix, **cls.layer_options}
        named |= {f"{core}_{mix}": {**named[core], **options} for core in CORES}
        named[mix] = named[f"softmax_{mix}"]
    return named


def register_family(
    family: str,
    members: Callable[[str, str | None], Iterable[tuple[str, Variant]]],
    create: Callable[..., nn.Module],
    module: str,
) -> None:
    """Register the models of a family with timm, as entrypoints of a module.

    Args:
        family: first part of the names.
        members: gives, for a core and a mix, the last part of each name and what it stands for, attention left out.
        create: makes a model: ``create(name, pretrained, **arguments)``.
        module: ``__name__`` of the model's module, whose ``default_cfgs`` gets the configurations.
    """
    variants = FAMILIES[family] = {
        f"{family}_{attention}_{member}": Variant({**variant.arguments, **arguments}, variant.cfg)
        for attention, arguments in attentions().items()
        for member, variant in members(arguments["core"], arguments.get("head_mix"))
    }
    home = vars(sys.modules[module])
    configurations = generate_default_cfgs(
        {
            f"{name}.{TAG}" if name in CORRECT else name: {**variant.cfg, **weights_cfg(name)}
            for name, variant in variants.items()
        }
    )
    home["default_cfgs"] = {**home.get("default_cfgs", {}), **configurations}  # timm reads it when registering
    for name, variant in variants.items():
        home[name] = register_model(_entrypoint(name, variant.arguments, create, module))


def _entrypoint(
    name: str, arguments: dict[str, Any], create: Callable[..., nn.Module], module: str
) -> Callable[..., nn.Module]:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained:
            check_pretrained(name, kwargs)
        return create(name, pretrained, **{**arguments, **kwargs})

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = module  # timm keys its sets of models by the last part
    entrypoint.__doc__ = f"{name}: {arguments}."
    return entrypoint


def weights_cfg(name: str) -> dict[str, Any]:
    """Collect what timm's configuration says about the weights of a model; nothing if it has none."""
    if name not in CORRECT:
        return {}
    return {
        "file": str(FOLDER / f"{name}.safetensors"),
        "description": f"Trained on 1,437 handwritten digits of 8 x 8 pixels (UCI, in scikit-learn) by the recipe"
        f" {TAG}, last epoch. Top-1 on the {HELD_OUT} held-out ones: {CORRECT[name] / HELD_OUT:.2%}.",
    }


def check_pretrained(name: str, arguments: dict[str, Any]) -> None:
    """Refuse `pretrained=True` for a model without weights, unless the arguments of timm bring some.

    Raises:
        InputError: There are none; with what there is instead.
    """
    if name in CORRECT or arguments.get("pretrained_cfg") or arguments.get("pretrained_cfg_overlay"):
        return
    source, module = ("an official DiT", "convert_dit") if name.startswith("dit_") else ("a softmax model", "convert")
    raise InputError(
        f"no weights come with {name}, only with {', '.join(CORRECT)}: leave out pretrained=True, or convert"
        f" {source} with headmix_vision.models.{module}"
    )
