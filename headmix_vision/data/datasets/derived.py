"""Sources made of others: a part of the samples, or pictures that are decoded once and kept in memory."""

from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from headmix_vision.data.datasets.base import BatchSource, RawImage, Source, to_picture
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import readable
from headmix_vision.files.reading import check_memory

_THREADS = 8


class Derived(Source):
    """Base class of a source with the classes, number, keys and names of another one.

    Args:
        source: The other source.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.class_names, self.in_memory, self.what = source.class_names, source.in_memory, source.what

    def __len__(self) -> int:
        return len(self.source)

    def keys(self) -> list[str] | None:
        """As the other source says; the number of samples tells a part of it."""
        return self.source.keys()

    def name(self, index: int) -> str:
        return self.source.name(index)


class Part(Derived):
    """Some samples of another source.

    Args:
        source: The other source.
        indices: Which of its samples, in their order.
    """

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        super().__init__(source)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[Any, int]:
        return self.source.read(self.indices[index])

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])

    def files(self) -> list[tuple[str, int]] | None:
        files = self.source.files()
        return None if files is None else [files[index] for index in self.indices]


class BatchPart(Part, BatchSource):
    """Some samples of a source that reads whole batches."""

    source: BatchSource

    def __init__(self, source: BatchSource, indices: Sequence[int]) -> None:
        super().__init__(source, indices)
        self.shape = source.shape

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.source.read_batch([self.indices[index] for index in indices])


def hold_out(source: Source, every: int, *, held: bool) -> Part:
    """Take every so many-th sample of a source, from the first on (`held`), or all others.

    Raises:
        InputError: None is left, or the source is smaller than what one sample is to be held out of.
    """
    if every > len(source):
        raise InputError(
            f"holdout_every={every} is more than the {len(source)} {source.what}s, of which it holds out one"
        )
    indices = [index for index in range(len(source)) if (index % every == 0) == held]
    if not indices:
        raise InputError(f"holdout_every={every} leaves nothing of {len(source)} {source.what}s to train on")
    part = BatchPart(source, indices) if isinstance(source, BatchSource) else Part(source, indices)
    if source.shard_sizes is not None:
        ends = [bisect_left(indices, end) for end in accumulate(source.shard_sizes, initial=0)]
        part.shard_sizes = [end - start for start, end in pairwise(ends)]
    return part


class InMemory(Derived, BatchSource):
    """Pictures of another source, all of one size, decoded and kept as uint8.

    Worker processes that are forked share them.

    Args:
        source: The pictures.

    Raises:
        InputError: A picture that cannot be read, or is of another size than the first.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        if len(source):
            first, _ = self._decode(0)
            check_memory(
                2 * len(source) * first.numel(),
                f"in_memory: {len(source)} pictures of {first.shape[-2]}x{first.shape[-1]} pixels",
            )
        with ThreadPoolExecutor(_THREADS) as pool:
            pixels, targets = zip(*pool.map(self._decode, range(len(source))), strict=True)
        self.shape = tuple(pixels[0].shape)
        for index, picture in enumerate(pixels):
            if picture.shape != pixels[0].shape:
                sizes = " and ".join("x".join(map(str, one.shape[:0:-1])) for one in (pixels[0], picture))
                raise InputError(f"in_memory takes pictures of one size, {self.name(index)} is not: {sizes} pixels")
        # [N, C, H, W], laid out as Pillow wants pictures, channels last
        self._pixels = torch.stack([picture.movedim(0, -1) for picture in pixels]).movedim(-1, 1)
        self._targets = torch.tensor(targets, dtype=torch.int64)

    def _decode(self, index: int) -> tuple[Tensor, int]:
        with readable(self.name(index)):
            image, target = self.source.read(index)
        return pil_to_tensor(to_picture(image)), target

    def read(self, index: int) -> tuple[RawImage, int]:  # type: ignore[override]  # transforms take it as from a file
        """Picture as the source reads it, and target."""
        pixels = self._pixels.numpy()[index]
        return Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0]), int(self._targets[index])

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images = self._pixels[indices].to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        return images, self._targets[indices]
