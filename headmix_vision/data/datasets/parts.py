"""A part of the samples of a source."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from headmix_vision.data.datasets.base import BatchSource, Source
from headmix_vision.errors import InputError


class Part(Source):
    """Some samples of another source.

    Args:
        source: The other source.
        indices: Which of its samples, in their order.
    """

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.source, self.indices = source, indices
        self.class_names, self.in_memory, self.what = source.class_names, source.in_memory, source.what

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[Any, int]:
        return self.source.read(self.indices[index])

    def keys(self) -> list[str] | None:
        """As the other source says; their number tells the part."""
        return self.source.keys()

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])


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
