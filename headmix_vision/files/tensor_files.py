"""Safetensors files: complete or absent, readable to whom the umask says, refused in one line where damaged."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.atomic import atomic_path
from headmix_vision.files.limits import check_file


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes tensors by name, and texts by name in the header.

    Raises:
        OSError: If the file cannot be written.
    """
    # Not `save_file`: it makes a file that its owner alone may read, and leaves a temporary one when it is killed.
    with atomic_path(path) as temporary:
        temporary.write_bytes(save(tensors, metadata))


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Opens a file for reading, as `safetensors.safe_open` does; see `check_file` and `refuse_damage`."""
    check_file(path)
    with refuse_damage(path), safe_open(path, "pt") as file:
        yield file


@contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """Turns what safetensors raises within the block into an error of one line.

    Raises:
        InputError: If the file is truncated, of another kind, or lacks what is read from it.
    """
    try:
        yield
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or no safetensors file: {error}") from None


def header_of(path: Path) -> Mapping[str, str]:
    """Reads the texts in the header of a file; see `refuse_damage`."""
    with open_tensors(path) as file:
        return file.metadata() or {}
