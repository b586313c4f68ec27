"""Reading checkpoints of training: nothing is unpickled but tensors and plain values."""

import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.fields import check_fields
from headmix_vision.runs.shards import check_shards, read_shards, whole

DESCRIPTION_KEY = "headmix_vision"
MODEL_PREFIX = "net."
_CLASSIFIER = {
    "name": str,
    "num_classes": int,
    "img_size": int | list | None,
    "model_args": dict,
    "class_names": list | None,
    "top1": float | None,
}
_GENERATOR = {
    "name": str,
    "architecture": dict,
    "objective": dict,
    "vae": str | None,
    "class_names": list | None,
}


def read_checkpoint(
    path: str | os.PathLike[str], *, sharded: Iterable[str] = ("state_dict", "current_model_state")
) -> dict[str, Any]:
    """Reads a checkpoint written by training, on the CPU, without unpickling anything but tensors and plain values.

    Args:
        path: The `.ckpt` file.
        sharded: Of a checkpoint in shards the entries that are read; other sharded tensors have no values.

    Returns:
        Lightning's checkpoint dictionary; entry `headmix_vision` describes the model.

    Raises:
        InputError: If the file is absent, truncated, holds other objects, was not written by this package, or lacks
            what tells the model or one of its shards.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}")
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is not a checkpoint, or it is truncated ({path.stat().st_size} bytes)")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise InputError(f"{path} holds objects other than tensors and plain values; nothing was loaded") from None
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is truncated or damaged: {reason}") from None
    if not isinstance(checkpoint, dict) or DESCRIPTION_KEY not in checkpoint or "state_dict" not in checkpoint:
        raise InputError(f"{path} was not written by this package (no entry {DESCRIPTION_KEY!r})")
    for key in ("state_dict", "current_model_state"):
        state = checkpoint.get(key, {})
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
        ):
            raise InputError(f"{path}: entry {key!r} is no table of weights by name")
    about = check_fields(f"the description of the model in {path}", checkpoint[DESCRIPTION_KEY], {"name": str})
    wanted = _GENERATOR if about.get("kind") == "generator" else _CLASSIFIER
    about = check_fields(f"the description of {about['name']} in {path}", about, wanted)
    check_shards(path, checkpoint)
    return {**read_shards(path, checkpoint, sharded), DESCRIPTION_KEY: about}


def is_generator(checkpoint: dict[str, Any]) -> bool:
    """Tells whether a checkpoint, as returned by `read_checkpoint`, is of a generator; else it is of a classifier."""
    return checkpoint[DESCRIPTION_KEY].get("kind") == "generator"


def model_state(checkpoint: dict[str, Any], *, raw: bool = False) -> dict[str, Tensor]:
    """Returns the network's weights under timm's own names.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        raw: The weights being trained instead of their moving average (the same thing in runs without an average).
    """
    state = checkpoint.get("current_model_state", checkpoint["state_dict"]) if raw else checkpoint["state_dict"]
    return {name.removeprefix(MODEL_PREFIX): value for name, value in state.items() if name.startswith(MODEL_PREFIX)}


def check_description(checkpoint: dict[str, Any], name: str, num_classes: int | None) -> None:
    """Raises `InputError` if a checkpoint belongs to another model or another number of classes.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        name: Name of the model it is meant for.
        num_classes: Its number of classes; not compared when None.
    """
    description = checkpoint[DESCRIPTION_KEY]
    if description["name"] != name:
        raise InputError(f"the checkpoint is of model {description['name']}, not of {name} (option model.name)")
    if num_classes is not None and description["num_classes"] != num_classes:
        raise InputError(
            f"the checkpoint has {description['num_classes']} classes,"
            f" the model {num_classes} (option model.num_classes)"
        )


def check_finite(state: dict[str, Tensor], where: str) -> None:
    """Raises `InputError` if weights are infinite or not a number; nothing can be computed with them.

    Args:
        state: The weights.
        where: What to call them in the message: their file, or `the checkpoint`.
    """
    for name, value in state.items():
        if value.is_floating_point() and not whole(value.isfinite().all()):
            raise InputError(f"the weights of {where} are not finite, first {name}")


def check_state(state: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Raises a one-line `InputError` if a state dict does not fit exactly.

    Args:
        state: The weights to load.
        target: State dict of the module that they are for.
    """
    # Numbers that are no weights, such as block grids, are younger than version 0.1.0: a module knows its own.
    missing = sorted(name for name in target.keys() - state.keys() if target[name].is_floating_point())
    unexpected = sorted(state.keys() - target.keys())
    shapes = [name for name in target if name in state and target[name].shape != state[name].shape]
    for problem, names in (("lacks", missing), ("has the unknown", unexpected)):
        if names:
            raise InputError(
                f"the checkpoint {problem} {len(names)} weights, first {names[0]} (options model.model_args)"
            )
    if shapes:
        first = shapes[0]
        raise InputError(
            f"{len(shapes)} weights of the checkpoint have another shape, first {first}:"
            f" {list(state[first].shape)}, expected {list(target[first].shape)}"
        )


_ENTRIES = {
    "global_step": int,
    "pytorch-lightning_version": str,
    "state_dict": dict,
    "epoch": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "train_loss": Tensor,
}
_ALWAYS = ("global_step", "pytorch-lightning_version", "state_dict")


def check_entries(checkpoint: dict[str, Any], path: str | os.PathLike[str], *, resuming: bool) -> None:
    """Raises `InputError` if a checkpoint lacks what Lightning reads, or holds something else under its name.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        path: Its file, to be named.
        resuming: Whether training is to go on from it; else it is evaluated.
    """
    for name, kind in _ENTRIES.items():
        if name not in checkpoint and not resuming and name not in _ALWAYS:
            continue
        if not isinstance(checkpoint.get(name), kind):
            what = f"its entry {name!r} is no {kind.__name__}" if name in checkpoint else f"it lacks the entry {name!r}"
            raise InputError(f"{path} is damaged or not of this package: {what}")
    if resuming and not checkpoint["optimizer_states"]:
        raise InputError(f"training cannot go on from {path}: it lacks the state of the optimizer")
