"""Checkpoints of training, found and read: nothing is unpickled but tensors and plain values, damage is noticed.

A checkpoint is a ZIP archive with a CRC-32 of each member. Its entry `values_sha256` is a hash over all texts, numbers
and so on. Its entry `tensors_sha256` is a hash over the names, types, shapes and values of all its tensors, which is
compared before one of them is used. This costs 0.65 s of CPU time per GiB, on up to 8 threads. Where the entry is
missing, as in checkpoints of earlier versions, the CRC-32 is compared, at 0.35 s per GiB.

Several processes write a checkpoint in shards, each its own part. The `.ckpt` file then has, in the place of each
sharded tensor, one of the same shape and type without values (on the device `meta`). Its entry `shards` tells where
the values are. `shards.py` reads them; it is imported for such checkpoints alone.
"""

import hashlib
import json
import math
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headmix_vision.errors import InputError, is_whole
from headmix_vision.files.reading import check_fields, check_nesting
from headmix_vision.files.tensors import check_archive, check_plain, is_archive, tensors_sha256
from headmix_vision.files.writing import lock_holder
from headmix_vision.runs.directory import BEST, CHECKPOINTS, LAST, LOCK, REPLACED, standing_file

DESCRIPTION_KEY = "headmix_vision"
MODEL_PREFIX = "net."
HASH = "tensors_sha256"
VALUES_HASH = "values_sha256"
_STATES = ("state_dict", "current_model_state")
_MOST = 2**53  # of steps and epochs
_VERSION = re.compile(r"(\d{1,9})(\.\d{1,9}){1,3}((a|b|rc|\.?dev|\.?post)\d{1,9})*(\+[a-z0-9.]+)?")
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
    "text_encoder": dict | None,
    "class_names": list | None,
}
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
SHARDS = "shards"
SHARDED = ("state_dict", "current_model_state", "optimizer_states")


def find_checkpoint(run: str | os.PathLike[str], which: str | None = None) -> Path:
    """Find a checkpoint.

    Args:
        run: A run directory, or a `.ckpt` file, which is the checkpoint itself.
        which: `best` or `last` of the run directory, or the path of a file; the best one when None, or the last one of
            a run that has never had a best.

    Raises:
        InputError: If the file does not exist.
    """
    run = Path(run)
    best, last = run / BEST, run / LAST
    if run.suffix == ".ckpt":
        path = run
    elif which is None:
        path = last if last.is_file() and not os.path.lexists(best) and not _has_had_best(last) else best
    else:
        path = {"best": best, "last": last}.get(which, Path(which))
    if not path.is_file():
        hint = "" if run.exists() else f": {run} does not exist"
        if (run / REPLACED).is_dir():
            hint = f"; the run that was to be replaced is a run directory still: {run / REPLACED}"
        elif path == best and last.is_file():
            hint = f"; to use the last one, name it: {last}"
        raise InputError(f"no checkpoint at {path} (asked for {which or 'best'}){hint}")
    return path


def _has_had_best(checkpoint: Path) -> bool:
    """Return whether the run of a checkpoint had a best one, by the states of its callbacks."""
    callbacks = read_checkpoint(checkpoint, sharded=(), values=False).get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    return any(
        isinstance(state, dict) and Path(str(state.get("best_model_path"))).name == Path(BEST).name for state in states
    )


def find_standing_checkpoint(run: Path, which: str) -> Path:
    """Find a checkpoint to go on from, in `standing_places`; else as `find_checkpoint`."""
    if which in ("best", "last"):
        which = str(standing_file(run, f"{CHECKPOINTS}/{which}.ckpt"))
    return find_checkpoint(run, which)


def trainer_of(checkpoint: Path) -> str | None:
    """Name the process that trains the run which a checkpoint is of; None where none is known to."""
    run = checkpoint.resolve().parent.parent
    return lock_holder(run / LOCK) if checkpoint.resolve().parent.name == CHECKPOINTS else None


def read_checkpoint(
    path: str | os.PathLike[str], *, sharded: Iterable[str] = _STATES, values: bool = True
) -> dict[str, Any]:
    """Read a checkpoint written by training, on the CPU, without unpickling anything but tensors and plain values.

    Args:
        path: The `.ckpt` file.
        sharded: Of a checkpoint in shards the entries that are read; other sharded tensors have no values.
        values: Compare the hash of all tensors in the file. Leave it out only where no tensor is used.

    Returns:
        Lightning's checkpoint dictionary; entry `headmix_vision` describes the model.

    Raises:
        InputError: If the file is absent, truncated, damaged, holds other objects, was not written by this package, or
            lacks what tells the model or one of its shards; if weights are not plain tensors, or an entry has another
            form than training writes.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}")
    if not is_archive(path):
        raise InputError(f"{path} is not a checkpoint, or it is truncated ({path.stat().st_size} bytes)")
    check_archive(path, tensors=False)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise InputError(f"{path} holds objects other than tensors and plain values; nothing was loaded") from None
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is truncated or damaged: {reason}") from None
    check_nesting(str(path), checkpoint)
    if not isinstance(checkpoint, dict) or DESCRIPTION_KEY not in checkpoint or "state_dict" not in checkpoint:
        raise InputError(f"{path} was not written by this package (no entry {DESCRIPTION_KEY!r})")
    for name, tensor in named_tensors(checkpoint):
        check_plain(path, name, tensor)
    for key in _STATES:
        state = checkpoint.get(key, {})
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
        ):
            raise InputError(f"{path}: entry {key!r} is not a table of weights by name")
    _check_counts(path, checkpoint)
    about = _check_about(path, checkpoint[DESCRIPTION_KEY])
    _check_values(path, checkpoint)
    if VALUES_HASH in checkpoint and checkpoint[VALUES_HASH] != values_sha256(checkpoint):
        raise InputError(
            f"{path} is damaged or was edited: its values do not have the SHA-256 in its entry {VALUES_HASH!r};"
            " remove the entry from an edited checkpoint"
        )
    if values and HASH not in checkpoint:
        check_archive(path, tensors=True)
    elif values and checkpoint[HASH] != checkpoint_sha256(checkpoint):
        raise InputError(
            f"{path} is damaged or was edited: its tensors do not have the SHA-256 in its entry {HASH!r};"
            " remove the entry from an edited checkpoint"
        )
    return {**checkpoint, **_read_values(path, checkpoint, sharded), DESCRIPTION_KEY: about}


def _check_values(path: Path, checkpoint: dict[str, Any]) -> None:
    """Check that tensors without values have them in shards, all of which are there."""
    tensors = _without_values({name: checkpoint.get(name) for name in SHARDED})
    if SHARDS in checkpoint:
        from headmix_vision.runs.shards import check_shards

        check_shards(path, checkpoint[SHARDS], tensors)
    elif tensors:
        first = next(iter(tensors))
        raise InputError(f"{path} is damaged: {first} has no values, and the entry {SHARDS!r} is missing")


def _read_values(path: Path, checkpoint: dict[str, Any], entries: Iterable[str]) -> dict[str, Any]:
    """Copy entries of a checkpoint, with the values of tensors that are in shards."""
    wanted = {name: checkpoint[name] for name in entries if name in checkpoint}
    values: dict[str, Tensor] = {}
    if tensors := _without_values(wanted):
        from headmix_vision.runs.shards import read_shards

        values = read_shards(path, checkpoint[SHARDS], tensors)
    copied: dict[str, Any] = map_tensors(wanted, lambda name, tensor: values.get(name, tensor))
    return copied


def _without_values(entries: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named_tensors(entries) if tensor.is_meta}


def checkpoint_sha256(checkpoint: dict[str, Any]) -> str:
    """Compute the hash over all tensors of a checkpoint but sharded ones, whose shards have their own."""
    return tensors_sha256((name, tensor) for name, tensor in named_tensors(checkpoint) if not tensor.is_meta)


def values_sha256(checkpoint: dict[str, Any]) -> str:
    """Compute the hash over all values of a checkpoint that are not tensors, with their names and order."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return [[repr(name), plain(entry)] for name, entry in value.items()]
        if isinstance(value, list | tuple):
            return [plain(entry) for entry in value]
        return "tensor" if isinstance(value, Tensor) else repr(value)

    entries = {name: entry for name, entry in checkpoint.items() if name not in (HASH, VALUES_HASH)}
    return hashlib.sha256(json.dumps(plain(entries)).encode()).hexdigest()


def _check_counts(path: Path, checkpoint: dict[str, Any]) -> None:
    for name in ("global_step", "epoch"):
        count = checkpoint.get(name, 0)
        if not (is_whole(count) and 0 <= count < _MOST):
            raise InputError(
                f"{path}: entry {name!r} is {count!r:.60}, it must be a whole number from 0 to {_MOST - 1}"
            )


def _check_about(path: Path, found: object) -> dict[str, Any]:
    """Check the description of the model, with what its entries hold."""
    about = check_fields(f"the description of the model in {path}", found, {"name": str})
    where = f"the description of {about['name']!r:.60} in {path}"
    generator = about.get("kind") == "generator"
    about = check_fields(where, about, _GENERATOR if generator else _CLASSIFIER)
    arguments = about["architecture" if generator else "model_args"]
    if not all(isinstance(name, str) for name in arguments):
        raise InputError(f"{where}: the arguments of the model have names that are not texts")
    names = about["class_names"]
    if names is not None and not all(isinstance(name, str) for name in names):
        raise InputError(f"{where}: entry 'class_names' must hold texts, got {names!r:.60}")
    classes = arguments.get("num_classes", 0) if generator else about["num_classes"]
    if names and is_whole(classes) and classes > 0 and len(names) != classes:
        raise InputError(f"{where}: entry 'class_names' has {len(names)} names for {classes} classes")
    if generator:
        return about
    size, top1 = about["img_size"], about["top1"]
    sizes = size if isinstance(size, list) else [size]
    if size is not None and not (0 < len(sizes) <= 3 and all(is_whole(side) and side > 0 for side in sizes)):
        raise InputError(f"{where}: entry 'img_size' must be whole numbers above 0, got {size!r:.60}")
    if about["num_classes"] < 0:
        raise InputError(f"{where}: entry 'num_classes' must be at least 0, got {about['num_classes']}")
    if top1 is not None and not (math.isfinite(top1) and 0 <= top1 <= 1):
        raise InputError(f"{where}: entry 'top1' must be from 0 to 1, got {top1}")
    return about


def is_generator(checkpoint: dict[str, Any]) -> bool:
    """Return whether a checkpoint, as returned by `read_checkpoint`, is of a generator; else it is of a classifier."""
    return checkpoint[DESCRIPTION_KEY].get("kind") == "generator"


def model_state(checkpoint: dict[str, Any], *, raw: bool = False) -> dict[str, Tensor]:
    """Return the network's weights under timm's own names.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        raw: The weights being trained instead of their EMA (the same thing in runs without an average).
    """
    state = checkpoint.get("current_model_state", checkpoint["state_dict"]) if raw else checkpoint["state_dict"]
    return {name.removeprefix(MODEL_PREFIX): value for name, value in state.items() if name.startswith(MODEL_PREFIX)}


def check_description(checkpoint: dict[str, Any], name: str, num_classes: int | None) -> None:
    """Raise `InputError` if a checkpoint belongs to another model or another number of classes.

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
    """Raise `InputError` if weights are infinite or not a number; nothing can be computed with them.

    Args:
        state: The weights.
        where: What to call them in the message: their file, or `the checkpoint`.
    """
    for name, value in state.items():
        if value.is_floating_point() and not whole(value.isfinite().all()):
            raise InputError(f"the weights of {where} are not finite, first {name}")


def check_state(state: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Raise a one-line `InputError` if a state dict does not fit exactly.

    Args:
        state: The weights to load.
        target: State dict of the module that they are for.
    """
    # Numbers that are not weights, such as block grids, are younger than version 0.1.0: a module knows its own.
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
    check_kinds(state, target, "the checkpoint")


def check_kinds(state: dict[str, Tensor], target: dict[str, Tensor], where: str) -> None:
    """Raise `InputError` for real numbers in the place of whole ones, or the other way round.

    Args:
        state: The weights to load.
        target: State dict of the module that they are for.
        where: What to call the weights in the message.
    """
    wrong = [name for name in target if name in state and _kind(target[name]) != _kind(state[name])]
    if wrong:
        first, found = wrong[0], state[wrong[0]].dtype
        raise InputError(
            f"{len(wrong)} weights of {where} have another type, first {first}: {found}, expected {target[first].dtype}"
        )


def _kind(tensor: Tensor) -> str:
    return "real" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "whole"


def check_entries(checkpoint: dict[str, Any], path: str | os.PathLike[str], *, resuming: bool) -> None:
    """Raise `InputError` if a checkpoint lacks what Lightning reads, or holds something else under its name.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        path: Its file, to be named.
        resuming: Whether training is to go on from it; else it is evaluated.
    """
    for name, kind in _ENTRIES.items():
        if name not in checkpoint and not resuming and name not in _ALWAYS:
            continue
        if not isinstance(checkpoint.get(name), kind):
            is_there = name in checkpoint
            what = f"its entry {name!r} is not a {kind.__name__}" if is_there else f"it lacks the entry {name!r}"
            raise InputError(f"{path} is damaged or not of this package: {what}")
    version = checkpoint["pytorch-lightning_version"]
    match = _VERSION.fullmatch(version)
    if match is None or int(match[1]) < 2:
        raise InputError(f"{path} is damaged or not of this package: it is of version {version!r:.60} of Lightning")
    if resuming and not checkpoint["optimizer_states"]:
        raise InputError(f"training cannot go on from {path}: it lacks the state of the optimizer")
    if resuming and checkpoint["lr_schedulers"]:
        raise InputError(
            f"{path} is damaged or not of this package: it holds schedulers of Lightning, which no run has"
        )


def map_tensors(value: Any, change: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """Copy nested dictionaries and lists, with `change(name, tensor)` in the place of each tensor.

    The name of a tensor is its path: `/optimizer_states/0/state/3/exp_avg`.
    """
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, dict):
        return {key: map_tensors(entry, change, f"{name}/{key}") for key, entry in value.items()}
    if isinstance(value, list):
        return [map_tensors(entry, change, f"{name}/{i}") for i, entry in enumerate(value)]
    return value


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Walk through nested dictionaries, lists and tuples; tensors are named as by `map_tensors`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from named_tensors(entry, f"{name}/{key}")


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor of which each process has a part; return others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
