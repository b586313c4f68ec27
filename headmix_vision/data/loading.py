"""Read samples, transform and collate them into batches, in data loader workers; count unreadable images."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from headmix_vision.data.batches import SampleKey
from headmix_vision.data.datasets.base import BatchSource, ClipSource, PreparedSource, RawImage, Source, Transform
from headmix_vision.data.seeding import derive_seed, restored_generators, seed_generators
from headmix_vision.errors import InputError, explain


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
    """Transforms a sample by steps of which the last ones take a whole batch in less time than its samples one by one.

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
                seed = derive_seed(self.seed, key.epoch, key.sample, key.repeat)
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


class WholeBatches(Dataset[tuple[Tensor, Tensor]]):
    """Training or evaluation batches of a source that reads them at once.

    Args:
        source: The images, of the model's input size.
        scale: From pixels in [0, 1] to what the model takes; all that is done to them.
    """

    def __init__(self, source: BatchSource, scale: Transform) -> None:
        self.source = source
        self.scale = scale

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, keys: Sequence[SampleKey | int]) -> tuple[Tensor, Tensor]:
        """Images float32 [B, C, *grid] and targets int64 [B]; torch's loader asks for a whole batch by this name."""
        indices = [key.sample if isinstance(key, SampleKey) else key for key in keys]
        images, targets = self.source.read_batch(indices)
        return self.scale(images), targets


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
        """Images float32 [B, C, *grid] and targets int64 [B], or a list of B names."""
        readable = [sample for sample in samples if sample is not None]
        labels = [label for _, label in readable]
        images = default_collate([image for image, _ in readable]) if readable else torch.empty(0, *self.shape)
        return images, labels if self.with_name else torch.tensor(labels, dtype=torch.int64)


def obey_parent(worker: int) -> None:
    """Lets no process but the one that a loader's worker reads for end it; for `worker_init_fn`.

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
