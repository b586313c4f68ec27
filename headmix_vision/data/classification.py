"""The Lightning data module for image classification."""

from typing import Any

from torch.utils.data import DataLoader

from headmix_vision.data.augmentation import (
    INTERPOLATIONS,
    Augmentation,
    check_interpolation,
    check_tensor_images,
    eval_config,
    eval_transform,
    normalize,
    train_transform,
)
from headmix_vision.data.batch_augmentation import batch_augmentation
from headmix_vision.data.batches import RandomBatch
from headmix_vision.data.data_module import DataModule
from headmix_vision.data.datasets.base import PIL_MODES, Transform
from headmix_vision.data.datasets.folders import ImageFiles, find_images
from headmix_vision.errors import InputError, check_numbers
from headmix_vision.files.pictures import Decoding


class ClassificationData(DataModule):
    """Images and class labels for training, evaluation and prediction.

    Input size, mean, std, interpolation and crop come from the model, the attribute `net` of the LightningModule.
    Batches are (images float32 [B, C, H, W], targets int64 [B]); for prediction (images, list of file names). An
    unreadable image is left out of evaluation and prediction, so such a batch is smaller and may even be empty.

    Training data are a function of `seed` and of the number of batches trained so far, whatever the number of
    processes and workers; see `DataModule`.

    Streaming data sets (hfids/, wds/, tfds/) work through timm, with its limits: they are read in order and
    shuffled in a buffer, batches depend on the number of workers and processes, resuming goes back to the start of
    the epoch and is not bit for bit, `repeats` does not exist, and timm skips unreadable images itself, uncounted.
    Where such a data set does not know its classes, the number of classes of the model counts.

    Args:
        dataset: digits (embedded), canvas or canvas/opposite (boards of digits, of the model's input size), folder (a
            directory or tar file per split and class), shards (tar files with the index of
            headmix index-shards), fashion_mnist (idx files; without a root those of Debian's dataset-fashion-mnist),
            hfds (a local Hugging Face directory), fake (random images of the model's input size), table/NAME (a table
            of images, labelled by its column NAME), or a timm name: torch/NAME, hfds/NAME, hfids/NAME, wds/,
            tfds/NAME.
        root: Place of the data. For folder a directory with train/ and val/ or train.tar and val.tar, or one tar
            file with these directories inside; for table/NAME a .csv, or the directory of an images.csv.
        train_split: Name of the training split.
        val_split: Name of the validation split; none when null: then the last checkpoint is tested.
        test_split: Name of the test split; the validation split if null.
        predict_path: Image file or folder, searched with its sub-folders, for the predict command.
        batch_size: Images per process and step.
        crop_pct: Centre crop of evaluation, as a share of the resized image; the model's if null (digits, canvas: all).
        interpolation: Resizing in evaluation; the model's if null (digits, canvas: bilinear).
        augmentation: Training augmentation.
        common: The options that both tasks share, see `DataModule`.

    Raises:
        InputError: An option out of range, a missing package, file or split, an empty class folder, splits with
            different classes, a training split smaller than one global batch, a model that does not take 1 or 3
            channels; while reading, more than `max_unreadable` of the images are unreadable.
    """

    use = "classification"

    def __init__(
        self,
        dataset: str = "digits",
        root: str | None = None,
        train_split: str = "train",
        val_split: str | None = "validation",
        test_split: str | None = None,
        predict_path: str | None = None,
        batch_size: int = 128,
        crop_pct: float | None = None,
        interpolation: str | None = None,
        augmentation: Augmentation = Augmentation(),  # noqa: B008 - read only; jsonargparse shows its fields
        **common: Any,
    ) -> None:
        if crop_pct is not None:
            check_numbers(0, 1, crop_pct=crop_pct)
            if crop_pct == 0:
                raise InputError(f"crop_pct must be above 0, got {crop_pct}.")
        if interpolation is not None:
            check_interpolation("interpolation", interpolation, INTERPOLATIONS)
        if not isinstance(augmentation, Augmentation):
            raise InputError(f"augmentation must be an Augmentation, got {augmentation!r}.")
        augmentation.check()
        super().__init__(
            dataset,
            root,
            train_split=train_split,
            val_split=val_split,
            test_split=test_split or val_split,
            batch_size=batch_size,
            repeats=augmentation.repeats,
            **common,
        )
        if self.entry.is_stream and self.repeats > 1:
            raise InputError(f"augmentation.repeats is {self.repeats}, it must be 1 for dataset {dataset!r}")
        self.predict_path = predict_path
        self.crop_pct = crop_pct
        self.interpolation = interpolation
        self.augmentation = augmentation

    def sample_shape(self, net: Any) -> tuple[int, ...]:
        """(channels, height, width) that timm finds in the model, with mean, std, interpolation and crop."""
        self._data_config = eval_config(net, self.entry.exact, self.crop_pct, self.interpolation)
        if self.entry.exact:
            check_tensor_images(self.dataset, self.augmentation, self._data_config["interpolation"])
        return tuple(self._data_config["input_size"])

    def train_transform(self) -> Transform:
        """Crop, augment and normalise."""
        return train_transform(self._data_config, self.augmentation)

    def eval_transform(self) -> Transform:
        """Resize, cut the centre out and normalise."""
        return eval_transform(self._data_config)

    def batch_transform(self, training: bool) -> Transform | RandomBatch | None:
        """Normalise; in training also flip, shift and erase, where nothing else is to be done."""
        if training and not self.augmentation.is_idle:
            return batch_augmentation(self._data_config, self.augmentation)
        return normalize(self._data_config) if training or self._data_config["crop_pct"] == 1 else None

    def setup(self, stage: str) -> None:
        """Open the splits that `stage` (fit, validate, test) needs, or the files to predict, and check them."""
        if stage != "predict":
            super().setup(stage)
            return
        self._attach(stage)
        if self.predict_path is None:
            raise InputError("data.predict_path is not given, it must be an image file or a folder of images")
        trainer, files = self._attached_trainer(), find_images(self.predict_path, "data.predict_path")
        if len(files) < trainer.world_size:
            raise InputError(f"{len(files)} images cannot be shared by {trainer.world_size} processes")
        decoding = Decoding(PIL_MODES[self._shape[0]], self.background)
        self._files = ImageFiles(files[trainer.global_rank :: trainer.world_size], decoding)
        self.num_classes = self._model_classes
        self.class_names = [str(i) for i in range(self.num_classes)]  # until a checkpoint brings names

    def predict_dataloader(self) -> DataLoader[Any]:
        """Images and names of the files under `predict_path`."""
        samples = self._eval_samples(self._files, len(self._files), with_name=True)
        options = self._loader_options(self._files, samples, with_name=True)
        return DataLoader(samples, batch_size=self.eval_batch_size, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the class names of a checkpoint for prediction, insist on them when training goes on."""
        if self._stage == "fit":
            super().load_state_dict(state_dict)
        self.class_names = list(state_dict["class_names"])
