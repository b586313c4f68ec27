"""Reading npz files as ADM's evaluation takes them: uint8 images `arr_0`, and their labels."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.png import Item, to_item

# What zipfile, its decompressors and numpy raise on a file that is damaged or of another kind.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, RuntimeError)


class NpzImages:
    """Reads `arr_0` of an npz file as ADM's evaluation takes it, piece by piece.

    It is uint8 [N, H, W, C] or [N, H, W] for images, [N, T, H, W, C] for clips.

    Raises:
        InputError: Not such a file.
    """

    kind = "npz"
    about: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        with _open_pixels(self.source) as (_, shape, dtype, fortran_order):
            pixels = len(shape) == 3 or (len(shape) in (4, 5) and shape[-1] in (1, 3))
            pixels = pixels and min(shape[1:]) > 0 and shape[0] >= 0
            if dtype != np.uint8 or not pixels or fortran_order:
                raise InputError(
                    f"{path}: arr_0 is {dtype} {list(shape)}, it must be uint8 [N, H, W, C] or [N, T, H, W, C] with"
                    " 1 or 3 channels"
                )
        self.shape = shape if len(shape) > 3 else (*shape, 1)

    def __len__(self) -> int:
        return int(self.shape[0])

    def read(self, indices: Sequence[int]) -> Iterator[tuple[str, Item]]:
        """Reads images or clips by their numbers in rising order; yields names and pictures."""
        length = int(np.prod(self.shape[1:]))
        with _open_pixels(self.source) as (file, *_):
            start = file.tell()
            for index in indices:
                file.seek(start + index * length)
                data = file.read(length)
                if len(data) < length:
                    raise InputError(f"{self.source} is truncated at image {index} of {len(self)}")
                pixels = np.frombuffer(data, np.uint8).reshape(self.shape[1:])
                yield f"{self.source}[{index}]", to_item(pixels)


@contextmanager
def _open_pixels(path: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype[Any], bool]]:
    """Opens `arr_0` of an npz file: gives the file behind its header, shape, dtype and if it is in Fortran order."""
    with _whole(path), zipfile.ZipFile(path) as archive, archive.open("arr_0.npy") as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read_header(member)
        yield member, shape, dtype, fortran_order


def npz_arrays(path: Path) -> list[str]:
    """Lists the names of the arrays of an npz file.

    Raises:
        InputError: Not an npz file.
    """
    with _whole(path), zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def npz_array(path: Path, name: str) -> np.ndarray:
    """Reads an array of an npz file.

    Raises:
        InputError: Not an npz file, or a damaged one; no such array; an array of Python objects.
    """
    with _whole(path), np.load(path, allow_pickle=False) as file:
        array = file[name]
    if not isinstance(array, np.ndarray):  # numpy gives the bytes of what is no array
        raise InputError(f"{path}: {name} is no array")
    return array


@contextmanager
def _whole(path: str | Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is truncated, damaged or no npz file: {reason}") from None


def npz_labels(path: Path) -> Tensor:
    """Reads the labels of the images of an npz file, int64 [N]: its array `labels`, or `arr_1` as ADM calls them.

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
