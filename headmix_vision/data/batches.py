"""Decide which sample comes in which batch, and read, transform and collate samples in data loader workers.

The order follows from (seed, step, rank) alone, so that any run can stop and go on. Names: W processes, B samples per
process and batch, a *global batch* is the W*B samples of one micro-step.
"""

import itertools
import os
import signal
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from headmix_vision.data.datasets.base import BatchSource, ClipSource, PreparedSource, RawImage, Source, Transform
from headmix_vision.data.seeding import derive_seed, restored_generators, seed_generators
from headmix_vision.errors import InputError, explain


class SmallSplitError(InputError):
    """The training split does not fill one global batch."""


class SampleKey(NamedTuple):
    """Name a training sample; it carries the epoch, so that persistent workers know it, and whether it is a still."""

    sample: int
    epoch: int
    repeat: int
    still: bool = False

    def seed(self, seed: int) -> int:
        """Derive the seed of what is drawn for the sample."""
        return derive_seed(seed, self.epoch, self.sample, self.repeat)


class TrainBatchSampler(Sampler[list[SampleKey]]):
    """An endless shuffled stream of global batches, of which this process sees its share.

    The order of an epoch is a permutation that depends on (seed, epoch) alone. Global batch b of an epoch is
    `order[b*W*B : (b+1)*W*B]` and rank r takes `[r::W]` of it, so W processes with batch B see the same global
    batches as one process with batch W*B. The last, incomplete global batch is dropped.

    With `repeats` > 1 (repeated augmentation, Hoffer et al. 2020, as in DeiT) every image stands `repeats` times in
    a row, hence on neighbouring ranks, and the epoch is cut to its usual length.

    With `shard_sizes`, the order goes through the shards in groups of `shuffle_shards`, drawn anew in every epoch, and
    shuffles the samples of a group: at any time all processes read from one group, at its borders from two.

    With `bucket_sizes`, each global batch is of one bucket. A bucket's last, incomplete one is dropped.

    Args:
        num_samples: Size of the data set.
        batch_size: B, samples per process and batch.
        seed: Base seed of the order.
        repeats: How often an image appears in a row.
        shard_sizes: Numbers of samples that lie together, in the order of the data set; one permutation of all when
            None.
        shuffle_shards: Number of shards of a group.
        bucket_sizes: Numbers of samples of one shape, in the order of the data set; all are of one shape when None.
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
        bucket_sizes: Sequence[int] | None = None,
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
        self.bucket_sizes = [num_samples] if bucket_sizes is None else [*bucket_sizes]
        self.rank = rank
        self.world_size = world_size
        self.first_batch = first_batch
        if max(self.bucket_sizes) < self.global_batch_size:
            where = "the training split" if len(self.bucket_sizes) == 1 else "the largest size of the training split"
            raise SmallSplitError(
                f"{where} has {max(self.bucket_sizes)} images, fewer than one global batch of "
                f"{self.global_batch_size} (batch_size {batch_size} x {world_size} processes); lower batch_size"
            )

    def __len__(self) -> int:
        return sum(size // self.global_batch_size for size in self.bucket_sizes)

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
        if len(self.bucket_sizes) > 1:
            state["buckets"] = len(self.bucket_sizes)
        return state

    def order(self, epoch: int) -> torch.Tensor:
        """Shuffled indices of one epoch, int64 [ceil(num_samples / repeats)]; each stands for `repeats` samples."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        if len(self.bucket_sizes) > 1:
            buckets = torch.arange(self.num_samples).split(self.bucket_sizes)
            mixed = [bucket[torch.randperm(len(bucket), generator=generator)] for bucket in buckets]
            batches = torch.cat([part[: len(part) - len(part) % self.global_batch_size] for part in mixed])
            batches = batches.view(-1, self.global_batch_size)
            order = batches[torch.randperm(len(batches), generator=generator)].flatten()
        elif self.shard_sizes is None:
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
    """Return the batches of one process in evaluation: every sample exactly once over all ranks, rank r takes `r::W`.

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
    """Deal samples in batches, which are the same for any number of processes; return the batches of one process."""
    whole = [list(indices[i : i + batch_size]) for i in range(0, len(indices), batch_size)]
    return whole[rank::world_size]


class UnreadableImages:
    """Count the distinct images that could not be read, over all workers of a process.

    Args:
        size: Number of images in the source.
        limit: Largest tolerated share of unreadable images.
        seen: How many of the images this process reads; the share refers to them.
        what: What to call one in messages.
    """

    def __init__(self, size: int, limit: float, seen: int | None = None, what: str = "image") -> None:
        self.limit = limit
        self.what = what
        self.seen = size if seen is None else seen
        self.flags = torch.zeros(size, dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return int(self.flags.sum())

    def __contains__(self, index: int) -> bool:
        return bool(self.flags[index])

    def report(self, index: int, name: str, error: Exception) -> None:
        """Warn about a newly found image.

        Raises:
            InputError: More than the tolerated share is unreadable, or all.
        """
        if index in self:
            return
        self.flags[index] = 1
        count = len(self)
        reason = explain(error)
        if count > self.limit * self.seen:
            raise InputError(
                f"{count} of {self.seen} {self.what}s are unreadable ({count / self.seen:.2%}), more than"
                f" max_unreadable = {self.limit:.2%}; the latest is {name} ({reason})"
            ) from None
        if count == self.seen:
            raise InputError(f"none of the {count} {self.what}s is readable; the latest is {name} ({reason})") from None
        warnings.warn(f"skipped unreadable {self.what} {name} ({reason}), {count} of {self.seen} so far", stacklevel=2)


class BatchedEnd:
    """Transform a sample in steps, the last of which are quicker for a whole batch than for its samples one by one.

    Args:
        single: The first steps, all random ones among them.
        batch: The last steps, from [B, C, *grid] to float32 of the same shape; they may overwrite what they are given.
    """

    def __init__(self, single: Transform, batch: Transform) -> None:
        self.single = single
        self.batch = batch

    def __call__(self, sample: RawImage) -> Tensor:
        return self.batch(torch.stack([self.single(sample)]))[0]


class TrainSamples(Dataset[tuple[Tensor, int]]):
    """Augmented training images or clips.

    The augmentation, and which frames of a video are read, depend on (seed, epoch, index, repeat) and nothing else. An
    unreadable image or video is replaced by the next readable one.
    """

    def __init__(self, source: Source, transform: Transform, seed: int, unreadable: UnreadableImages) -> None:
        self.source = source
        self.transform = transform if isinstance(transform, BatchedEnd) else BatchedEnd(transform, as_it_is)
        self.seed = seed
        self.unreadable = unreadable

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, int]:
        images, targets = self.__getitems__([key])
        return images[0], int(targets[0])

    def __getitems__(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor]:
        """Images float32 [B, C, *grid] and targets int64 [B]; torch's loader asks for a whole batch by this name."""
        samples: list[tuple[Tensor, int] | None] = []
        with restored_generators():
            for key in keys:
                seed = key.seed(self.seed)
                image, target = self._read(key.sample, seed)
                seed_generators(seed)
                samples.append((self.transform.single(image), target))
        images, targets = Collate(())(samples)
        return self.transform.batch(images), targets

    def _read(self, first: int, seed: int) -> tuple[RawImage, int]:
        for offset in range(len(self)):
            index = (first + offset) % len(self)
            if index in self.unreadable:
                continue
            try:
                if isinstance(self.source, ClipSource):
                    return self.source.read_part(index, derive_seed(seed) / 2**63)
                return self.source.read(index)
            except InputError:
                raise
            except Exception as error:  # decoders raise whatever comes to mind on a damaged file
                self.unreadable.report(index, self.source.name(index), error)
        raise InputError(f"none of the {len(self)} {self.unreadable.what}s is readable")


class PreparedSamples(Dataset[tuple[Tensor, int]]):
    """Training samples that are already what the network takes, drawn anew in every epoch."""

    def __init__(self, source: PreparedSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, int]:
        return self.source.read(key.sample, draw=key.epoch)


class TrainLoader(DataLoader[Any]):
    """Data loader over a sampler of training batches, which Lightning recognises as able to resume within an epoch.

    The position itself is in Lightning's own counters; the state only says what the position refers to.
    """

    def state_dict(self) -> dict[str, float]:
        """Everything that decides the order of the images."""
        sampler: Any = self.batch_sampler
        state: dict[str, float] = sampler.state()
        return state

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Warn if the order of the images is not the one that the checkpoint stopped in."""
        state = self.state_dict()
        for name in {**state_dict, **state}:
            before, now = state_dict.get(name), state.get(name)
            if before != now:
                warnings.warn(f"{name} was {before} and is now {now}: not an exact resume", stacklevel=2)


class EvalSamples(Dataset[tuple[Tensor, int | str] | None]):
    """Images for evaluation, with their target, or for prediction, with their name. None for an unreadable one."""

    def __init__(
        self, source: Source, transform: Transform, unreadable: UnreadableImages, with_name: bool = False
    ) -> None:
        self.source = source
        self.transform = transform
        self.unreadable = unreadable
        self.with_name = with_name

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int | str] | None:
        try:
            image, target = self.source.read(index)
        except InputError:  # not an image: a shard of many, say
            raise
        except Exception as error:  # as in training
            self.unreadable.report(index, self.source.name(index), error)
            return None
        return self.transform(image), self.source.name(index) if self.with_name else target


class RandomBatch(ABC):
    """Random transform of a whole batch, in which a sample's numbers follow from its own seed."""

    @abstractmethod
    def __call__(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        """Transform images float32 [B, C, H, W] in [0, 1] by a seed each; they may be overwritten."""


class WholeBatches(Dataset[tuple[Tensor, Tensor]]):
    """Training or evaluation batches of a source that reads them at once.

    Args:
        source: The images, of the model's input size.
        transform: From pixels in [0, 1] to what the model takes; all that is done to them. A random one depends on
            (seed, epoch, index, repeat) as in `TrainSamples`.
        seed: Seed of a random transform.
    """

    def __init__(self, source: BatchSource, transform: Transform | RandomBatch, seed: int = 0) -> None:
        self.source = source
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, keys: Sequence[SampleKey | int]) -> tuple[Tensor, Tensor]:
        """Images float32 [B, C, *grid] and targets int64 [B]; torch's loader asks for a whole batch by this name."""
        indices = [key.sample if isinstance(key, SampleKey) else key for key in keys]
        images, targets = self.source.read_batch(indices)
        if not isinstance(self.transform, RandomBatch):
            return self.transform(images), targets
        drawn = [key for key in keys if isinstance(key, SampleKey)]
        return self.transform(images, [key.seed(self.seed) for key in drawn]), targets


def as_it_is(batch: Any) -> Any:
    """Return what it is given: the collate function of whole batches, the transform of prepared samples."""
    return batch


class Collate:
    """Batch the samples, leaving out unreadable ones (None).

    Args:
        shape: (C, *grid), the shape of images in a batch that has lost all of them.
        with_name: Whether samples carry a name instead of a target.
    """

    def __init__(self, shape: tuple[int, ...], with_name: bool = False) -> None:
        self.shape = shape
        self.with_name = with_name

    def __call__(self, samples: list[tuple[Tensor, Any] | None]) -> tuple[Tensor, Any]:
        """Images float32 [B, C, *grid] and targets int64 [B], a list of B names, or the tensors of prompts [B, ...]."""
        readable = [sample for sample in samples if sample is not None]
        labels = [label for _, label in readable]
        images = default_collate([image for image, _ in readable]) if readable else torch.empty(0, *self.shape)
        if labels and isinstance(labels[0], tuple):
            return images, tuple(default_collate(labels))
        return images, labels if self.with_name else torch.tensor(labels, dtype=torch.int64)


def obey_parent(worker: int) -> None:
    """Let only its parent process end a loader's worker; for `worker_init_fn`.

    Ctrl-C, torchrun and schedulers signal all processes of a job: without its workers, training could not finish the
    step after which it saves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        continue
    os._exit(0)
