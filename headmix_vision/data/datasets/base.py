"""The contract of data sets: a line of their table, the request for a split, and the sources that answer it.

C channels, * the axes of a sample's grid: height and width of an image, frames, height and width of a clip.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor

from headmix_vision.data.clip_frames import DEFAULT_CLIP, ClipConfig
from headmix_vision.data.labels import LabelRule
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import Decoding

RawImage = Image.Image | Tensor
"""A PIL image of the wanted mode, or a float32 tensor [C, *grid] with values in [0, 1]."""

Transform = Callable[[Any], Tensor]
"""From what a source reads to what the network takes."""

Use = Literal["classification", "generation", "scoring", "caching"]
"""Who reads a data set: training of classifiers or of generators, `evaluate`, or `cache_latents`."""

PIL_MODES = {1: "L", 3: "RGB"}
CHANNELS = {mode: channels for channels, mode in PIL_MODES.items()}
_STAT_THREADS = 16
EVAL_SYNONYMS = ("validation", "val", "valid", "eval", "evaluation")
TRAIN_SYNONYMS = ("train", "training")


class AbsentSplitError(InputError):
    """A data set lacks a split."""


@dataclass(frozen=True)
class DatasetEntry:
    """One line of the table of data sets: how to open a kind of data set, and what holds for it before it is open.

    Args:
        opener: `MODULE:FUNCTION`, relative to this package when MODULE begins with a dot. The function takes a
            `SplitRequest` and returns a `Source`, or a `Stream` if `is_stream`.
        names: How the data set is written. `kind/NAME` takes any name after the slash, `kind/` a name or none; the
            kind alone when empty.
        uses: Who may read it.
        exact: Samples are float tensors whose every pixel counts, not pictures: evaluation does not crop them, and
            policies that need PIL images do not apply.
        has_images: Samples are images or clips of pixels, to which the options of images apply.
        grid_axes: How many axes the grid of a sample may have: 2 of images, 3 of clips.
        can_flip: A mirrored sample keeps its class; false where the class says left or right.
        is_stream: Samples come in an order of their own, shuffled in a buffer.
        package: A package that must be installed, and the command that installs it.
        scored_split: The split that is scored when none is named.
        takes_root: Samples lie at a place that the user names; false where the package or another one carries them.
    """

    opener: str
    names: tuple[str, ...] = ()
    uses: tuple[Use, ...] = get_args(Use)
    exact: bool = False
    has_images: bool = True
    grid_axes: tuple[int, ...] = (2,)
    can_flip: bool = True
    is_stream: bool = False
    package: tuple[str, str] | None = None
    scored_split: str = "validation"
    takes_root: bool = True

    @property
    def is_clips(self) -> bool:
        """Whether all samples are clips."""
        return self.grid_axes == (3,)


@dataclass(frozen=True)
class SplitRequest:
    """A request for one split of a data set.

    Args:
        name: The data set as the user writes it, for example `canvas/opposite`.
        split: Name of the split.
        shape: (C, *grid) of the samples that the network takes; (C,) where any size will do.
        use: Who asks.
        root: Place of the data.
        num_classes: Number of classes of the model, for data that know none themselves.
        clip: Which frames of a video make a clip.
        background: Colour behind transparent pixels.
        needs_labels: Whether every sample needs a valid label; where not, one without has class 0.
        skip_unlabelled: Leave samples without a valid label out, and count them, instead of refusing them.
        seed: Seed of what is drawn anew in every epoch, and of shuffled streams.
        train_split: Name of the training split: the one that a place without splits holds.
        training: Whether the split is trained on. This and the next two are for streams.
        batch_size: Samples of a batch.
        rank: The process that reads.
        prompt_dropout: Of a network that takes prompts, the share of them that are left out; None of one that takes
            labels.
    """

    name: str
    split: str
    shape: tuple[int, ...]
    use: Use
    root: str | None = None
    num_classes: int = 0
    clip: ClipConfig = DEFAULT_CLIP
    background: str = "white"
    needs_labels: bool = True
    skip_unlabelled: bool = False
    seed: int = 0
    train_split: str = "train"
    training: bool = False
    batch_size: int = 1
    rank: int = 0
    prompt_dropout: float | None = None

    @property
    def variant(self) -> str:
        """The part of the name behind the slash."""
        return self.name.partition("/")[2]

    @property
    def channels(self) -> int:
        """C, the number of channels."""
        return self.shape[0]

    @property
    def grid(self) -> tuple[int, ...]:
        """Height and width of an image, frames, height and width of a clip; empty where any size will do."""
        return self.shape[1:]

    @property
    def decoding(self) -> Decoding:
        """The pixels that pictures become, with the wanted channels.

        Raises:
            InputError: Pictures do not have so many channels.
        """
        if self.channels not in PIL_MODES:
            raise InputError(
                f"the network takes {self.channels} channels, images have 1 or 3: cache latents and set dataset=latents"
            )
        return Decoding(PIL_MODES[self.channels], self.background)

    @property
    def label_rule(self) -> LabelRule:
        """Treatment of samples without a valid label."""
        return LabelRule(self.needs_labels, self.skip_unlabelled)

    @property
    def numbered_classes(self) -> list[str]:
        """Class names `0`, `1`, ... of the model's classes, at least one."""
        return [str(i) for i in range(max(self.num_classes, 1))]

    def given_root(self) -> str:
        """The place of the data; InputError if it is not given."""
        if self.root is None:
            raise InputError(f"dataset {self.name!r} needs root, the place of the data")
        return self.root

    def existing_root(self) -> Path:
        """The place of the data on this machine; InputError if it is not given or missing."""
        path = Path(self.given_root())
        if not path.exists():
            raise InputError(f"root {self.root!r} does not exist (dataset {self.name!r})")
        return path


class Source(ABC):
    """Random access to the samples of one split."""

    class_names: list[str]
    in_memory = False
    """Whether reading costs nothing, so that loaders need no worker processes."""
    what = "image"
    """Name of a sample in messages."""
    shard_sizes: Sequence[int] | None = None
    """Numbers of samples that lie together in a file, in their order; None where each has a file of its own."""
    bucket_sizes: Sequence[int] | None = None
    """Numbers of samples of one shape, in their order, of which batches are made; None where all have one shape."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> tuple[RawImage, int]:
        """Image and target of one sample. Anything may be raised when an image is damaged."""

    def name(self, index: int) -> str:
        """Name of a sample in messages: its file, where there is one."""
        return f"{type(self).__name__}[{index}]"

    def files(self) -> list[tuple[str, int]] | None:
        """Name, relative to the place of the data, and size in bytes of each sample's file; None without files.

        They tell whether the samples are still the same, wherever they lie.
        """
        return None

    def keys(self) -> list[str] | None:
        """Return what tells all samples apart without reading them: names, labels, hashes; None without any.

        They do not depend on where the data lie.
        """
        return None


class Pictures(Source):
    """Pictures behind a data set or reader of a library, decoded when they are read.

    Args:
        data: The data set or reader.
        class_names: One name per label.
        decoding: The pixels that they become.
    """

    def __init__(self, data: Any, class_names: list[str], decoding: Decoding) -> None:
        self.data = data
        self.class_names = class_names
        self.decoding = decoding

    def __len__(self) -> int:
        return len(self.data)


class Selection(Pictures):
    """Some pictures of a data set or reader of a library, with a label each.

    Args:
        data: The data set or reader.
        kept: Which of its pictures.
        targets: Their labels; None where the data set does not list them.
        class_names: One name per label.
        decoding: The pixels that they become.
    """

    def __init__(
        self,
        data: Any,
        kept: Sequence[int],
        targets: Sequence[int] | None,
        class_names: list[str],
        decoding: Decoding,
    ) -> None:
        super().__init__(data, class_names, decoding)
        self.kept, self.targets = kept, targets

    def __len__(self) -> int:
        return len(self.kept)

    def keys(self) -> list[str] | None:
        """Numbers and labels."""
        if self.targets is None:
            return None
        return [f"{number} {target}" for number, target in zip(self.kept, self.targets, strict=True)]


class BatchSource(Source):
    """A source that reads a batch at once, quicker than sample by sample, and never fails."""

    shape: tuple[int, ...]
    """(C, *grid) of its samples."""

    @abstractmethod
    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images float32 [B, C, *grid] with values in [0, 1], and targets int64 [B]."""

    def read(self, index: int) -> tuple[Tensor, int]:
        """Image float32 [C, *grid] with values in [0, 1], and target."""
        images, targets = self.read_batch([index])
        return images[0], int(targets[0])


class ClipSource(Source):
    """A source of longer videos, of which a sample is a part."""

    what = "video"

    def read(self, index: int) -> tuple[Tensor, int]:
        """The clip in the middle of a video, float32 [C, T, H, W] in [0, 1], and target."""
        return self.read_part(index, 0.5)

    @abstractmethod
    def read_part(self, index: int, place: float) -> tuple[Tensor, int]:
        """The clip that begins at a place between 0 and 1 of those at which it can; see `read`."""

    @abstractmethod
    def leave_out_unusable(self) -> list[str]:
        """Leave out the videos of which no clip can be made, which is found without decoding; name them and why."""


class PreparedSource(Source):
    """A source whose samples are already what the network takes, and may be drawn anew in every epoch."""

    @abstractmethod
    def read(self, index: int, draw: int = 0) -> tuple[Tensor, int]:
        """Sample float32 [C, *grid] and label; another `draw` (epoch) may be another sample."""


def canonical_split(split: str) -> str:
    """The name `train` or `validation` of a built-in data set's split, from any of timm's synonyms."""
    if split in TRAIN_SYNONYMS:
        return "train"
    if split in EVAL_SYNONYMS:
        return "validation"
    raise InputError(f"split {split!r} does not exist, the data set has train and validation")


def relative_sizes(paths: Sequence[Path], folder: str | Path) -> list[tuple[str, int]]:
    """Names of files relative to a folder, and their sizes in bytes; many at a time, for the sake of network disks."""
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        sizes = list(pool.map(os.path.getsize, paths))
    return [(os.path.relpath(path, folder), size) for path, size in zip(paths, sizes, strict=True)]


def to_picture(image: RawImage) -> Image.Image:
    """An 8-bit PIL image of what a source reads."""
    if isinstance(image, Image.Image):
        return image
    pixels = (image * 255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous().numpy())
