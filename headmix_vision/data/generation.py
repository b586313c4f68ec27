"""The Lightning data module for training generators: images or cached latents, with labels.

B batch, C channels, H x W the network's input size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import lightning
import torch
from lightning.fabric.utilities.data import suggested_max_num_workers
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from headmix_vision.data.batches import SampleKey, TrainBatchSampler, eval_batches
from headmix_vision.data.datasets import RANDOM_ACCESS, check_location, open_canvas, open_source, reader_kind
from headmix_vision.data.datasets.base import Digits, Source
from headmix_vision.data.datasets.canvas import CanvasDigits
from headmix_vision.data.datasets.latents import LatentShards
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

OWN_KINDS = ("digits", "fake", "canvas", "latents")
FAKE_LENGTH = 1024
PIL_MODES = {1: "L", 3: "RGB"}


class GenerationData(lightning.LightningDataModule):
    """Images in [-1, 1] or scaled latents, with class labels, for training a generator.

    Channels and size come from the network, the attribute `net` of the LightningModule. Batches are (x float32
    [B, C, H, W], labels int64 [B]).

    Training data are a function of `seed` and of the number of batches trained so far, whatever the number of
    processes and workers; see `ClassificationData`.

    Args:
        dataset: digits (embedded), canvas or canvas/opposite (boards of digits), latents (shards of cache_latents),
            fake (random numbers, to try a recipe), folder (a directory per split and class) or a timm name
            torch/NAME, hfds/NAME.
        root: Place of the data; of latents the directory of the cache, or of a cache for each split.
        train_split: Name of the training split; `all` trains on both splits of digits.
        val_split: Name of the validation split, on which the loss is measured; none when null.
        batch_size: Samples per process and step.
        eval_batch_size: Samples per process and step in validation; batch_size if null.
        num_workers: Worker processes per process; if null, none for digits, fake and canvases that are neither
            flipped nor resized, else the CPU cores per process, at most 8.
        seed: Seed of order and flips.
        hflip: Probability of a horizontal flip of an image.
        max_unreadable: Largest share of unreadable images, above which an error stops the run.
        canvas_size: Height and width of a canvas in pixels; the network's input size if null.

    Raises:
        InputError: An option out of range, a missing package, file or split, a training split smaller than one global
            batch, more classes than the network has, latents of another shape than its input.
    """

    num_classes: int
    class_names: list[str]

    def __init__(
        self,
        dataset: str = "digits",
        root: str | None = None,
        train_split: str = "train",
        val_split: str | None = "validation",
        batch_size: int = 256,
        eval_batch_size: int | None = None,
        num_workers: int | None = None,
        seed: int = 0,
        hflip: float = 0.0,
        max_unreadable: float = 0.01,
        canvas_size: int | None = None,
    ) -> None:
        super().__init__()
        self.kind = dataset if dataset in OWN_KINDS else reader_kind(dataset)
        if self.kind not in (*OWN_KINDS, *RANDOM_ACCESS):
            raise InputError(f"dataset {dataset!r} is a stream; cache its latents first, or use a random-access one")
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}, it must be at least 1")
        if num_workers is not None and num_workers < 0:
            raise InputError(f"num_workers is {num_workers}, it must be at least 0")
        for name, share in (("hflip", hflip), ("max_unreadable", max_unreadable)):
            if not 0 <= share <= 1:
                raise InputError(f"{name} is {share}, it must be in [0, 1]")
        if hflip and self.kind == "latents":
            raise InputError("hflip does not apply to latents: cache_latents has flipped the images or not")
        self.dataset = dataset
        self.root = root
        self.train_split = train_split
        self.val_split = val_split
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.hflip = hflip
        self.max_unreadable = max_unreadable
        self.canvas_size = canvas_size

    def setup(self, stage: str) -> None:
        """Open the splits that `stage` (fit or validate) needs, and check them."""
        trainer = self._attached_trainer()
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            raise InputError("set trainer.use_distributed_sampler to false, the data module shares the samples out")
        net: Any = trainer.lightning_module.net
        self._shape = (net.in_channels, *net.input_size)
        self._model_classes = int(net.num_classes)
        names = {"train": self.train_split, "val": self.val_split}
        roles = [role for role in (("train", "val") if stage == "fit" else ("val",)) if names[role] is not None]
        if not roles:
            raise InputError("there is no validation split: set data.val_split")
        self._splits = {role: self._open(str(names[role])) for role in roles}
        self.class_names = self._splits[roles[0]].class_names
        self.num_classes = len(self.class_names)
        for role in roles[1:]:
            if self._splits[role].class_names != self.class_names:
                raise InputError(f"the splits {names[roles[0]]} and {names[role]} have different classes")
        if self._model_classes and self.num_classes > self._model_classes:
            raise InputError(
                f"the data have {self.num_classes} classes, the model {self._model_classes}:"
                f" set model.num_classes={self.num_classes}"
            )
        if stage == "fit":
            self.train_dataloader()  # refuses a split that is smaller than a batch

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches from the position that the trainer has reached."""
        trainer, split = self._attached_trainer(), self._splits["train"]
        sampler = TrainBatchSampler(
            len(split),
            self.batch_size,
            seed=self.seed,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            first_batch=self._batches_trained,
        )
        if self._drawn_whole(split, self.hflip):
            return TrainLoader(
                WholeBatches(split, _to_range), batch_sampler=sampler, **self._loader_options(whole=True)
            )
        samples: Dataset[tuple[Tensor, int]]
        if isinstance(split, LatentSource):
            samples = LatentSamples(split.shards)
        else:
            samples = TrainSamples(split, self._transform(self.hflip), self.seed, self._unreadable(len(split)))
        return TrainLoader(samples, batch_sampler=sampler, **self._loader_options())

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Every validation sample once, in order; nothing without a validation split."""
        if "val" not in self._splits:
            return []
        trainer, split = self._attached_trainer(), self._splits["val"]
        batches = eval_batches(len(split), self.eval_batch_size, trainer.global_rank, trainer.world_size)
        if self._drawn_whole(split):
            return DataLoader(WholeBatches(split, _to_range), batch_sampler=batches, **self._loader_options(whole=True))
        samples = EvalSamples(split, self._transform(0.0), self._unreadable(len(split)))
        return DataLoader(samples, batch_sampler=batches, **self._loader_options())

    def on_before_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Check the labels while they are on the CPU."""
        labels = batch[1]
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            raise InputError(
                f"labels {int(labels.min())} to {int(labels.max())} in the data, there are {self.num_classes} classes"
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The class names."""
        return {"class_names": list(self.class_names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Insist on the class names of a checkpoint."""
        if state_dict["class_names"] != self.class_names:
            raise InputError(
                f"the data have {len(self.class_names)} classes, the checkpoint has {len(state_dict['class_names'])}"
                " or other ones"
            )

    def _attached_trainer(self) -> lightning.Trainer:
        assert self.trainer is not None
        return self.trainer

    def _batches_trained(self) -> int:
        trainer: Any = self._attached_trainer()
        return 0 if trainer.overfit_batches else trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def _open(self, split: str) -> Source:
        channels, height, width = self._shape
        numbers = [str(i) for i in range(max(self._model_classes, 1))]
        if self.kind == "digits":
            parts = ("train", "validation") if split == "all" else (split,)
            return JoinedSources([Digits(part, channels) for part in parts])
        if self.kind == "fake":
            return FakeSamples(self._shape, numbers)
        if self.kind == "canvas":
            size = (self.canvas_size, self.canvas_size) if self.canvas_size else (height, width)
            return open_canvas(self.dataset, split, size, channels)
        if self.kind == "latents":
            return self._open_latents(split)
        if channels not in PIL_MODES:
            raise InputError(
                f"the network takes {channels} channels, images have 1 or 3: cache latents and set dataset=latents"
            )
        check_location(self.dataset, self.root)
        return open_source(self.dataset, self.root, split, PIL_MODES[channels])

    def _open_latents(self, split: str) -> Source:
        if self.root is None:
            raise InputError("dataset 'latents' needs root, the directory of cached latents")
        folder = Path(self.root) / split
        if not folder.is_dir():
            folder = Path(self.root)
            if split != self.train_split:
                raise InputError(f"{self.root} has no folder {split}: set data.val_split=null to train without")
        shards = LatentShards(folder, self.seed)
        if shards.shape != self._shape:
            raise InputError(
                f"the latents of {folder} are of shape {list(shards.shape)}, the network takes {list(self._shape)}"
            )
        return LatentSource(shards)

    def _drawn_whole(self, split: Source, hflip: float = 0.0) -> TypeGuard[CanvasDigits]:
        """Whether a batch of the split is drawn at once: canvases of the network's size as they are."""
        return isinstance(split, CanvasDigits) and split.size == self._shape[1] and not hflip

    def _transform(self, hflip: float) -> Callable[[Any], Tensor]:
        if self.kind in ("latents", "fake"):
            return Tensor.float
        return _ToRange((self._shape[1], self._shape[2]), hflip)

    def _unreadable(self, size: int) -> UnreadableImages:
        return UnreadableImages(size, self.max_unreadable)

    def _loader_options(self, whole: bool = False) -> dict[str, Any]:
        trainer, workers = self._attached_trainer(), self.num_workers
        if workers is None:
            idle = self.kind in ("digits", "fake") or whole
            workers = 0 if idle else min(8, suggested_max_num_workers(trainer.num_devices))
        return {
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": trainer.strategy.root_device.type == "cuda",
            "collate_fn": as_it_is if whole else Collate(self._shape),
        }


class JoinedSources:
    """Several sources with the same classes, one after the other."""

    def __init__(self, parts: list[Any]) -> None:
        self.places = [(part, index) for part in parts for index in range(len(part))]
        self.class_names: list[str] = parts[0].class_names

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int) -> tuple[Any, int]:
        part, place = self.places[index]
        return part.read(place)

    def name(self, index: int) -> str:
        part, place = self.places[index]
        return part.name(place)


class LatentSource:
    """The latents of a cache; another epoch draws them anew from their moments."""

    def __init__(self, shards: LatentShards) -> None:
        self.shards = shards
        self.class_names = shards.class_names

    def __len__(self) -> int:
        return len(self.shards)

    def read(self, index: int) -> tuple[Tensor, int]:
        return self.shards.read(index)

    def name(self, index: int) -> str:
        return f"{self.shards.path}[{index}]"


class LatentSamples(Dataset[tuple[Tensor, int]]):
    """Training latents: what is drawn depends on (seed, epoch, index) and nothing else."""

    def __init__(self, shards: LatentShards) -> None:
        self.shards = shards

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, int]:
        return self.shards.read(key.sample, draw=key.epoch)


class FakeSamples:
    """Normal random numbers of the network's input shape; the label is index % classes."""

    def __init__(self, shape: tuple[int, int, int], class_names: list[str]) -> None:
        self.shape = shape
        self.class_names = class_names

    def __len__(self) -> int:
        return FAKE_LENGTH

    def read(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.shape, generator=generator), index % len(self.class_names)

    def name(self, index: int) -> str:
        return f"fake[{index}]"


class _ToRange:
    """A PIL image or a tensor in [0, 1], as a tensor in [-1, 1] of the wanted size: shorter side resized, centre cut.

    Enlarging keeps pixels square and hard when the size is a multiple, so that reducing restores the image.
    """

    def __init__(self, size: tuple[int, int], hflip: float) -> None:
        self.size = size
        crop = [v2.Resize(max(size), interpolation=v2.InterpolationMode.BICUBIC), v2.CenterCrop(size)]
        self.crop = v2.Compose([*crop, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
        self.hflip = hflip

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        x = image if isinstance(image, Tensor) else self.crop(image).as_subclass(Tensor)
        if tuple(x.shape[1:]) != self.size:
            multiple = all(new % old == 0 for new, old in zip(self.size, x.shape[1:], strict=True))
            mode = "nearest" if multiple else "bilinear"
            x = interpolate(x[None], self.size, mode=mode, antialias=mode == "bilinear")[0]
        if self.hflip and torch.rand(()) < self.hflip:
            x = x.flip(-1)
        return _to_range(x)


def _to_range(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1] of any shape, in [-1, 1]."""
    return pixels * 2 - 1
