"""Mix batches of stills, clips of one frame, into the batches of clips that a network is trained on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, Sampler

from headmix_vision.data.batches import Collate, SampleKey, TrainBatchSampler
from headmix_vision.data.datasets.base import RawImage, Source
from headmix_vision.data.datasets.derived import Derived
from headmix_vision.errors import InputError, check_numbers


@dataclass(frozen=True)
class StillsConfig:
    """Stills beside the clips of training, in batches of their own.

    Args:
        share: Share of the training batches that are stills.
        dataset: Data set of the stills: images or clips, of all classes or of some. When null, single frames of the
            clips are the stills.
        root: Place of that data set.
        split: Its split.

    Raises:
        InputError: A share that is not in [0, 1), or a data set without a share.
    """

    share: float = 0.0
    dataset: str | None = None
    root: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        check_numbers(0, 1, **{"stills.share": self.share})
        if self.share == 1:
            raise InputError("stills.share is 1, which leaves no clips: it must be below 1")
        if not self.share and (self.dataset is not None or self.root is not None):
            raise InputError("stills.dataset and stills.root need a stills.share above 0")


class ImageStills(Derived):
    """Images as clips that stand still, float32 [C, T, H, W] in [0, 1].

    Args:
        source: The images.
        fit: Brings one to the wanted size, float32 [C, H, W] in [0, 1].
        frames: T, the frames of a patch.
    """

    def __init__(self, source: Source, fit: Callable[[RawImage], Tensor], frames: int = 1) -> None:
        super().__init__(source)
        self.fit, self.frames = fit, frames

    def read(self, index: int) -> tuple[Tensor, int]:
        image, target = self.source.read(index)
        return self.fit(image)[:, None].repeat(1, self.frames, 1, 1), target


class Renumbered(Derived):
    """Samples of some of the classes of other data, with the numbers that these have there.

    Args:
        source: The samples.
        class_names: All classes of the other data.
    """

    def __init__(self, source: Source, class_names: list[str]) -> None:
        super().__init__(source)
        self.numbers = [class_names.index(name) for name in source.class_names]
        self.class_names = class_names

    def read(self, index: int) -> tuple[RawImage, int]:
        image, target = self.source.read(index)
        return image, self.numbers[target]


class MixedBatchSampler(Sampler[list[SampleKey]]):
    """Deal a share of the batches to a second data set, in even distances, for all processes alike.

    Which batches these are follows from their number alone; both data sets are gone through in their own order.

    Args:
        clips: Batches of clips.
        stills: Batches of stills.
        share: Share of the stills.
    """

    def __init__(self, clips: TrainBatchSampler, stills: TrainBatchSampler, share: float) -> None:
        self.clips = clips
        self.stills = stills
        self.share = share

    def __len__(self) -> int:
        return len(self.clips)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return self._stream(self.clips.first_batch())

    def state(self) -> dict[str, float]:
        """Everything that decides which sample comes when."""
        stills = {f"stills.{name}": value for name, value in self.stills.state().items()}
        return {**self.clips.state(), **stills, "stills.share": self.share}

    def _before(self, step: int) -> int:
        """Number of batches of stills before a batch."""
        return int(step * self.share + 1e-9)

    def _stream(self, first: int) -> Iterator[list[SampleKey]]:
        stills = self.stills.from_batch(self._before(first))
        clips = self.clips.from_batch(first - self._before(first))
        for step in range(first, first + len(self)):
            if self._before(step + 1) > self._before(step):
                yield [key._replace(still=True) for key in next(stills)]
            else:
                yield next(clips)


class MixedSamples(Dataset[tuple[Tensor, Tensor]]):
    """Whole batches, of clips or of stills.

    Args:
        clips: Samples or batches of clips.
        stills: Those of stills.
    """

    def __init__(self, clips: Dataset[Any], stills: Dataset[Any]) -> None:
        self.parts = (clips, stills)

    def __getitems__(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor]:
        """Samples float32 [B, C, T, H, W] and targets int64 [B] of a batch of one kind."""
        part: Any = self.parts[keys[0].still]
        if hasattr(part, "__getitems__"):
            return part.__getitems__(keys)
        return Collate(())([part[key] for key in keys])  # prepared ones, which are made one by one
