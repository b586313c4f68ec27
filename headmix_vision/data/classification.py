"""The Lightning data module for image classification."""

from collections.abc import Callable
from typing import Any

import lightning
from lightning.fabric.utilities.data import suggested_max_num_workers
from torch.utils.data import DataLoader

from headmix_vision.data.augmentation import (
    INTERPOLATIONS,
    Augmentation,
    check_interpolation,
    check_tensor_images,
    eval_transform,
    normalize,
    train_transform,
)
from headmix_vision.data.batches import TrainBatchSampler, eval_batches
from headmix_vision.data.datasets import STREAMING, check_location, open_canvas, open_source, reader_kind
from headmix_vision.data.datasets.base import Digits, FakeImages, ImageFiles, Source, find_images
from headmix_vision.data.datasets.canvas import CanvasDigits
from headmix_vision.data.datasets.streams import StreamedSamples, StreamLoader
from headmix_vision.data.samples import (
    Collate,
    EvalSamples,
    TrainLoader,
    TrainSamples,
    UnreadableImages,
    WholeBatches,
    as_it_is,
)
from headmix_vision.errors import InputError

PIL_MODES = {1: "L", 3: "RGB"}


class ClassificationData(lightning.LightningDataModule):
    """Images and class labels for training, evaluation and prediction.

    Input size, mean, std, interpolation and crop come from the model, the attribute `net` of the LightningModule.
    Batches are (images float32 [B, C, H, W], targets int64 [B]); for prediction (images, list of file names). An
    unreadable image is left out of evaluation and prediction, so such a batch is smaller and may even be empty.

    Training data are a function of `seed` and of the number of batches trained so far: the order of an epoch is a
    permutation from (seed, epoch), the augmentation of an image comes from (seed, epoch, index, repeat), and W
    processes with batch B see the global batches of one process with W*B. Worker count and interruptions change
    nothing. Set `Trainer(use_distributed_sampler=False)`; ranks are told apart here.

    Resuming within an epoch: Lightning restores its loops before it asks for the training loader, makes the first
    iterator at once (workers start to prefetch before any `set_epoch`), goes on counting `batch_idx` where it
    stopped, stops at `len(loader)`, and skips no batch itself. So the loader keeps its full length, and every
    iterator starts at the number of batches processed in total, which Lightning saves in each checkpoint. (Its epoch
    counters would not do: they count an epoch that `max_steps` cut short as a whole one, which also means that
    `max_epochs` then comes early.)

    Streaming data sets (hfids/, wds/, tfds/) work through timm, with its limits: they are read in order and
    shuffled in a buffer, batches depend on the number of workers and processes, resuming goes back to the start of
    the epoch and is not bit for bit, `repeats` does not exist, and timm skips unreadable images itself, uncounted.
    Where such a data set does not know its classes, the number of classes of the model counts.

    Args:
        dataset: digits (embedded), canvas or canvas/opposite (boards of digits, of the model's input size), folder (a
            directory or tar file per split and class), hfds (a local Hugging Face directory), fake (random images of
            the model's input size), or a timm name: torch/NAME, hfds/NAME, hfids/NAME, wds/, tfds/NAME.
        root: Place of the data. For folder a directory with train/ and val/ or train.tar and val.tar, or one tar
            file with these directories inside.
        train_split: Name of the training split.
        val_split: Name of the validation split.
        test_split: Name of the test split; the validation split if null.
        predict_path: Image file or folder, searched with its sub-folders, for the predict command.
        batch_size: Images per process and step.
        eval_batch_size: Images per process and step in evaluation and prediction; batch_size if null.
        num_workers: Worker processes per process; if null, none for digits and for canvases that are not augmented,
            else the CPU cores per process, at most 8.
        seed: Seed of order and augmentation.
        max_unreadable: Largest share of unreadable images, above which an error stops the run; each process counts
            what it reads.
        crop_pct: Centre crop of evaluation, as a share of the resized image; the model's if null (digits, canvas: all).
        interpolation: Resizing in evaluation; the model's if null (digits, canvas: bilinear).
        augmentation: Training augmentation.

    Raises:
        InputError: An option out of range, a missing package, file or split, an empty class folder, splits with
            different classes, a training split smaller than one global batch, a model that does not take 1 or 3
            channels.
        RuntimeError: While reading, more than `max_unreadable` of the images are unreadable.
    """

    num_classes: int
    class_names: list[str]

    def __init__(
        self,
        dataset: str = "digits",
        root: str | None = None,
        train_split: str = "train",
        val_split: str = "validation",
        test_split: str | None = None,
        predict_path: str | None = None,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        num_workers: int | None = None,
        seed: int = 0,
        max_unreadable: float = 0.01,
        crop_pct: float | None = None,
        interpolation: str | None = None,
        augmentation: Augmentation = Augmentation(),  # noqa: B008 - read only; jsonargparse shows its fields
    ) -> None:
        super().__init__()
        self.kind = reader_kind(dataset)
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}, it must be at least 1")
        if num_workers is not None and num_workers < 0:
            raise InputError(f"num_workers is {num_workers}, it must be at least 0")
        if not 0 <= max_unreadable <= 1:
            raise InputError(f"max_unreadable is {max_unreadable}, it must be in [0, 1]")
        if crop_pct is not None and not 0 < crop_pct <= 1:
            raise InputError(f"crop_pct is {crop_pct}, it must be in (0, 1]")
        if interpolation is not None:
            check_interpolation("interpolation", interpolation, INTERPOLATIONS)
        augmentation.check()
        if self.kind in STREAMING and augmentation.repeats > 1:
            raise InputError(f"augmentation.repeats is {augmentation.repeats}, it must be 1 for dataset {dataset!r}")
        self.dataset = dataset
        self.root = root
        self.train_split = train_split
        self.val_split = val_split
        self.test_split = test_split or val_split
        self.predict_path = predict_path
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.max_unreadable = max_unreadable
        self.crop_pct = crop_pct
        self.interpolation = interpolation
        self.augmentation = augmentation

    def setup(self, stage: str) -> None:
        """Open the splits that `stage` (fit, validate, test or predict) needs, and check them."""
        trainer = self._attached_trainer()
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            raise InputError("set trainer.use_distributed_sampler to false, the data module shares the images out")
        self._fitting = stage == "fit"
        self._data_config = self._resolve_data_config()
        if stage == "predict":
            self._open_predict_files()
            return
        check_location(self.dataset, self.root)
        names = {"train": self.train_split, "val": self.val_split, "test": self.test_split}
        roles = {"fit": ["train", "val"], "validate": ["val"], "test": ["test"]}[stage]
        self._splits = {role: self._open(names[role], role) for role in roles}
        self.class_names = self._splits[roles[0]].class_names
        self.num_classes = len(self.class_names)
        for role in roles[1:]:
            self._check_class_names(self._splits[role].class_names, f"the {names[role]} split")
        if self._fitting:
            self.train_dataloader()  # refuses a split that is smaller than a batch

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches from the position that the trainer has reached (see the class)."""
        trainer, split = self._attached_trainer(), self._splits["train"]
        if isinstance(split, StreamedSamples):
            # At this point of a resumed run `trainer.current_epoch` still names the epoch that is over.
            progress: Any = trainer.fit_loop.epoch_progress.current
            return self._stream_loader(split, self.batch_size, lambda: progress.processed, drop_last=True)
        sampler = TrainBatchSampler(
            len(split),
            self.batch_size,
            seed=self.seed,
            repeats=self.augmentation.repeats,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            first_batch=self._batches_trained,
        )
        if isinstance(split, CanvasDigits) and self.augmentation.is_idle:
            return TrainLoader(self._whole_batches(split), batch_sampler=sampler, **self._loader_options(whole=True))
        transform = train_transform(self._data_config, self.augmentation)
        samples = TrainSamples(split, transform, self.seed, UnreadableImages(len(split), self.max_unreadable))
        return TrainLoader(samples, batch_sampler=sampler, **self._loader_options())

    def val_dataloader(self) -> DataLoader[Any]:
        """Every validation image once, in order."""
        return self._eval_dataloader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Every test image once, in order."""
        return self._eval_dataloader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Images and names of the files under `predict_path`."""
        samples = self._eval_samples(self._files, len(self._files), with_name=True)
        return DataLoader(samples, batch_size=self.eval_batch_size, **self._loader_options(with_name=True))

    def state_dict(self) -> dict[str, Any]:
        """The class names, so that a checkpoint can name its predictions without the data."""
        return {"class_names": list(self.class_names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the class names of a checkpoint for prediction, insist on them when training goes on."""
        if self._fitting:
            self._check_class_names(state_dict["class_names"], "the checkpoint")
        self.class_names = list(state_dict["class_names"])

    def _attached_trainer(self) -> lightning.Trainer:
        assert self.trainer is not None
        return self.trainer

    def _resolve_data_config(self) -> dict[str, Any]:
        from timm.data import resolve_input_data_config

        asked = {"crop_pct": self.crop_pct, "interpolation": self.interpolation}
        if self.kind in ("digits", "canvas"):  # all pixels count
            asked = {"crop_pct": self.crop_pct or 1.0, "interpolation": self.interpolation or "bilinear"}
        config: dict[str, Any] = resolve_input_data_config(self._attached_trainer().lightning_module.net, asked)
        channels = config["input_size"][0]
        if channels not in PIL_MODES:
            raise InputError(f"the model takes {channels} input channels, images have 1 or 3")
        if self.kind in ("digits", "canvas"):
            check_tensor_images(self.kind, self.augmentation, config["interpolation"])
        return config

    @property
    def _model_classes(self) -> int:
        return int(self._attached_trainer().lightning_module.net.num_classes)  # type: ignore[arg-type, union-attr]

    def _open(self, split: str, role: str) -> Source | StreamedSamples:
        channels, *image_size = self._data_config["input_size"]
        mode = PIL_MODES[channels]
        if self.kind == "digits":
            return Digits(split, channels)
        if self.kind == "canvas":
            return open_canvas(self.dataset, split, (image_size[0], image_size[1]), channels)
        if self.kind == "fake":
            return FakeImages(split, (image_size[0], image_size[1]), mode, self._model_classes)
        if self.kind not in STREAMING:
            return open_source(self.dataset, self.root, split, mode)
        training = role == "train"
        config = self._data_config
        return StreamedSamples(
            self.dataset,
            transform=train_transform(config, self.augmentation) if training else eval_transform(config),
            seed=self.seed,
            rank=self._attached_trainer().global_rank,
            num_classes=self._model_classes,
            root=self.root,
            split=split,
            is_training=training,
            batch_size=self.batch_size if training else self.eval_batch_size,
            input_img_mode=mode,
        )

    def _open_predict_files(self) -> None:
        if self.predict_path is None:
            raise InputError("predict_path is not given, it must be an image file or a folder of images")
        trainer, mode = self._attached_trainer(), PIL_MODES[self._data_config["input_size"][0]]
        files = find_images(self.predict_path)
        if len(files) < trainer.world_size:
            raise InputError(f"{len(files)} images cannot be shared by {trainer.world_size} processes")
        self._files = ImageFiles(files[trainer.global_rank :: trainer.world_size], mode)
        self.num_classes = self._model_classes
        self.class_names = [str(i) for i in range(self.num_classes)]  # until a checkpoint brings names

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

    def _eval_dataloader(self, role: str) -> DataLoader[Any]:
        trainer, split = self._attached_trainer(), self._splits[role]
        if isinstance(split, StreamedSamples):
            return self._stream_loader(split, self.eval_batch_size, lambda: 0, drop_last=False)
        batches = eval_batches(len(split), self.eval_batch_size, trainer.global_rank, trainer.world_size)
        if isinstance(split, CanvasDigits) and self._data_config["crop_pct"] == 1:
            return DataLoader(self._whole_batches(split), batch_sampler=batches, **self._loader_options(whole=True))
        samples = self._eval_samples(split, sum(map(len, batches)))
        return DataLoader(samples, batch_sampler=batches, **self._loader_options())

    def _whole_batches(self, split: CanvasDigits) -> WholeBatches:
        return WholeBatches(split, normalize(self._data_config))

    def _eval_samples(self, source: Source, share: int, with_name: bool = False) -> EvalSamples:
        unreadable = UnreadableImages(len(source), self.max_unreadable, seen=share)
        return EvalSamples(source, eval_transform(self._data_config), unreadable, with_name)

    def _stream_loader(
        self, samples: StreamedSamples, batch_size: int, epoch: Callable[[], int], drop_last: bool
    ) -> DataLoader[Any]:
        options = self._loader_options()
        return StreamLoader(samples, epoch=epoch, batch_size=batch_size, drop_last=drop_last, **options)

    def _loader_options(self, with_name: bool = False, whole: bool = False) -> dict[str, Any]:
        trainer, workers = self._attached_trainer(), self.num_workers
        if workers is None:
            workers = 0 if self.kind == "digits" or whole else min(8, suggested_max_num_workers(trainer.num_devices))
        return {
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": trainer.strategy.root_device.type == "cuda",
            "collate_fn": as_it_is if whole else Collate(self._data_config["input_size"], with_name),
        }
