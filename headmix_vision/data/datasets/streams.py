"""`hfids/NAME`, `wds/`, `tfds/NAME`: timm's iterable data sets, shuffled in a buffer and resumed by the epoch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headmix_vision.data.datasets.base import SplitRequest, Transform
from headmix_vision.data.datasets.timm_readers import create_timm_dataset, reader_class_names
from headmix_vision.data.labels import check_label
from headmix_vision.data.seeding import derive_seed, seeded
from headmix_vision.errors import InputError


def open_stream(request: SplitRequest) -> "Stream":
    """Open a split of a streamed data set."""
    if request.name.lower().startswith("wds/"):
        request.given_root()
    return Stream(request)


class Stream(IterableDataset[tuple[Tensor, int]]):
    """A timm iterable data set whose transform draws from (seed, epoch, rank, worker, position).

    Its reader sets `transform`, from PIL image to tensor, before the first image is asked for.

    Raises:
        InputError: timm cannot open the data set, or does not know its size.
    """

    transform: Transform

    def __init__(self, request: SplitRequest) -> None:
        if request.skip_unlabelled:
            raise InputError(f"skip_unlabelled is true, it must be false for the stream {request.name!r}")
        self.name, self.decoding = request.name, request.decoding
        self.dataset = create_timm_dataset(
            request.name,
            seed=request.seed,
            root=request.root,
            split=request.split,
            is_training=request.training,
            batch_size=request.batch_size,
            # TensorFlow decodes for tfds/; the others are converted here
            input_img_mode=self.decoding.mode if request.name.lower().startswith("tfds/") else "",
        )
        if len(self.dataset) == 0:
            raise InputError(
                f"dataset {request.name!r}: the size of split {request.split!r} is unknown, write NAME.tar|SIZE"
            )
        self.class_names = reader_class_names(self.dataset.reader) or request.numbered_classes
        self.seed = request.seed
        self.rank = request.rank
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, in persistent workers too."""
        self.epoch.fill_(epoch)
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        words = (self.seed, int(self.epoch), self.rank, worker.id if worker else 0)
        for position, (image, target) in enumerate(self.dataset):
            target = check_label(target, f"image {position} of {self.name}")
            with seeded(derive_seed(*words, position)):
                image = self.transform(self.decoding.convert(image))
            yield image, target


class StreamLoader(DataLoader[Any]):
    """Data loader of a `Stream`, telling it the epoch at every `iter()`."""

    def __init__(self, dataset: Stream, *, epoch: Callable[[], int], num_workers: int, **kwargs: Any) -> None:
        # timm shuffles within a worker by the worker's seed, which torch would draw from the global generator.
        generator = torch.Generator().manual_seed(derive_seed(dataset.seed, dataset.rank))
        super().__init__(dataset, num_workers=num_workers, generator=generator, **kwargs)
        self.epoch = epoch
        dataset.dataset.set_loader_cfg(num_workers=num_workers)

    def __iter__(self) -> Any:
        self.dataset.set_epoch(self.epoch())  # type: ignore[attr-defined]
        return super().__iter__()
