"""Reading npz files as ADM's evaluation takes them: uint8 images `arr_0`, and their labels.

The header of an array states its shape. It must be the shape of the bytes that the archive holds, before any memory is
taken for it.
"""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_file, check_members, check_memory

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@contextmanager
def open_pixels(path: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype[Any], bool]]:
    """Open `arr_0`; see `_open_array`."""
    with _opened(path) as archive, _open_array(archive, "arr_0") as opened:
        yield opened


@contextmanager
def _open_array(
    archive: zipfile.ZipFile, name: str
) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype[Any], bool]]:
    """Open an array of an npz file: the file behind its header, its shape, its dtype, whether it is in Fortran order.

    Raises:
        InputError: Its header states another size than the archive.
    """
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version not in _HEADERS:
            raise ValueError(f"{name} is of version {version} of numpy's format")
        shape, fortran_order, dtype = _HEADERS[version](member)
        if dtype.hasobject:
            raise InputError(f"{archive.filename}: {name} holds Python objects, it must hold numbers")
        stated, held = math.prod(shape) * dtype.itemsize, archive.getinfo(f"{name}.npy").file_size - member.tell()
        if min(shape, default=1) < 0 or stated != held:
            raise InputError(
                f"{archive.filename}: {name} states {dtype} {list(shape)}, which is {stated} bytes, the archive holds"
                f" {held}"
            )
        yield member, shape, dtype, fortran_order


def npz_arrays(path: Path) -> list[str]:
    """List the names of the arrays of an npz file.

    Raises:
        InputError: Not an npz file.
    """
    with _opened(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def npz_array(path: Path, name: str) -> np.ndarray:
    """Read an array of an npz file.

    Raises:
        InputError: Not an npz file, or a damaged one; no such array; an array of Python objects, or one that exceeds
            the memory.
    """
    with _opened(path) as archive, _open_array(archive, name) as (member, shape, dtype, fortran_order):
        size = math.prod(shape) * dtype.itemsize
        check_memory(2 * size, f"{path}: {name} {list(shape)}")
        data = member.read()
        if len(data) < size:
            raise InputError(f"{path} is truncated: {name} has {len(data)} of {size} bytes")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")


@contextmanager
def _opened(path: str | Path) -> Iterator[zipfile.ZipFile]:
    """Open an npz file, whose members have different names without folders, and sizes that the file can hold."""
    check_file(path)
    with _whole(path), zipfile.ZipFile(path) as archive:
        check_members(archive)
        for name in archive.namelist():
            if "/" in name or "\\" in name:
                raise InputError(f"{path} holds {name}, arrays must lie in no folder")
        yield archive


@contextmanager
def _whole(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # whatever zipfile, its decompressors and numpy raise on a damaged file
        if getattr(error, "filename", None) is not None:  # it cannot be opened
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is truncated, damaged or no npz file: {reason}") from None


def npz_labels(path: Path) -> Tensor:
    """Read the labels of the images of an npz file, int64 [N]: its array `labels`, or `arr_1` as ADM calls them.

    Raises:
        InputError: No npz file, no labels, or other than one integer per image.
    """
    arrays = npz_arrays(path)
    name = next((name for name in ("labels", "arr_1") if name in arrays), None)
    if name is None:
        raise InputError(f"{path} has no labels or arr_1, it has {', '.join(arrays)}")
    labels = npz_array(path, name)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InputError(f"{path}: {name} is {labels.dtype} {list(labels.shape)}, it must be integers [N]")
    return torch.from_numpy(labels.astype(np.int64))
