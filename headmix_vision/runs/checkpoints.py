"""Reading checkpoints of training: nothing is unpickled but tensors and plain values."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmix_vision.errors import InputError

DESCRIPTION_KEY = "headmix_vision"
MODEL_PREFIX = "net."


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint written by training, on the CPU, without unpickling anything but tensors and plain values.

    Args:
        path: The `.ckpt` file.

    Returns:
        Lightning's checkpoint dictionary; entry `headmix_vision` describes the model.

    Raises:
        InputError: If the file is absent, truncated, holds other objects, or was not written by this package.
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
        raise InputError(f"{path} is truncated or damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(checkpoint, dict) or DESCRIPTION_KEY not in checkpoint or "state_dict" not in checkpoint:
        raise InputError(f"{path} was not written by this package (no entry {DESCRIPTION_KEY!r})")
    return checkpoint


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
