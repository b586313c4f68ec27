"""Sources of samples to score: pictures or clips of a folder, an ADM npz file, a data set, or memory.

N samples, C channels (1 or 3), T frames, H and W pixels. Pixels are uint8 throughout, as files hold them. An npz file
holds the images `arr_0` and their labels. The header of an array states its shape. It must be the shape of the bytes
that the archive holds, before any memory is taken for it.
"""

import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from headmix_vision.console import say_left_out
from headmix_vision.data.datasets.base import Source, to_picture
from headmix_vision.errors import InputError, check_positive
from headmix_vision.files.pictures import Decoding, Item, find_clips, find_pictures, readable, to_item
from headmix_vision.files.reading import check_file, check_members, check_memory, read_json
from headmix_vision.files.video import ClipInfo, probe_clip, read_clip

DECODER_THREADS = 8
SAMPLES, SAMPLES_METADATA = "images", "metadata.json"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Samples(ABC):
    """Pictures, or clips as lists of pictures, in a fixed order.

    Attributes:
        source: Name that the user gave.
        kind: `folder`, `npz`, `dataset` or `memory`.
        about: Further fields of the result file.
        infos: Facts about each clip; None for pictures.
    """

    source: str
    kind: str
    about: Mapping[str, Any] = MappingProxyType({})
    infos: list[ClipInfo] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, number: int) -> str:
        """Return the name of a sample for messages."""

    @abstractmethod
    def read(self, wanted: Mapping[int, range | None]) -> Iterator[tuple[str, Item]]:
        """Yield names and samples by their numbers in rising order: of clips the frames wanted, all of them for None.

        Raises:
            InputError: A sample that cannot be read.
        """

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """Read the labels of samples, int64 [number of samples]; InputError where there are none."""
        raise InputError(
            f"{self.source} has no labels: it is neither a folder of samples with metadata.json nor an npz file"
        )


class Folder(Samples):
    """Files below a folder, in sorted order; a damaged file is an error.

    An animated PNG among pictures is a clip. Clips are videos, animated PNGs, and folders of frames, one clip each.

    Args:
        path: The folder.
        decoding: How files become pictures.
        of_clips: Whether clips are looked for, not pictures.
    """

    kind = "folder"

    def __init__(self, path: Path, decoding: Decoding, of_clips: bool = False) -> None:
        self.source, self.decoding = str(path), decoding
        listing = find_clips(path) if of_clips else find_pictures(path)
        say_left_out(path, len(listing.paths), "clips" if of_clips else "pictures", listing.left_out)
        self.paths = sorted(listing.paths) if of_clips else listing.paths
        self.about = {"background": decoding.background, "left_out": dict(listing.left_out)}
        metadata = path.parent / SAMPLES_METADATA
        self.metadata = metadata if path.name == SAMPLES and metadata.is_file() else None
        if of_clips:
            self.infos = self._probe()

    def _probe(self) -> list[ClipInfo]:
        with ThreadPoolExecutor(DECODER_THREADS) as pool:
            infos = list(pool.map(probe_clip, self.paths))
        rate = self._setting("clips", "frame_rate")
        if rate is None:
            return infos
        check_positive(**{f"the frame rate of {self.source}": rate})  # their PNGs do not state it
        return [replace(info, frame_rate=rate) for info in infos]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, number: int) -> str:
        return str(self.paths[number])

    def read(self, wanted: Mapping[int, range | None]) -> Iterator[tuple[str, Item]]:
        numbers, at_once = list(wanted), DECODER_THREADS * (4 if self.infos is None else 1)
        with ThreadPoolExecutor(DECODER_THREADS) as pool:
            for start in range(0, len(numbers), at_once):
                some = numbers[start : start + at_once]
                yield from zip(map(self.name, some), pool.map(self._read_one, some, map(wanted.get, some)), strict=True)

    def _read_one(self, number: int, indices: range | None) -> Item:
        if indices is not None:
            return read_clip(self.paths[number], indices, self.decoding)
        with readable(self.paths[number]):
            return self.decoding.item(self.paths[number])

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """Read the classes of a folder of samples, which take turns."""
        if self.metadata is None:
            return super().labels(numbers)
        classes = self._setting("classes")
        try:
            return torch.tensor([classes[int(self.paths[n].stem) % len(classes)] for n in numbers], dtype=torch.int64)
        except (ValueError, TypeError, ZeroDivisionError):
            raise InputError(f"{self.metadata} does not tell the classes of the samples") from None

    def _setting(self, *names: str) -> Any:
        """Read a setting from the metadata of samples; None where they do not tell it, and of another folder."""
        if self.metadata is None:
            return None
        try:
            return reduce(getitem, names, read_json(self.metadata)["settings"])
        except (KeyError, TypeError):
            return None


class NpzSamples(Samples):
    """Array `arr_0` of an npz file as ADM's evaluation takes it, read piece by piece.

    It is uint8 [N, H, W, C] or [N, H, W] for images, [N, T, H, W, C] for clips.

    Raises:
        InputError: Not such a file.
    """

    kind = "npz"

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        with open_pixels(self.source) as (_, shape, dtype, fortran_order):
            pixels = len(shape) == 3 or (len(shape) in (4, 5) and shape[-1] in (1, 3))
            pixels = pixels and min(shape[1:]) > 0 and shape[0] >= 0
            if dtype != np.uint8 or not pixels or fortran_order:
                raise InputError(
                    f"{path}: arr_0 is {dtype} {list(shape)}, it must be uint8 [N, H, W, C] or [N, T, H, W, C] with"
                    " 1 or 3 channels"
                )
        self.shape = shape if len(shape) > 3 else (*shape, 1)
        check_memory(2 * math.prod(shape[1:]), f"{path}: a sample {list(shape[1:])}")

        if len(shape) == 5:
            self.infos = [ClipInfo(shape[1], (shape[2], shape[3]))] * shape[0]

    def __len__(self) -> int:
        return int(self.shape[0])

    def name(self, number: int) -> str:
        return f"{self.source}[{number}]"

    def read(self, wanted: Mapping[int, range | None]) -> Iterator[tuple[str, Item]]:
        length = math.prod(self.shape[1:])
        with open_pixels(self.source) as (file, *_):
            start = file.tell()
            for number, indices in wanted.items():
                file.seek(start + number * length)
                data = file.read(length)
                if len(data) < length:
                    raise InputError(f"{self.source} is truncated at image {number} of {len(self)}")
                pixels = np.frombuffer(data, np.uint8).reshape(self.shape[1:])
                yield self.name(number), to_item(pixels if indices is None else pixels[indices])

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """Read the array `labels` or `arr_1`."""
        return npz_labels(Path(self.source))[list(numbers)]


class TensorSamples(Samples):
    """Samples in memory: images uint8 [N, C, H, W] or clips uint8 [N, C, T, H, W], of 1 or 3 channels.

    Raises:
        InputError: Another type or shape.
    """

    kind = "memory"

    def __init__(self, pixels: Tensor, source: str = "memory") -> None:
        if pixels.dtype != torch.uint8 or pixels.ndim not in (4, 5) or pixels.shape[1] not in (1, 3):
            raise InputError(
                f"images are {pixels.dtype} {list(pixels.shape)}, they must be uint8 [N, 1 or 3, H, W], clips"
                " uint8 [N, 1 or 3, T, H, W]"
            )
        self.source = source
        self.pixels = pixels.cpu()

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, number: int) -> str:
        return f"image {number}"

    def read(self, wanted: Mapping[int, range | None]) -> Iterator[tuple[str, Item]]:
        for number, indices in wanted.items():
            pixels = np.ascontiguousarray(self.pixels[number].movedim(0, -1).numpy())
            yield self.name(number), to_item(pixels if indices is None else pixels[indices])


class DatasetSamples(Samples):
    """Samples of a data set by its name, all of a split or a slice of it.

    Args:
        name: Name that the user gave.
        data: The split.
        indices: The slice.
        background: Colour behind transparent pixels.
        clip_size: T, H and W of clips; None for pictures.
    """

    kind = "dataset"

    def __init__(
        self, name: str, data: Source, indices: slice, background: str, clip_size: tuple[int, int, int] | None = None
    ) -> None:
        self.source, self.data, self.about = name, data, {"background": background}
        self.numbers = range(len(data))[indices]
        if clip_size is not None:
            info = ClipInfo(clip_size[0], clip_size[1:], getattr(data, "frame_rate", None))
            self.infos = [info] * len(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, number: int) -> str:
        return self.data.name(self.numbers[number])

    def read(self, wanted: Mapping[int, range | None]) -> Iterator[tuple[str, Item]]:
        for number, indices in wanted.items():
            name = self.name(number)
            with readable(name):
                sample, _ = self.data.read(self.numbers[number])
                if indices is None:
                    item: Item = to_picture(sample)
                elif isinstance(sample, Image.Image) or sample.ndim != 4:
                    raise ValueError("it is an image, not a clip")
                else:
                    item = [to_picture(sample[:, index]) for index in indices]
            yield name, item

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """Read the targets of the data set."""
        return torch.tensor([self.data.read(self.numbers[number])[1] for number in numbers], dtype=torch.int64)


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
