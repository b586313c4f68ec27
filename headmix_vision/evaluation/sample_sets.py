"""Samples to score, in batches of one size: pictures, or the chosen frames of the chosen clips.

B samples of a batch, C channels (1 or 3), *grid H and W pixels of images, or T frames, H and W of clips. Pixels are
uint8 throughout, as files hold them.
"""

import itertools
import math
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import ImageOps
from torch import Tensor

from headmix_vision.data.batches import deal_batches
from headmix_vision.data.clip_frames import DEFAULT_CLIP, ClipConfig
from headmix_vision.data.datasets import find_dataset, open_source
from headmix_vision.data.datasets.base import CHANNELS, BatchSource, Source, SplitRequest
from headmix_vision.data.fitting import center_crop
from headmix_vision.data.labels import LabelRule
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError, check_counts
from headmix_vision.evaluation.sample_sources import (
    DECODER_THREADS,
    SAMPLES,
    SAMPLES_METADATA,
    DatasetSamples,
    Folder,
    NpzSamples,
    Samples,
    npz_arrays,
)
from headmix_vision.files.pictures import Decoding, Item, is_hidden, is_picture, is_whole_png
from headmix_vision.files.reading import check_memory, read_json
from headmix_vision.files.video import ClipInfo

_CHOICE, _OFFSET = 0, 1  # what random numbers are for
_SAMPLE_BYTES = 16  # of a pixel, as bytes and as the numbers that features are computed of
UNLABELLED = LabelRule(needed=False)
"""Rule of scores that take no labels."""
_DATASET = re.compile(r"(?P<name>[^:\[\]]+)(:(?P<split>[^\[\]]+))?(\[(?P<slice>[-\d:]+)\])?")
_PARTS = (SAMPLES, "videos", "frames", "samples.npz")


@dataclass(frozen=True)
class ClipSampling:
    """Which clips of a place are scored, and which of their frames.

    Args:
        frames: Frames of a scored clip; all when None, for clips that have equally many.
        stride: Take every `stride`-th frame.
        offset: `first`: from the first frame on; `random`: from any that leaves enough, by (seed, number of the clip).
        count: At most so many clips; all when None.
        choice: `first`: the first ones by name; `random`: any, by the seed.
        mirror: Score each clip a second time, mirrored.
        skip_short: Leave out clips of fewer than `frames` x `stride` frames, and count them; otherwise an error.
        seed: Seed of the random choices.

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
        """Choose among clips, in rising order."""
        if self.count is None or len(numbers) <= self.count:
            return list(numbers)
        if self.choice == "first":
            return list(numbers[: self.count])
        return sorted(random.Random(derive_seed(self.seed, _CHOICE)).sample(list(numbers), self.count))

    def indices(self, number: int, num_frames: int) -> range:
        """Return the numbers of the frames of a clip that are scored."""
        free = num_frames - self.needed + self.stride
        start = 0 if self.offset == "first" else random.Random(derive_seed(self.seed, _OFFSET, number)).randrange(free)
        return range(start, start + self.needed, self.stride)


class SampleSet:
    """Images of one size, or clips of one size and length, in batches.

    Args:
        samples: Where they come from.
        mode: `L` or `RGB`: what the feature extractor takes.
        image_size: Scale and centre-crop every image or frame to a square of this many pixels, as ADM does; None takes
            them as they are.
        sampling: Which clips, and which of their frames; None takes all samples whole.

    Attributes:
        chosen: Numbers of the samples that are scored.
        size: H and W of images, or T, H and W of clips.

    Raises:
        InputError: Fewer than two samples, or an unreadable first one; clips that are too short, unless they are to be
            skipped, or of several sizes without `image_size`, or of several lengths where all frames are taken.
    """

    def __init__(
        self, samples: Samples, mode: str, image_size: int | None = None, sampling: ClipSampling | None = None
    ) -> None:
        if image_size is not None:
            check_counts(1, **{"image size": image_size})
        self.samples, self.mode, self.image_size = samples, mode, image_size
        self.sampling, self.copies, self.skipped_short = sampling, 1, 0
        self.chosen: Sequence[int] = range(len(samples))
        if sampling is not None:
            self._choose(sampling)
        if len(self) < 2:
            raise InputError(f"at least 2 samples are needed, {samples.source} has {len(self)}")
        if image_size is not None:
            check_memory(_SAMPLE_BYTES * image_size**2, f"an image of {image_size} pixels")
        self.size = self._size(next(self.read([0]))[1])

    def _choose(self, sampling: ClipSampling) -> None:
        """Choose the clips to score, and refuse clips of several sizes."""
        if sampling.frames is None:
            sampling = replace(sampling, frames=self._length())
        self.sampling, infos = sampling, self._infos
        self.copies = 1 + sampling.mirror  # one after the other
        long_enough = [n for n, info in enumerate(infos) if info.num_frames >= sampling.needed]
        self.skipped_short = len(infos) - len(long_enough)
        if self.skipped_short and (not sampling.skip_short or not long_enough):
            first = next(n for n, info in enumerate(infos) if info.num_frames < sampling.needed)
            stride = f" at stride {sampling.stride}" if sampling.stride > 1 else ""
            raise InputError(
                f"{self.samples.name(first)} has {infos[first].num_frames} frames, {sampling.frames}{stride} need"
                f" {sampling.needed}; {self.skipped_short} of {len(infos)} clips are too short"
                + ("" if sampling.skip_short else ": --skip-short leaves them out")
            )
        self.chosen = sampling.choose(long_enough)
        for number in self.chosen if self.image_size is None else ():
            first_size, size = infos[self.chosen[0]].size, infos[number].size
            if size != first_size:
                raise InputError(
                    f"{self.samples.name(number)} is {describe_size(size)}, the clips before it are"
                    f" {describe_size(first_size, unit='')}; --image-size N brings all to one size"
                )

    @property
    def _infos(self) -> list[ClipInfo]:
        assert self.samples.infos is not None
        return self.samples.infos

    def _length(self) -> int:
        """Return the frames of clips that have equally many."""
        lengths = [info.num_frames for info in self._infos]
        other = next((number for number, length in enumerate(lengths) if length != lengths[0]), None)
        if other is not None:
            raise InputError(
                f"{self.samples.name(other)} has {lengths[other]} frames, the clips before it have {lengths[0]}"
            )
        return lengths[0]

    def _size(self, item: Item) -> tuple[int, ...]:
        frames = item if isinstance(item, list) else [item]
        size = (self.image_size,) * 2 if self.image_size else (frames[0].height, frames[0].width)
        return (len(frames), *size) if isinstance(item, list) else size

    def __len__(self) -> int:
        return len(self.chosen) * self.copies

    def read(self, indices: Sequence[int]) -> Iterator[tuple[str, Item]]:
        """Yield names for messages and samples as they are, by their places in the set, in rising order."""
        asked = [
            (self.chosen[place], list(places))
            for place, places in itertools.groupby(indices, lambda index: index // self.copies)
        ]
        frames = {number: self._frames(number) for number, _ in asked}
        for (name, item), (_, places) in zip(self.samples.read(frames), asked, strict=True):
            for place in places:
                if place % self.copies and isinstance(item, list):
                    yield f"{name}, mirrored", [ImageOps.mirror(frame) for frame in item]
                else:
                    yield name, item

    def _frames(self, number: int) -> range | None:
        return None if self.sampling is None else self.sampling.indices(number, self._infos[number].num_frames)

    def labels(self) -> Tensor:
        """Read the labels of the samples, int64 [N], a mirrored clip once; InputError where there are none."""
        return self.samples.labels(self.chosen)

    @property
    def description(self) -> dict[str, Any]:
        """Everything that the result file says about the samples."""
        about = {
            "source": self.samples.source,
            "kind": self.samples.kind,
            "count": len(self),
            "size": list(self.size),
            "crop": "adm_center" if self.image_size else None,
            **self.samples.about,
        }
        if self.sampling is None:
            return about
        settings = {key: value for key, value in asdict(self.sampling).items() if key not in ("count", "skip_short")}
        infos = [self._infos[number] for number in self.chosen]
        rates = sorted({info.frame_rate / self.sampling.stride for info in infos if info.frame_rate is not None})
        return {
            **about,
            **settings,
            "available": len(self._infos),
            "skipped_short": self.skipped_short,
            "frames_of_files": [min(info.num_frames for info in infos), max(info.num_frames for info in infos)],
            "frame_rate": [rates[0], rates[-1]] if rates else None,
        }

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Tensor]:
        """Yield all samples in order, or the batches of one of several processes, uint8 [B, C, *grid].

        Raises:
            InputError: A sample that cannot be read or is of another size; it is named.
        """
        count = min(batch_size, len(self))
        check_memory(_SAMPLE_BYTES * count * math.prod(self.size), f"a batch of {count} of {describe_size(self.size)}")
        shares = deal_batches(range(len(self)), batch_size, rank, world_size)
        arrays = self._arrays(list(itertools.chain.from_iterable(shares)))
        for share in shares:
            yield torch.from_numpy(np.stack(list(itertools.islice(arrays, len(share)))))

    def _arrays(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        for name, item in self.read(indices):
            # First the mode, as in training and in latents: a palette cannot be interpolated.
            frames = [frame.convert(self.mode) for frame in (item if isinstance(item, list) else [item])]
            if self.image_size:
                frames = [center_crop(frame, self.image_size) for frame in frames]
            if self._size(item) != self.size or len({frame.size for frame in frames}) > 1:
                raise InputError(
                    f"{name} is {describe_size(self._size(item))}, the samples before it are"
                    f" {describe_size(self.size, unit='')}; --image-size N brings all to one size"
                )
            pixels = np.stack([np.asarray(frame) for frame in frames])
            pixels = pixels[None] if pixels.ndim == 3 else pixels.transpose(3, 0, 1, 2)
            yield pixels if isinstance(item, list) else pixels[:, 0]


def describe_size(size: Sequence[int], unit: str = " pixels") -> str:
    """Return a size (H, W) or (T, H, W) as people do: `32x16 pixels`, `8 frames of 32x16 pixels`."""
    *frames, height, width = size
    return "".join(f"{count} frames of " for count in frames) + f"{width}x{height}{unit}"


def open_samples(
    source: str,
    mode: str,
    image_size: int | None = None,
    root: str | None = None,
    background: str = "white",
    labels: LabelRule = UNLABELLED,
    *,
    sampling: ClipSampling | None = None,
    grid: tuple[int, int] | None = None,
    clip: ClipConfig = DEFAULT_CLIP,
) -> SampleSet:
    """Open images or clips for scoring.

    Args:
        source: A folder, also one of samples with their `images/` and `metadata.json`; an `.npz` file with uint8 images
            [N, H, W, C] or clips [N, T, H, W, C]; or a data set `NAME[:SPLIT][SLICE]`: `digits`, `canvas:train` (64
            pixels unless `image_size` says otherwise), `folder:validation`, `hfds/NAME:train`, `digits[::2]` for every
            other image. Without a split, digits are all of them and other data sets their validation split. A folder
            of clips holds videos, animated PNGs or folders of frames, by class or not.
        mode: `L` or `RGB`.
        image_size: As in `SampleSet`.
        root: Place of a data set that needs one.
        background: Colour behind transparent pixels.
        labels: What is done with samples of a data set that have no valid label.
        sampling: Which clips and which of their frames. Clips of a data set get the length that it needs. Images, and
            clips that are taken whole, when None.
        grid: H and W to ask a data set for, where `image_size` does not say; its own when None.
        clip: Which frames of its videos make the clips of a data set.

    Raises:
        InputError: Nothing there, no samples, or fewer than a slice asks for; a file that cannot be read; see
            `SampleSet`.
    """
    what = "images" if sampling is None else "clips"
    path = samples_of(source, what)
    if path.is_dir():
        samples: Samples = Folder(path, Decoding(mode, background), sampling is not None)
    elif path.is_file():
        if path.suffix != ".npz":
            raise InputError(f"{source} is a file, {what} come from a folder, an .npz file or a data set")
        if "arr_0" not in npz_arrays(path):
            raise InputError(f"{source} has no {what} arr_0, it has {', '.join(npz_arrays(path))}")
        samples = NpzSamples(path)
        if sampling is not None and samples.infos is None:
            raise InputError(f"{path} holds images {list(samples.shape)}, clips are [N, T, H, W, C]")
    else:
        grid = (image_size, image_size) if image_size else grid
        size = None if sampling is None else _clip_size(source, mode, sampling, grid, root)
        opened = open_slice(source, (CHANNELS[mode], *(size or grid or ())), root, clip, background, labels)
        samples = DatasetSamples(source, *opened, background, size)
    if sampling is not None and not samples.infos:
        raise InputError(f"{source} has no clips: no videos, no animated PNGs and no folders of frames")
    return SampleSet(samples, mode, image_size, sampling)


def _clip_size(
    source: str, mode: str, sampling: ClipSampling, grid: tuple[int, int] | None, root: str | None
) -> tuple[int, int, int]:
    """Return T, H and W of the clips of a data set: as asked for, or its own."""
    frames = None if sampling.frames is None else sampling.needed
    if grid is None or frames is None:
        own = open_slice(source, (CHANNELS[mode],), root)[0]
        if not isinstance(own, BatchSource) or len(own.shape) != 4:
            raise InputError(f"{source}: --image-size must say how large its clips shall be")
        _, length, height, width = own.shape
        grid, frames = grid or (height, width), frames or length
    return frames, *grid


def samples_of(source: str, what: str) -> Path:
    """Find the path of samples: of a folder of samples that `headmix sample` wrote, what lies in its `images/`.

    Raises:
        InputError: An empty name of what is asked for.
    """
    if not source:
        raise InputError(f"the {what} are '', they must be a folder, an .npz file or a data set")
    path = Path(source)
    # without the grid beside it
    return path / SAMPLES if (path / SAMPLES).is_dir() and (path / SAMPLES_METADATA).is_file() else path


def check_side_options(root: str | None, background: str, *sources: str) -> None:
    """Raise InputError for the place of a data set, or the background of pictures, where no side has one."""
    names = [match["name"] for one in sources if not Path(one).exists() and (match := _DATASET.fullmatch(one))]
    has_place = any(find_dataset(name, "scoring").takes_root for name in names)
    if root is not None and not has_place:
        raise InputError(f"--root is {root}, but no side is a data set that lies at a place: leave --root out")
    if background != "white" and not has_place and not any(Path(one).is_dir() for one in sources):
        raise InputError(f"--background is {background}, but no side is read from pictures: leave --background out")


def open_slice(
    source: str,
    shape: tuple[int, ...],
    root: str | None,
    clip: ClipConfig = DEFAULT_CLIP,
    background: str = "white",
    labels: LabelRule = UNLABELLED,
) -> tuple[Source, slice]:
    """Open a data set to score, `NAME[:SPLIT][SLICE]`: its split, and which of its samples are meant.

    Args:
        source: The data set.
        shape: (C, *grid) of its samples; (C,) where any size will do.
        root: Place of a data set that needs one.
        clip: Which frames of a video make a clip.
        background: Colour behind transparent pixels.
        labels: What is done with samples that have no valid label.

    Raises:
        InputError: No such data set, split or slice.
    """
    match = _DATASET.fullmatch(source)
    if match is None:
        raise InputError(f"{source} is neither a file, nor a folder, nor a data set NAME[:SPLIT][SLICE]")
    name, split = match["name"], match["split"]
    try:
        entry = find_dataset(name, "scoring")
    except InputError as error:
        raise InputError(f"{source} is neither a file, nor a folder, nor a data set to score: {error}") from None
    bounds = _bounds(match["slice"] or ":")
    if bounds is None:
        raise InputError(f"{source}: a slice is written [START:STOP] or [START:STOP:STEP]")
    place, background = (root, background) if entry.takes_root else (None, "white")
    request = SplitRequest(name, split or entry.scored_split, shape, "scoring", place, clip=clip, background=background)
    samples = open_source(replace(request, needs_labels=labels.needed, skip_unlabelled=labels.skip))
    for bound in bounds[:2]:
        if bound is not None and abs(bound) > len(samples):
            raise InputError(f"{source}: there are {len(samples)} images, the slice goes beyond them")
    return samples, slice(*bounds)


def _bounds(text: str) -> list[int | None] | None:
    """Read START:STOP:STEP, of which each may be missing; None if it is not a slice."""
    try:
        bounds = [int(part) if part else None for part in text.split(":")]
    except ValueError:
        return None
    return bounds if 2 <= len(bounds) <= 3 and bounds[2:] != [0] else None


def check_complete(source: str, option: str, incomplete: bool) -> None:
    """Check that a folder of samples is complete, if the source is one or lies in one.

    Args:
        source: Place of the samples.
        option: Name of the option that named it, for messages.
        incomplete: Take a folder with missing samples, with a warning.

    Raises:
        InputError: Samples are missing and `incomplete` is false, or a file is not a whole PNG.
    """
    path = Path(source)
    folder = path.parent if path.name in _PARTS else path
    if not source or not (folder / SAMPLES_METADATA).is_file() or not (folder / SAMPLES).is_dir():
        return
    metadata = read_json(folder / SAMPLES_METADATA)
    if not isinstance(metadata, dict) or "complete" not in metadata:  # a folder of somebody else
        return
    paths = [entry for entry in (folder / SAMPLES).iterdir() if is_picture(entry.name) and not is_hidden(entry.name)]
    with ThreadPoolExecutor(DECODER_THREADS) as pool:
        broken = sorted(entry for entry, whole in zip(paths, pool.map(is_whole_png, paths), strict=True) if not whole)
    if broken:
        raise InputError(
            f"{option} {source} has {len(broken)} files that are not whole PNGs, first {broken[0]}: remove them, or"
            " draw them again by the command that drew the others"
        )
    count = metadata.get("num")
    if metadata["complete"] is True and count == len(paths):
        return
    state = f"{option} {source} has {len(paths)} of {count} samples" + (" so far" if len(paths) == count else "")
    if not incomplete:
        raise InputError(f"{state}: draw the others by the command that drew these, or score these with --incomplete")
    warnings.warn(f"{state}: it is not complete", stacklevel=1)
