"""Decide which sample comes in which batch, by (seed, step, rank) alone, so that any run can stop and go on.

Names: W processes, B samples per process and batch, a *global batch* is the W*B samples of one micro-step.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError


class SampleKey(NamedTuple):
    """Name a training sample; it carries the epoch, so that persistent workers know it, and whether it is a still."""

    sample: int
    epoch: int
    repeat: int
    still: bool = False


class TrainBatchSampler(Sampler[list[SampleKey]]):
    """An endless shuffled stream of global batches, of which this process sees its share.

    The order of an epoch is a permutation that depends on (seed, epoch) alone. Global batch b of an epoch is
    `order[b*W*B : (b+1)*W*B]` and rank r takes `[r::W]` of it, so W processes with batch B see the same global
    batches as one process with batch W*B. The last, incomplete global batch is dropped.

    With `repeats` > 1 (repeated augmentation, Hoffer et al. 2020, as in DeiT) every image stands `repeats` times in
    a row, hence on neighbouring ranks, and the epoch is cut to its usual length.

    With `shard_sizes`, the order goes through the shards in groups of `shuffle_shards`, drawn anew in every epoch, and
    shuffles the samples of a group: at any time all processes read from one group, at its borders from two.

    Args:
        num_samples: Size of the data set.
        batch_size: B, samples per process and batch.
        seed: Base seed of the order.
        repeats: How often an image appears in a row.
        shard_sizes: Numbers of samples that lie together, in the order of the data set; one permutation of all when
            None.
        shuffle_shards: Number of shards of a group.
        rank: This process, 0 <= rank < world_size.
        world_size: W, number of processes.
        first_batch: Called at every `iter()`: the number of global batches since the start of training that are
            already done. One `iter()` yields the `len(self)` batches which follow.

    Raises:
        InputError: The data set does not fill one global batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        repeats: int = 1,
        shard_sizes: Sequence[int] | None = None,
        shuffle_shards: int = 1,
        rank: int = 0,
        world_size: int = 1,
        first_batch: Callable[[], int] = lambda: 0,
    ) -> None:
        self.num_samples = num_samples
        self.global_batch_size = batch_size * world_size
        self.seed = seed
        self.repeats = repeats
        self.shard_sizes = shard_sizes
        self.shuffle_shards = shuffle_shards
        self.rank = rank
        self.world_size = world_size
        self.first_batch = first_batch
        if num_samples < self.global_batch_size:
            raise InputError(
                f"the training split has {num_samples} images, fewer than one global batch of "
                f"{self.global_batch_size} (batch_size {batch_size} x {world_size} processes); lower batch_size"
            )

    def __len__(self) -> int:
        return self.num_samples // self.global_batch_size

    def __iter__(self) -> Iterator[list[SampleKey]]:
        # Not itself a generator: the position is read here and now, not when a worker asks for the first batch.
        return self._stream(self.first_batch(), len(self))

    def from_batch(self, first: int) -> Iterator[list[SampleKey]]:
        """All batches from a number on, without end."""
        return self._stream(first, None)

    def state(self) -> dict[str, float]:
        """Everything that decides the order of the samples."""
        state = {name: getattr(self, name) for name in ("num_samples", "global_batch_size", "seed", "repeats")}
        if self.shard_sizes is not None:
            state |= {"shuffle_shards": self.shuffle_shards, "num_shards": len(self.shard_sizes)}
        return state

    def order(self, epoch: int) -> torch.Tensor:
        """Shuffled indices of one epoch, int64 [ceil(num_samples / repeats)]; each stands for `repeats` samples."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        if self.shard_sizes is None:
            order = torch.randperm(self.num_samples, generator=generator)
        else:
            shards = torch.arange(self.num_samples).split(list(self.shard_sizes))
            groups = torch.randperm(len(shards), generator=generator).split(self.shuffle_shards)
            parts = [torch.cat([shards[number] for number in group.tolist()]) for group in groups]
            order = torch.cat([part[torch.randperm(len(part), generator=generator)] for part in parts])
        return order[: -(-self.num_samples // self.repeats)]

    def _stream(self, first: int, length: int | None) -> Iterator[list[SampleKey]]:
        epoch, order = -1, torch.empty(0)
        for step in itertools.count(first) if length is None else range(first, first + length):
            if step // len(self) != epoch:
                epoch = step // len(self)
                order = self.order(epoch)
            start = step % len(self) * self.global_batch_size
            positions = torch.arange(start + self.rank, start + self.global_batch_size, self.world_size)
            indices = order[positions // self.repeats].tolist()
            repeats = (positions % self.repeats).tolist()
            yield [SampleKey(index, epoch, repeat) for index, repeat in zip(indices, repeats, strict=True)]


def eval_batches(num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Batches of one process in evaluation: every sample exactly once over all ranks, rank r takes `r::W`.

    All ranks get the same number of batches, because DistributedDataParallel synchronises buffers in every forward
    pass and a rank with one batch more would wait for ever.

    Args:
        num_samples: Size of the data set, at least `world_size`.
        batch_size: Largest number of samples per process and batch.
        rank: This process.
        world_size: Number of processes.

    Raises:
        InputError: Fewer samples than processes, or `batch_size` 1 does not come out even.
    """
    if num_samples < world_size:
        raise InputError(f"{num_samples} images cannot be shared by {world_size} processes; use fewer devices")
    share = list(range(rank, num_samples, world_size))
    batches = [share[i : i + batch_size] for i in range(0, len(share), batch_size)]
    if len(batches) < -(-num_samples // (batch_size * world_size)):
        if batch_size == 1:
            raise InputError(
                f"{num_samples} images do not divide among {world_size} processes at eval_batch_size 1; use 2 or more"
            )
        batches.append([batches[-1].pop()])
    return batches


def deal_batches(indices: Sequence[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Deal samples in batches, which are the same for any number of processes; return those of one process."""
    whole = [list(indices[i : i + batch_size]) for i in range(0, len(indices), batch_size)]
    return whole[rank::world_size]
