"""Weights by name from files that others wrote: plain tensors, or an error of one line."""

import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.limits import check_members, check_memory
from headmix_vision.files.sums import check_sum
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
        check_sum(path)
        return check_weights(path, read_tensors(path))
    return check_weights(path, (load or load_plain)(path))


def load_plain(path: Path) -> Any:
    """Read what `torch.save` wrote, of tensors and plain values alone; see `one_line_damage`."""
    with one_line_damage(path):
        check_memory(path.stat().st_size, f"the file {path}")
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def one_line_damage(path: Path) -> Iterator[None]:
    """Turn what a reader of weights raises within the block into an error of one line.

    Raises:
        InputError: If the file is damaged or of another kind.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise InputError(f"{path} is {kind}; give a file of weights")
    if is_archive(path):
        check_archive(path)
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
        known = isinstance(error, RuntimeError | OSError | ValueError)
        reason = str(error).partition("\n")[0][:300] if known else "it is not a table of weights by name"
        raise InputError(f"{path} holds no readable weights: {reason or type(error).__name__}") from None


def is_archive(path: Path) -> bool:
    """Return whether a file is a ZIP archive, as `torch.save` writes, possibly a damaged one."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True


def check_archive(path: Path, *, tensors: bool | None = None) -> None:
    """Compare the CRC-32 of the members of an archive of `torch.save`, which torch does not; 0.35 s per GiB.

    Args:
        path: The archive.
        tensors: Whether to take the members that hold tensors, or all others; all when None.

    Raises:
        InputError: If one is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_members(archive)
            for member in archive.infolist():
                if tensors is not None and ("/data/" in member.filename) != tensors:
                    continue
                if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                    raise InputError(
                        f"{path} is damaged, or torch.save did not write it: {member.filename} is compressed"
                    )
                with archive.open(member) as file:
                    while file.read(1 << 20):
                        pass
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, LookupError) as error:
        raise InputError(f"{path} is truncated or damaged: {str(error) or type(error).__name__}") from None


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
