"""Weights by name from files that others wrote: plain tensors, or an error of one line."""

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.tensor_files import read_tensors


def read_weights(path: Path, load: Callable[[Path], Any] | None = None) -> dict[str, Tensor]:
    """Read weights by name, on the CPU.

    Args:
        path: A `.safetensors` file, or whatever `torch.save` wrote.
        load: Reader of other files than `.safetensors`; `load_plain` when None.

    Raises:
        InputError: If it is not a file, is damaged, or holds other things than weights by name.
    """
    if path.suffix == ".safetensors" and path.is_file():
        return check_weights(path, read_tensors(path))
    return check_weights(path, (load or load_plain)(path))


def load_plain(path: Path) -> Any:
    """Read what `torch.save` wrote, of tensors and plain values alone; see `one_line_damage`."""
    with one_line_damage(path):
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def one_line_damage(path: Path) -> Iterator[None]:
    """Turn what a reader of weights raises within the block into an error of one line.

    Raises:
        InputError: If the file is damaged or of another kind.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file of weights, such as a checkpoint in it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that the file looks like TorchScript
            yield
    except (InputError, FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # readers raise whatever comes of the bytes
        if isinstance(error, pickle.UnpicklingError) or isinstance(error.__cause__, pickle.UnpicklingError):
            raise InputError(
                f"{path} holds objects other than tensors and plain values, or is not a file of weights; nothing was"
                " loaded"
            ) from None
        reason = " ".join((str(error) or type(error).__name__).splitlines()[0].split())[:300]
        raise InputError(f"{path} holds no readable weights: {reason}") from None


def check_weights(path: Path, found: Any) -> dict[str, Tensor]:
    """Check that what was read are plain tensors by name.

    Raises:
        InputError: If it is something else, or nothing.
    """
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise InputError(f"{path} holds no weights by name")
    if not found:
        raise InputError(f"{path} holds no weights by name: it is empty")
    for name, tensor in found.items():
        check_plain(path, name, tensor)
        if tensor.is_meta:
            raise InputError(f"{path}: {name} has no values")
    return found


def check_plain(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse tensors that are not dense or not real, and those that are larger than their part of the file.

    Raises:
        InputError: If it is one.
    """
    tiny = tensor.is_floating_point() and tensor.element_size() < 2  # torch cannot compute with them
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex() or tiny:
        kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
        raise InputError(f"{path}: {name} is {kind}; it must be a dense tensor of real numbers")
    if not tensor.is_meta and tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise InputError(f"{path}: {name} of shape {list(tensor.shape)} repeats its values instead of holding them")
