"""The Lightning data module for training generators: images or cached latents, with labels.

B batch, C channels, H x W the network's input size.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.functional import pil_to_tensor

from headmix_vision.checks import check_numbers
from headmix_vision.data.center_crop import center_crop
from headmix_vision.data.data_module import DataModule
from headmix_vision.data.datasets.base import RawImage, SplitRequest, Transform
from headmix_vision.errors import InputError


class GenerationData(DataModule):
    """Images in [-1, 1] or scaled latents, with class labels, for training a generator.

    Channels and size come from the network, the attribute `net` of the LightningModule. Batches are (x float32
    [B, C, H, W], labels int64 [B]).

    Training data are a function of `seed` and of the number of batches trained so far, whatever the number of
    processes and workers; see `DataModule`.

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

    use = "generation"

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
        check_numbers(0, 1, hflip=hflip)
        super().__init__(
            dataset,
            root,
            train_split=train_split,
            val_split=val_split,
            test_split=None,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            max_unreadable=max_unreadable,
        )
        if hflip and not self.entry.has_images:
            raise InputError(f"hflip does not apply to {dataset}: cache_latents has flipped the images or not")
        if canvas_size is not None and not dataset.lower().startswith("canvas"):
            raise InputError(f"canvas_size is {canvas_size}, it must be null for dataset {dataset!r}")
        self.hflip = hflip
        self.canvas_size = canvas_size

    def sample_shape(self, net: Any) -> tuple[int, ...]:
        """(channels, height, width) of the network's input."""
        return (net.in_channels, *net.input_size)

    def train_transform(self) -> Transform:
        """Crop, flip and scale to [-1, 1]."""
        return ImageToRange(self._shape[1:], self.hflip)

    def eval_transform(self) -> Transform:
        """Crop and scale to [-1, 1]."""
        return ImageToRange(self._shape[1:])

    def batch_transform(self, training: bool) -> Transform | None:
        """Scale to [-1, 1], where nothing is flipped."""
        return None if training and self.hflip else to_range

    def request(self, split: str, role: str) -> SplitRequest:
        """As in the base; a canvas may be drawn at another size than the network takes."""
        request = super().request(split, role)
        if self.canvas_size is not None:
            request = replace(request, shape=(self._shape[0], self.canvas_size, self.canvas_size))
        return request

    def setup(self, stage: str) -> None:
        """Open the splits that `stage` (fit or validate) needs, and check them."""
        super().setup(stage)
        if self._model_classes and self.num_classes > self._model_classes:
            raise InputError(
                f"the data have {self.num_classes} classes, the model {self._model_classes}:"
                f" set model.num_classes={self.num_classes}"
            )

    def on_before_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Check the labels while they are on the CPU."""
        labels = batch[1]
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            raise InputError(
                f"labels {int(labels.min())} to {int(labels.max())} in the data, there are {self.num_classes} classes"
            )
        return batch


class ImageToRange:
    """Brings an image to the wanted size, flips it and scales it to [-1, 1].

    Pictures are cropped as ADM does, as in `cache_latents` and `evaluate`. Tensors are resized whole: enlarging keeps
    pixels square and hard when the size is a multiple, so that reducing restores the image.

    Args:
        size: Height and width in pixels.
        hflip: Probability of a horizontal flip.
    """

    def __init__(self, size: tuple[int, ...], hflip: float = 0.0) -> None:
        self.size = size
        self.hflip = hflip

    def __call__(self, image: RawImage) -> Tensor:
        """Float32 [C, H, W] in [-1, 1], of a PIL image or of a float32 tensor [C, h, w] in [0, 1]."""
        if isinstance(image, Tensor):
            x = self._resize(image)
        else:
            height, width = self.size
            x = pil_to_tensor(center_crop(image, (height, width))).float() / 255
        if self.hflip and torch.rand(()) < self.hflip:
            x = x.flip(-1)
        return to_range(x)

    def _resize(self, x: Tensor) -> Tensor:
        if x.shape[1:] == self.size:
            return x
        multiple = all(new % old == 0 for new, old in zip(self.size, x.shape[1:], strict=True))
        mode = "nearest" if multiple else "bilinear"
        return interpolate(x[None], self.size, mode=mode, antialias=mode == "bilinear")[0]


def to_range(pixels: Tensor) -> Tensor:
    """Scale pixels in [0, 1] of any shape to [-1, 1]."""
    return pixels * 2 - 1
