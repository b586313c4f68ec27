"""The clips to score and which of their frames: videos, folders of frames, npz files, data sets.

T frames, H and W pixels. A clip is a list of PIL images, as `ImageSet` takes it.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import groupby, repeat
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from PIL import Image, ImageOps
from torch import Tensor

from headmix_vision.checks import check_counts, check_positive
from headmix_vision.console.notes import say_left_out
from headmix_vision.data.clip_frames import DEFAULT_CLIP, ClipConfig
from headmix_vision.data.datasets.base import (
    CHANNELS,
    BatchSource,
    Source,
    to_picture,
)
from headmix_vision.data.labels import LabelRule
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError
from headmix_vision.evaluation.npz import NpzImages, npz_arrays, npz_labels
from headmix_vision.evaluation.sample_sets import (
    DECODER_THREADS,
    SAMPLES,
    SAMPLES_METADATA,
    UNLABELLED,
    ImageSet,
    describe_size,
    open_slice,
    samples_of,
)
from headmix_vision.files.clip_files import ClipInfo, Frames, probe_clip, read_clip
from headmix_vision.files.listing import find_clips
from headmix_vision.files.pictures import Decoding, readable
from headmix_vision.files.png import Item
from headmix_vision.files.texts import read_json

_CHOICE, _OFFSET = 0, 1  # what random numbers are for


@dataclass(frozen=True)
class ClipSampling:
    """Which clips of a place are scored, and which of their frames.

    Args:
        frames: Frames of a scored clip; all when None, for clips that have equally many.
        stride: Every so manieth frame is taken.
        offset: `first`: from the first frame on; `random`: from any that leaves enough, by (seed, number of the clip).
        count: At most so many clips; all when None.
        choice: `first`: the first ones by name; `random`: any, by the seed.
        mirror: Score each clip a second time, mirrored.
        skip_short: Leave out clips of fewer than `frames` x `stride` frames, and count them; otherwise an error.
        seed: Of what is random.

    Raises:
        InputError: A number below 1.
    """

    frames: int | None = 16
    stride: int = 1
    offset: Literal["first", "random"] = "first"
    count: int | None = None
    choice: Literal["first", "random"] = "first"
    mirror: bool = False
    skip_short: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {"frames": self.frames, "stride": self.stride, "count": self.count}
        check_counts(1, **{name: value for name, value in counts.items() if value is not None})

    @property
    def needed(self) -> int:
        """Frames that a clip must have; StyleGAN-V leaves out those with fewer."""
        assert self.frames is not None
        return self.frames * self.stride

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """Chooses among clips, in rising order."""
        if self.count is None or len(numbers) <= self.count:
            return list(numbers)
        if self.choice == "first":
            return list(numbers[: self.count])
        return sorted(random.Random(derive_seed(self.seed, _CHOICE)).sample(list(numbers), self.count))

    def indices(self, number: int, num_frames: int) -> range:
        """Numbers the frames of a clip that are scored."""
        free = num_frames - self.needed + self.stride
        start = 0 if self.offset == "first" else random.Random(derive_seed(self.seed, _OFFSET, number)).randrange(free)
        return range(start, start + self.needed, self.stride)


class Clips(ABC):
    """Clips behind a name that a user gives.

    Attributes:
        source: The name.
        kind: `folder`, `npz` or `dataset`.
        infos: What is known of each clip.
        about: What else the result file says.
    """

    source: str
    kind: str
    infos: list[ClipInfo]
    about: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def name(self, number: int) -> str:
        """What to call a clip in a message."""

    @abstractmethod
    def read(self, wanted: Mapping[int, range]) -> Iterator[tuple[str, Frames]]:
        """Reads frames of clips, by the numbers of the clips in rising order; yields names and frames."""

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """Reads the labels of clips, int64 [number of clips]; InputError where there are none."""
        raise InputError(f"{self.source} has no labels: it is no folder of samples with metadata.json and no npz file")


class SampledClips:
    """Yields the chosen frames of the chosen clips: pictures for an `ImageSet`.

    Raises:
        InputError: Clips that are too short, unless they are to be skipped, or none that is long enough; clips of
            several lengths where all frames are taken.
    """

    def __init__(self, clips: Clips, sampling: ClipSampling) -> None:
        if sampling.frames is None:
            sampling = replace(sampling, frames=_length(clips))
        self.clips, self.sampling = clips, sampling
        self.source, self.kind, self.about = clips.source, clips.kind, dict(clips.about)
        long_enough = [n for n, info in enumerate(clips.infos) if info.num_frames >= sampling.needed]
        self.skipped = len(clips.infos) - len(long_enough)
        if self.skipped and (not sampling.skip_short or not long_enough):
            first = next(n for n, info in enumerate(clips.infos) if info.num_frames < sampling.needed)
            stride = f" at stride {sampling.stride}" if sampling.stride > 1 else ""
            raise InputError(
                f"{clips.name(first)} has {clips.infos[first].num_frames} frames, {sampling.frames}{stride} need"
                f" {sampling.needed}; {self.skipped} of {len(clips.infos)} clips are too short"
                + ("" if sampling.skip_short else ": --skip-short leaves them out")
            )
        self.chosen = sampling.choose(long_enough)

    @property
    def copies(self) -> int:
        """How often a clip is there, one copy after the other: twice where it is mirrored too."""
        return 1 + self.sampling.mirror

    def __len__(self) -> int:
        return len(self.chosen) * self.copies

    def read(self, indices: Sequence[int]) -> Iterator[tuple[str, Item]]:
        infos, copies = self.clips.infos, self.copies
        asked = [(self.chosen[clip], list(places)) for clip, places in groupby(indices, lambda place: place // copies)]
        wanted = {number: self.sampling.indices(number, infos[number].num_frames) for number, _ in asked}
        for (name, frames), (_, places) in zip(self.clips.read(wanted), asked, strict=True):
            for place in places:
                mirrored = place % copies == 1
                yield (
                    f"{name}, mirrored" if mirrored else name,
                    [ImageOps.mirror(frame) if mirrored else frame for frame in frames],
                )

    def description(self) -> dict[str, Any]:
        """Says which clips and frames they are, for the result file."""
        settings = {key: value for key, value in asdict(self.sampling).items() if key not in ("count", "skip_short")}
        infos = [self.clips.infos[number] for number in self.chosen]
        rates = sorted({info.frame_rate / self.sampling.stride for info in infos if info.frame_rate is not None})
        return {
            **settings,
            "available": len(self.clips.infos),
            "skipped_short": self.skipped,
            "frames_of_files": [min(info.num_frames for info in infos), max(info.num_frames for info in infos)],
            "frame_rate": [rates[0], rates[-1]] if rates else None,
        }


class ClipSet(ImageSet):
    """Puts clips of one size into batches.

    Args:
        pictures: The clips.
        mode: `L` or `RGB`: what the feature extractor takes.
        image_size: As in `ImageSet`.

    Raises:
        InputError: Fewer than two clips, clips of several sizes without `image_size`, or an unreadable first one.
    """

    def __init__(self, pictures: SampledClips, mode: str, image_size: int | None = None) -> None:
        infos = pictures.clips.infos
        for number in pictures.chosen if image_size is None else ():
            first = pictures.chosen[0]
            if infos[number].size != infos[first].size:
                raise InputError(
                    f"{pictures.clips.name(number)} is {describe_size(infos[number].size)}, the clips before it are"
                    f" {describe_size(infos[first].size, unit='')}; --image-size N brings all to one size"
                )
        super().__init__(pictures, mode, image_size)
        self.clips = pictures

    @property
    def description(self) -> dict[str, Any]:
        """Everything that the result file says about the clips."""
        return {**super().description, **self.clips.description()}


class FolderClips(Clips):
    """Clips below a folder: videos, animated PNGs, and folders of frames, which are one clip each, sorted by name."""

    kind = "folder"

    def __init__(self, path: Path, decoding: Decoding) -> None:
        self.source, self.decoding = str(path), decoding
        listing = find_clips(path)
        say_left_out(path, len(listing.paths), "clips", listing.left_out)
        self.paths = sorted(listing.paths)
        self.about = {"background": decoding.background, "left_out": dict(listing.left_out)}
        with ThreadPoolExecutor(DECODER_THREADS) as pool:
            self.infos = list(pool.map(probe_clip, self.paths))
        metadata = path.parent / SAMPLES_METADATA
        self.metadata = metadata if path.name == SAMPLES and metadata.is_file() else None
        rate = self._setting("clips", "frame_rate")
        if rate is not None:  # their PNGs do not state it
            check_positive(**{f"the frame rate of {self.source}": rate})
            self.infos = [replace(info, frame_rate=rate) for info in self.infos]

    def name(self, number: int) -> str:
        return str(self.paths[number])

    def read(self, wanted: Mapping[int, range]) -> Iterator[tuple[str, Frames]]:
        numbers = list(wanted)
        with ThreadPoolExecutor(DECODER_THREADS) as pool:
            for start in range(0, len(numbers), DECODER_THREADS):
                some = numbers[start : start + DECODER_THREADS]
                paths, indices = [self.paths[n] for n in some], [wanted[n] for n in some]
                clips = pool.map(read_clip, paths, indices, repeat(self.decoding))
                yield from zip(map(str, paths), clips, strict=True)

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """The classes of a folder of samples, which take turns."""
        if self.metadata is None:
            return super().labels(numbers)
        classes = self._setting("classes")
        try:
            return torch.tensor([classes[int(self.paths[n].stem) % len(classes)] for n in numbers], dtype=torch.int64)
        except (ValueError, TypeError, ZeroDivisionError):
            raise InputError(f"{self.metadata} does not tell the classes of the samples") from None

    def _setting(self, *names: str) -> Any:
        """Reads a setting from the metadata of samples; None where they do not tell it, and of another folder."""
        if self.metadata is None:
            return None
        try:
            return reduce(getitem, names, read_json(self.metadata)["settings"])
        except (KeyError, TypeError):
            return None


class NpzClips(Clips):
    """Clips of an npz file, `arr_0` uint8 [N, T, H, W, C], read one after the other."""

    kind = "npz"

    def __init__(self, path: Path) -> None:
        self.pictures = NpzImages(path)
        self.source = self.pictures.source
        if len(self.pictures.shape) != 5:
            raise InputError(f"{path} holds images {list(self.pictures.shape)}, clips are [N, T, H, W, C]")
        length, frames, height, width, _ = self.pictures.shape
        self.infos = [ClipInfo(frames, (height, width))] * length

    def name(self, number: int) -> str:
        return f"{self.source}[{number}]"

    def read(self, wanted: Mapping[int, range]) -> Iterator[tuple[str, Frames]]:
        for (name, item), indices in zip(self.pictures.read(list(wanted)), wanted.values(), strict=True):
            assert isinstance(item, list)
            yield name, [item[index] for index in indices]

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """The array `labels` or `arr_1`."""
        return npz_labels(Path(self.source))[list(numbers)]


class DatasetClips(Clips):
    """Clips of a data set by its name, of a length that was asked for, all of a split or a slice of it."""

    kind = "dataset"

    def __init__(
        self, name: str, source: Source, indices: slice, frames: int, size: tuple[int, int], background: str
    ) -> None:
        self.source, self.data, self.about = name, source, {"background": background}
        self.numbers = range(len(source))[indices]
        self.infos = [ClipInfo(frames, size, getattr(source, "frame_rate", None))] * len(self.numbers)

    def name(self, number: int) -> str:
        return self.data.name(self.numbers[number])

    def read(self, wanted: Mapping[int, range]) -> Iterator[tuple[str, Frames]]:
        for number, indices in wanted.items():
            name = self.name(number)
            with readable(name):
                clip, _ = self.data.read(self.numbers[number])
                if isinstance(clip, Image.Image) or clip.ndim != 4:
                    raise ValueError("it is an image, not a clip")
            yield name, [to_picture(clip[:, index]) for index in indices]

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """The targets of the data set."""
        return torch.tensor([self.data.read(self.numbers[number])[1] for number in numbers], dtype=torch.int64)


def open_clips(
    source: str,
    mode: str,
    sampling: ClipSampling,
    image_size: int | None = None,
    root: str | None = None,
    grid: tuple[int, int] | None = None,
    clip: ClipConfig = DEFAULT_CLIP,
    background: str = "white",
    labels: LabelRule = UNLABELLED,
) -> ClipSet:
    """Opens clips for scoring.

    Args:
        source: A folder of videos, of animated PNGs or of folders of frames, by class or not, also one of samples with
            their `images/` and `metadata.json`; an `.npz` file with uint8 clips [N, T, H, W, C]; or a data set of clips
            `NAME[:SPLIT][SLICE]`, such as `moving_digits`, whose clips get the length that the sampling needs.
        mode: `L` or `RGB`.
        sampling: Which clips and which of their frames.
        image_size: As in `ImageSet`.
        root: Place of a data set that needs one.
        grid: H and W to ask a data set for, where `image_size` does not say; its own when None.
        clip: Which frames of its videos make the clips of a data set.
        background: Colour behind transparent pixels.
        labels: What is done with clips of a data set that have no valid label.

    Raises:
        InputError: Nothing there, no clips, a file that cannot be read, clips that are too short or of several sizes.
    """
    path = samples_of(source, "clips")
    if path.is_dir():
        clips: Clips = FolderClips(path, Decoding(mode, background))
    elif path.is_file():
        if path.suffix != ".npz" or "arr_0" not in npz_arrays(path):
            raise InputError(f"{source} is a file, clips come from a folder, an .npz file with arr_0 or a data set")
        clips = NpzClips(path)
    else:
        grid = (image_size, image_size) if image_size else grid
        clips = _open_dataset(source, mode, sampling, grid, root, clip, background, labels)
    if not clips.infos:
        raise InputError(f"{source} has no clips: no videos, no animated PNGs and no folders of frames")
    return ClipSet(SampledClips(clips, sampling), mode, image_size)


def _open_dataset(
    source: str,
    mode: str,
    sampling: ClipSampling,
    grid: tuple[int, int] | None,
    root: str | None,
    clip: ClipConfig,
    background: str,
    labels: LabelRule,
) -> DatasetClips:
    channels = CHANNELS[mode]
    frames = None if sampling.frames is None else sampling.needed
    if grid is None or frames is None:
        own = open_slice(source, (channels,), root)[0]
        if not isinstance(own, BatchSource) or len(own.shape) != 4:
            raise InputError(f"{source}: --image-size must say how large its clips shall be")
        _, length, height, width = own.shape
        grid, frames = grid or (height, width), frames or length
    opened = open_slice(source, (channels, frames, *grid), root, clip, background, labels)
    return DatasetClips(source, *opened, frames, grid, background)


def _length(clips: Clips) -> int:
    """The frames of clips that have equally many."""
    length = clips.infos[0].num_frames
    other = next((number for number, info in enumerate(clips.infos) if info.num_frames != length), None)
    if other is not None:
        raise InputError(
            f"{clips.name(other)} has {clips.infos[other].num_frames} frames, the clips before it have {length}"
        )
    return length
