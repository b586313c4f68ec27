"""timm's iterable data sets (webdataset, TFDS, streamed Hugging Face): shuffled in a buffer, resumed by the epoch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headmix_vision.data.augmentation import Transform
from headmix_vision.data.datasets import create_timm_dataset, reader_class_names
from headmix_vision.data.seeding import derive_seed, seeded
from headmix_vision.errors import InputError


class StreamedSamples(IterableDataset[tuple[Tensor, int]]):
    """A timm iterable data set whose transform draws from (seed, epoch, rank, worker, position).

    Args:
        name: timm name, for example `wds/`.
        transform: From PIL image to tensor.
        seed: Seed of shuffling and transform.
        rank: This process.
        num_classes: The model's, for a data set that does not know its classes.
        **kwargs: For `timm.data.create_dataset`: root, split, is_training, batch_size, input_img_mode.

    Raises:
        InputError: timm cannot open the data set, or does not know its size.
    """

    def __init__(self, name: str, transform: Transform, seed: int, rank: int, num_classes: int, **kwargs: Any) -> None:
        self.dataset = create_timm_dataset(name, seed=seed, **kwargs)
        if len(self.dataset) == 0:
            raise InputError(f"dataset {name!r}: the size of split {kwargs['split']!r} is unknown, write NAME.tar|SIZE")
        self.class_names = reader_class_names(self.dataset.reader) or [str(i) for i in range(num_classes)]
        self.transform = transform
        self.seed = seed
        self.rank = rank
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch, to persistent workers too."""
        self.epoch.fill_(epoch)
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        stream = (self.seed, int(self.epoch), self.rank, worker.id if worker else 0)
        for position, (image, target) in enumerate(self.dataset):
            with seeded(derive_seed(*stream, position)):
                image = self.transform(image)
            yield image, int(target)


class StreamLoader(DataLoader[Any]):
    """Data loader of a `StreamedSamples`, telling it the epoch at every `iter()`."""

    def __init__(self, dataset: StreamedSamples, *, epoch: Callable[[], int], num_workers: int, **kwargs: Any) -> None:
        # timm shuffles within a worker by the worker's seed, which torch would draw from the global generator.
        generator = torch.Generator().manual_seed(derive_seed(dataset.seed, dataset.rank))
        super().__init__(dataset, num_workers=num_workers, generator=generator, **kwargs)
        self.epoch = epoch
        dataset.dataset.set_loader_cfg(num_workers=num_workers)

    def __iter__(self) -> Any:
        self.dataset.set_epoch(self.epoch())  # type: ignore[attr-defined]
        return super().__iter__()
