"""Open the splits of any data set for Lightning, deal their samples to processes, and resume exactly.

B batch, C channels, * the axes of a sample's grid: height and width of an image, frames, height and width of a clip.
"""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.data import suggested_max_num_workers
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from headmix_vision.console import say_once
from headmix_vision.data.batches import (
    Collate,
    EvalSamples,
    PreparedSamples,
    RandomBatch,
    SmallSplitError,
    TrainBatchSampler,
    TrainLoader,
    TrainSamples,
    UnreadableImages,
    WholeBatches,
    as_it_is,
    eval_batches,
    obey_parent,
)
from headmix_vision.data.datasets import find_dataset, open_split
from headmix_vision.data.datasets.base import (
    AbsentSplitError,
    BatchSource,
    PreparedSource,
    Source,
    SplitRequest,
    Transform,
    Use,
)
from headmix_vision.data.datasets.derived import InMemory, hold_out
from headmix_vision.data.datasets.streams import Stream, StreamLoader
from headmix_vision.errors import InputError, check_counts, check_flags, check_numbers
from headmix_vision.files.pictures import check_background
from headmix_vision.files.reading import check_memory, check_workers


class DataModule(lightning.LightningDataModule):
    """Samples and class labels of any data set of the table: batches are (x float32 [B, C, *], labels int64 [B]).

    Training data are a function of `seed` and of the number of batches trained so far: the order of an epoch is a
    permutation from (seed, epoch), what is drawn for a sample comes from (seed, epoch, index, repeat), and W
    processes with batch B see the global batches of one process with W*B. Worker count and interruptions change
    nothing. Set `Trainer(use_distributed_sampler=False)`; ranks are told apart here.

    Resuming within an epoch: Lightning restores its loops before it asks for the training loader, makes the first
    iterator at once (workers start to prefetch before any `set_epoch`), goes on counting `batch_idx` where it
    stopped, stops at `len(loader)`, and skips no batch itself. So the loader keeps its full length, and every
    iterator starts at the number of batches processed in total, which Lightning saves in each checkpoint. (Its epoch
    counters would not do: they count an epoch that `max_steps` cut short as a whole one, which also means that
    `max_epochs` then comes early.)

    A subclass says what its network takes (`sample_shape`) and how samples become that (`train_transform`,
    `eval_transform`, `batch_transform`).

    Args:
        dataset: A name of the table `headmix_vision.data.datasets.DATASETS`.
        root: Place of the data.
        train_split: Name of the training split.
        val_split: Name of the validation split; none when None.
        test_split: Name of the test split; none when None.
        batch_size: B, samples per process and step.
        repeats: Repeated augmentation: each sample this many times in a row, the epoch keeping its length.
        holdout_every: Every so many-th training sample is kept out of training, and validation runs on these instead of
            `val_split`, on which a run that was stopped or chosen by validation can then be tested; none if null.
        eval_batch_size: Samples per process and step in evaluation and prediction; batch_size if null.
        num_workers: Worker processes per process; if null, none where reading costs nothing (digits, canvas, fake,
            moving_digits) or whole batches are read at once, else the CPU cores per process, at most 8.
        seed: Seed of order, augmentation, flips, and of where a clip begins in its video.
        max_unreadable: Largest share of unreadable images or videos, above which an error stops the run; each process
            counts what it reads. A video that is too short for a clip is unreadable.
        shuffle_shards: Number of shards of which samples are mixed at a time; all if null.
        in_memory: Decode all pictures, of one size, before the training, and keep them in memory: of 10,000 of 64 x 64
            pixels 123 MB, in each process. No samples change.
        background: Colour behind the transparent pixels of pictures: white, black, another name or #rrggbb.
        skip_unlabelled: Leave samples out whose label is missing, None, NaN or below 0, and count them; refused if
            false.

    Raises:
        InputError: An option out of range, a missing package, file or split, splits with different classes, a
            training split smaller than one global batch.
    """

    use: Use
    num_classes: int
    class_names: list[str]
    data_changed: bool = False
    """Whether a run may go on with other training data than its checkpoint knows."""

    def __init__(
        self,
        dataset: str,
        root: str | None,
        *,
        train_split: str,
        val_split: str | None,
        test_split: str | None,
        batch_size: int,
        repeats: int = 1,
        holdout_every: int | None = None,
        eval_batch_size: int | None = None,
        num_workers: int | None = None,
        seed: int = 0,
        max_unreadable: float = 0.01,
        shuffle_shards: int | None = None,
        in_memory: bool = False,
        background: str = "white",
        skip_unlabelled: bool = False,
    ) -> None:
        super().__init__()
        self.entry = find_dataset(dataset, self.use)
        check_counts(1, batch_size=batch_size)
        check_counts(0, seed=seed)
        if eval_batch_size is not None:
            check_counts(1, eval_batch_size=eval_batch_size)
        if num_workers is not None:
            check_counts(0, num_workers=num_workers)
            check_workers(**{"data.num_workers": num_workers})
        check_numbers(0, 1, max_unreadable=max_unreadable)
        if holdout_every is not None:
            check_counts(2, holdout_every=holdout_every)
            if self.entry.is_stream:
                raise InputError(f"holdout_every is {holdout_every}, it must be null for dataset {dataset!r}")
        if shuffle_shards is not None:
            check_counts(1, shuffle_shards=shuffle_shards)
        if in_memory and (self.entry.is_stream or not self.entry.has_images or 2 not in self.entry.grid_axes):
            raise InputError(f"in_memory is true, it must be false for dataset {dataset!r}, which holds no image files")
        check_background(background)
        check_flags(skip_unlabelled=skip_unlabelled)
        self.dataset = dataset
        self.root = root
        self.train_split = train_split
        self.val_split = val_split
        self.test_split = test_split
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.max_unreadable = max_unreadable
        self.repeats = repeats
        self.holdout_every = holdout_every
        self.shuffle_shards = shuffle_shards
        self.in_memory = in_memory
        self.background = background
        self.skip_unlabelled = skip_unlabelled
        self._copies: torch.cuda.Stream | None = None
        self._known: dict[str, Any] | None = None

    @abstractmethod
    def sample_shape(self, net: Any) -> tuple[int, ...]:
        """Return (C, *grid) of the samples that a network takes; called in `setup`, before anything is opened."""

    @abstractmethod
    def train_transform(self) -> Transform:
        """Return what makes a training sample; it may draw from the global generators, which are seeded for it."""

    @abstractmethod
    def eval_transform(self) -> Transform:
        """Return what makes a sample for evaluation."""

    @abstractmethod
    def batch_transform(self, training: bool) -> Transform | RandomBatch | None:
        """Return all that is done to samples of the network's shape, where a whole batch at once can take it."""

    def setup(self, stage: str) -> None:
        """Open the splits that `stage` (fit, validate or test) needs, and check them."""
        self._attach(stage)
        self._known = None
        val_split = self.val_split if self.holdout_every is None else self.train_split
        names = {"train": self.train_split, "val": val_split, "test": self.test_split}
        roles = {"fit": ["train", "val"], "validate": ["val"], "test": ["test"]}[stage]
        opened = {role: str(names[role]) for role in roles if names[role] is not None}
        if not opened:
            name = "test" if stage == "test" else "validation"
            raise InputError(f"there is no {name} split: set data.{roles[0]}_split")
        try:
            self._splits = {role: self._open(split, role) for role, split in opened.items()}
        except AbsentSplitError as error:
            raise self._with_fitting_options(error) if "val" in opened and stage == "fit" else error from None
        first, *others = self._splits
        self.class_names = self._splits[first].class_names
        self.num_classes = len(self.class_names)
        for role in others:
            self._check_class_names(self._splits[role].class_names, f"the {opened[role]} split")
        if stage == "fit":
            if self.shuffle_shards is not None and getattr(self._splits["train"], "shard_sizes", None) is None:
                raise InputError(f"shuffle_shards is {self.shuffle_shards}, but {self.dataset!r} is not in shards")
            try:
                loader = self.train_dataloader()
            except SmallSplitError as error:
                raise self._with_fitting_options(error) from None
            self._check_interval(loader)
            self._say_shared_samples()

    def _say_shared_samples(self) -> None:
        """Print a note if validation samples are training samples, too.

        Samples are the same if their names are. Samples of a stream have no names. `holdout_every` takes those of
        validation out of training.
        """
        train, val = self._splits["train"], self._splits.get("val")
        if val is None or self.holdout_every is not None or isinstance(train, Stream) or isinstance(val, Stream):
            return
        held = {val.name(index) for index in range(len(val))}
        if shared := len(held.intersection(train.name(index) for index in range(len(train)))):
            say_once(
                f"note: {shared:,} of {len(val):,} validation samples are training samples, too: validation judges what"
                " the model has seen"
            )

    def _with_fitting_options(self, error: InputError) -> InputError:
        """Add all options that fit a recipe to the training split, unless that lacks, too."""
        trainer = self._attached_trainer()
        try:
            train = open_split(self.request(self.train_split, "train"))
        except AbsentSplitError:
            return error
        options, samples = [], max(getattr(train, "bucket_sizes", None) or [len(train)])
        try:
            if self.val_split is not None and self.holdout_every is None:
                open_split(self.request(self.val_split, "val"))
        except AbsentSplitError:
            options.append("--data.val_split null" if self.use == "generation" else "--data.holdout_every 5")
        if options == ["--data.holdout_every 5"] or self.holdout_every is not None:
            samples -= samples // (self.holdout_every or 5)
        if samples < self.batch_size * trainer.world_size:
            options.append(
                f"--data.batch_size {2 ** max(1, int(math.log2(max(1, samples // trainer.world_size))) - 1)}"
            )
        classes = len(train.class_names)
        if self._needs_labels and classes != self._model_classes:
            options.append(f"--model.num_classes {classes}")
        return InputError(f"{error}. These options fit the training split: {' '.join(options)}")

    def _open(self, split: str, role: str) -> Source | Stream:
        opened = open_split(self.request(split, role))
        batch = min(self.batch_size if role == "train" else self.eval_batch_size, len(opened))
        check_memory(4 * batch * math.prod(self._shape), f"a batch of {batch} samples of the {split} split")
        if self.in_memory and isinstance(opened, Source) and not opened.in_memory:
            opened = InMemory(opened)
        if self.holdout_every is None or role == "test":
            return opened
        assert isinstance(opened, Source)
        return hold_out(opened, self.holdout_every, held=role == "val")

    def request(self, split: str, role: str) -> SplitRequest:
        """Make the request for a split whose role is train, val or test."""
        training = role == "train"
        return SplitRequest(
            self.dataset,
            split,
            self._shape,
            self.use,
            root=self.root,
            num_classes=self._model_classes,
            background=self.background,
            needs_labels=self._needs_labels,
            skip_unlabelled=self.skip_unlabelled,
            seed=self.seed,
            train_split=self.train_split,
            training=training,
            batch_size=self.batch_size if training else self.eval_batch_size,
            rank=self._attached_trainer().global_rank,
            prompt_dropout=self._prompt_dropout(training),
        )

    def _prompt_dropout(self, training: bool) -> float | None:
        """Share of prompts that are left out; None for a network that takes labels."""
        return None

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches from the position that the trainer has reached (see the class)."""
        trainer, split = self._attached_trainer(), self._splits["train"]
        if isinstance(split, Stream):
            # At this point of a resumed run `trainer.current_epoch` still names the epoch that is over.
            progress: Any = trainer.fit_loop.epoch_progress.current
            return self._stream_loader(split, self.train_transform(), lambda: progress.processed, training=True)
        samples = self._train_samples(split, self._shape)
        return TrainLoader(
            samples, batch_sampler=self._train_sampler(split, self.seed), **self._loader_options(split, samples)
        )

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Every validation sample once, in order; nothing without a validation split."""
        return self._eval_dataloader("val") if "val" in self._splits else []

    def test_dataloader(self) -> DataLoader[Any]:
        """Every test sample once, in order."""
        return self._eval_dataloader("test")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Check the labels of a batch, and copy it; to a GPU on another stream than the step before, which goes on.

        Raises:
            InputError: A label below 0 or above the number of classes.
        """
        labels, classes = batch[1], max(self.num_classes, 1)  # data without classes have label 0
        if isinstance(labels, Tensor) and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise InputError(
                f"labels {int(labels.min())} to {int(labels.max())} in the data, there are {self.num_classes} classes"
            )
        if device.type != "cuda":
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        if self._copies is None:
            self._copies = torch.cuda.Stream(device)
        with torch.cuda.stream(self._copies):
            copied = super().transfer_batch_to_device(batch, device, dataloader_idx)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(self._copies)
        for part in tree_leaves(copied):
            if isinstance(part, Tensor):
                part.record_stream(computing)  # its memory is not the next batch's before the step is done with it
        return copied

    def state_dict(self) -> dict[str, Any]:
        """The class names, so that a checkpoint can name its classes without the data, and what tells the samples."""
        return {"class_names": list(self.class_names), "training": self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Insist on the class names of a checkpoint and, unless `data_changed`, on its training data."""
        self._check_class_names(state_dict["class_names"], "the checkpoint")
        before = state_dict.get("training")  # earlier versions have none
        if before is not None and "train" in self._splits:
            self._check_identity(before)

    def training_sources(self) -> dict[str, Source | Stream]:
        """Return what training reads, by what it is called."""
        return {"samples": self._splits["train"]}

    def _identity(self) -> dict[str, Any]:
        """Return the name of the data set, and number and hash of its training samples, made once."""
        if self._known is None:
            self._known = {"data set": self.dataset}
            for name, source in self.training_sources().items():
                keys = None if isinstance(source, Stream) else source.keys()
                digest = keys and hashlib.sha256("\n".join(keys).encode(errors="surrogateescape")).hexdigest()[:16]
                self._known |= {f"number of {name}": len(source), f"names or labels of {name}": digest}
        return self._known

    def _check_identity(self, before: Any) -> None:
        now = self._identity()
        if not isinstance(before, dict):
            raise InputError("the entry 'training' of the checkpoint is damaged")
        if isinstance(self._splits["train"], Stream):
            say_once("note: samples of a stream have no names to compare: changed data go unnoticed")
        names = [name for name in now if before.get(name) != now[name]]
        shown = [name if name.startswith("names") else f"{name} {before.get(name)} -> {now[name]}" for name in names]
        changed = f"the training data have changed since the checkpoint: {', '.join(shown)}"
        if names and not self.data_changed:
            raise InputError(f"{changed}; restore them, or go on with the new ones by --data-changed")
        if names:
            say_once(f"note: {changed}")

    def _attached_trainer(self) -> lightning.Trainer:
        assert self.trainer is not None
        return self.trainer

    def _attach(self, stage: str) -> None:
        trainer = self._attached_trainer()
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            raise InputError("set trainer.use_distributed_sampler to false, the data module shares the samples out")
        net: Any = trainer.lightning_module.net
        self._stage = stage
        self._model_classes = int(net.num_classes)
        usual = self.use == "classification" or self._model_classes > 0
        self._needs_labels = getattr(trainer.lightning_module, "needs_labels", usual)
        self._shape = self.sample_shape(net)

    def _check_interval(self, loader: DataLoader[Any]) -> None:
        trainer: Any = self._attached_trainer()
        interval, limit = trainer.val_check_interval, trainer.limit_train_batches
        if not isinstance(interval, int) or trainer.check_val_every_n_epoch is None or isinstance(loader, StreamLoader):
            return
        batches = min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit)
        if interval > batches:
            raise InputError(f"trainer.val_check_interval is {interval}, but an epoch has {batches} batches")

    def _check_class_names(self, names: list[str], where: str) -> None:
        if names == self.class_names:
            return
        own, other = (len(self.class_names), len(names))
        first = next(iter(sorted(set(self.class_names) ^ set(names))), "their order")
        raise InputError(f"the data have {own} classes, {where} has {other}; they first differ in {first!r}")

    def _batches_trained(self) -> int:
        trainer: Any = self._attached_trainer()
        # overfit_batches asks for the same few batches over and over
        return 0 if trainer.overfit_batches else trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def _train_sampler(self, split: Source, seed: int) -> TrainBatchSampler:
        trainer = self._attached_trainer()
        sharers = getattr(trainer.lightning_module, "sharers", 1)  # processes that have the same batches
        return TrainBatchSampler(
            len(split),
            self.batch_size,
            seed=seed,
            repeats=self.repeats,
            shard_sizes=None if self.shuffle_shards is None else split.shard_sizes,
            shuffle_shards=self.shuffle_shards or 1,
            bucket_sizes=split.bucket_sizes,
            rank=trainer.global_rank // sharers,
            world_size=trainer.world_size // sharers,
            first_batch=self._batches_trained,
        )

    def _train_samples(self, split: Source, shape: tuple[int, ...]) -> Dataset[Any]:
        """Training samples of a shape (C, *grid), one by one or in whole batches."""
        whole = self._whole_batches(split, shape, training=True)
        if whole is not None:
            return whole
        if isinstance(split, PreparedSource):
            return PreparedSamples(split)
        unreadable = UnreadableImages(len(split), self.max_unreadable, what=split.what)
        return TrainSamples(split, self.train_transform(), self.seed, unreadable)

    def _eval_dataloader(self, role: str) -> DataLoader[Any]:
        trainer, split = self._attached_trainer(), self._splits[role]
        if isinstance(split, Stream):
            return self._stream_loader(split, self.eval_transform(), lambda: 0, training=False)
        ranks = trainer.global_rank, trainer.world_size
        batches, first = [], 0
        for size in split.bucket_sizes or [len(split)]:
            dealt = eval_batches(size, self.eval_batch_size, *ranks)
            batches += [[first + index for index in batch] for batch in dealt]
            first += size
        samples = self._whole_batches(split, self._shape, training=False)
        if samples is None:
            samples = self._eval_samples(split, share=sum(map(len, batches)))
        return DataLoader(samples, batch_sampler=batches, **self._loader_options(split, samples))

    def _whole_batches(self, split: Source, shape: tuple[int, ...], training: bool) -> Dataset[Any] | None:
        transform = self.batch_transform(training)
        if transform is None or not isinstance(split, BatchSource) or split.shape != shape:
            return None
        return WholeBatches(split, transform, self.seed)

    def _eval_samples(self, source: Source, share: int, with_name: bool = False) -> EvalSamples:
        transform = as_it_is if isinstance(source, PreparedSource) else self.eval_transform()
        unreadable = UnreadableImages(len(source), self.max_unreadable, share, source.what)
        return EvalSamples(source, transform, unreadable, with_name)

    def _stream_loader(
        self, split: Stream, transform: Transform, epoch: Callable[[], int], training: bool
    ) -> DataLoader[Any]:
        split.transform = transform
        batch_size = self.batch_size if training else self.eval_batch_size
        return StreamLoader(
            split, epoch=epoch, batch_size=batch_size, drop_last=training, **self._loader_options(split, split)
        )

    def _loader_options(self, split: Source | Stream, samples: Dataset[Any], with_name: bool = False) -> dict[str, Any]:
        trainer, workers, whole = self._attached_trainer(), self.num_workers, isinstance(samples, WholeBatches)
        if workers is None:
            idle = whole or (isinstance(split, Source) and split.in_memory)
            workers = 0 if idle else min(8, suggested_max_num_workers(trainer.num_devices))
        return {
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "worker_init_fn": obey_parent,
            "pin_memory": trainer.strategy.root_device.type == "cuda",
            "collate_fn": as_it_is if hasattr(samples, "__getitems__") else Collate(self._shape, with_name),
        }
