"""Opening a network from whatever holds one: a run directory, a checkpoint or an export, of either kind of model."""

from pathlib import Path
from typing import Any

import timm
from torch import nn

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.errors import InputError
from headmix_vision.files.fields import check_fields
from headmix_vision.files.hashes import state_sha256
from headmix_vision.files.tensor_files import header_of
from headmix_vision.files.texts import parse_json, read_json
from headmix_vision.models.names import CORRECT
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY, is_generator, read_checkpoint
from headmix_vision.runs.directory import CHECKPOINTS, INDEX, find_checkpoint
from headmix_vision.runs.networks import create_network, export_arguments, load_network


def open_network(path: Path, *, checkpoint: str | None = None, raw: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Open a trained network alone, without data or autoencoder, in evaluation mode and on the CPU.

    Args:
        path: A run directory, a `.ckpt` file, a `.safetensors` file or a pipeline directory of `headmix export`, or the
            name of a model whose weights come with the package.
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
            if given and (path.exists() or str(path) in CORRECT):
                raise InputError(f"{path} is no run with checkpoints: leave out {option}")
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
    objective = {"objective": about["objective"]} if is_generator(checkpoint) else {}
    return load_network(checkpoint, raw=raw), {
        "name": about["name"],
        "checkpoint": str(path),
        "step": checkpoint.get("global_step"),
        "weights": "ema" if averaged else "raw",
        **objective,
    }


def _open_export(path: Path) -> tuple[nn.Module, dict[str, Any]]:
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
