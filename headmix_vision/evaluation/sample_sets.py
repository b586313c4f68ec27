"""The samples to score: a folder, an ADM npz file, or a data set by its name.

Shapes: B samples of a batch, C channels (1 or 3), *grid H and W pixels of images, or T frames, H and W of clips. Pixels
are uint8 throughout, as files hold them.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from headmix_vision.checks import check_counts
from headmix_vision.console.notes import say_left_out
from headmix_vision.data.batches import deal_batches
from headmix_vision.data.center_crop import center_crop
from headmix_vision.data.clip_frames import DEFAULT_CLIP, ClipConfig
from headmix_vision.data.datasets import find_dataset, open_source
from headmix_vision.data.datasets.base import CHANNELS, Source, SplitRequest, to_picture
from headmix_vision.data.labels import LabelRule
from headmix_vision.errors import InputError
from headmix_vision.evaluation.npz import NpzImages, npz_arrays
from headmix_vision.files.limits import check_memory
from headmix_vision.files.listing import find_pictures
from headmix_vision.files.pictures import Decoding, readable
from headmix_vision.files.png import Item, to_item

DECODER_THREADS = 8
_SAMPLE_BYTES = 16  # of a pixel, as bytes and as the numbers that features are computed of
UNLABELLED = LabelRule(needed=False)
"""Rule of scores that take no labels."""
SAMPLES, SAMPLES_METADATA = "images", "metadata.json"
_DATASET = re.compile(r"(?P<name>[^:\[\]]+)(:(?P<split>[^\[\]]+))?(\[(?P<slice>[-\d:]+)\])?")


class Pictures(Protocol):
    """Images, or clips as lists of frames, in a fixed order."""

    source: str
    kind: str

    @property
    def about(self) -> Mapping[str, Any]:
        """Further fields of the result file."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> Iterator[tuple[str, Item]]:
        """Reads some of them, by their numbers in rising order; yields names for messages and pictures."""
        ...


class ImageSet:
    """Puts images of one size, or clips of one size and length, into batches.

    Args:
        pictures: Where they come from.
        mode: `L` or `RGB`: what the feature extractor takes.
        image_size: Scale and centre-crop every image or frame to a square of this many pixels, as ADM does; None takes
            them as they are.

    Raises:
        InputError: Fewer than two samples, or an unreadable first one.
    """

    def __init__(self, pictures: Pictures, mode: str, image_size: int | None = None) -> None:
        if image_size is not None:
            check_counts(1, **{"image size": image_size})
        if len(pictures) < 2:
            raise InputError(f"at least 2 samples are needed, {pictures.source} has {len(pictures)}")
        self.pictures = pictures
        self.mode = mode
        self.image_size = image_size
        if image_size is not None:
            check_memory(_SAMPLE_BYTES * image_size**2, f"an image of {image_size} pixels")
        self.size = self._size(next(pictures.read([0]))[1])

    def _size(self, item: Item) -> tuple[int, ...]:
        frames = item if isinstance(item, list) else [item]
        size = (self.image_size,) * 2 if self.image_size else (frames[0].height, frames[0].width)
        return (len(frames), *size) if isinstance(item, list) else size

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def description(self) -> dict[str, Any]:
        """Everything that the result file says about the samples."""
        return {
            "source": self.pictures.source,
            "kind": self.pictures.kind,
            "count": len(self),
            "size": list(self.size),
            "crop": "adm_center" if self.image_size else None,
            **self.pictures.about,
        }

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Tensor]:
        """Yields all samples in order, or the batches of one of several processes, uint8 [B, C, *grid].

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
        for name, item in self.pictures.read(indices):
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
    """Writes a size (H, W) or (T, H, W) as people do: `32x16 pixels`, `8 frames of 32x16 pixels`."""
    *frames, height, width = size
    return "".join(f"{count} frames of " for count in frames) + f"{width}x{height}{unit}"


class Folder:
    """Reads all image files below a folder, in sorted order; an animated PNG is a clip, a damaged file an error."""

    kind = "folder"

    def __init__(self, path: Path, decoding: Decoding) -> None:
        self.source, self.decoding = str(path), decoding
        listing = find_pictures(path)
        say_left_out(path, len(listing.paths), "pictures", listing.left_out)
        self.paths = listing.paths
        self.about = {"background": decoding.background, "left_out": dict(listing.left_out)}

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Sequence[int]) -> Iterator[tuple[str, Item]]:
        with ThreadPoolExecutor(DECODER_THREADS) as pool:
            for start in range(0, len(indices), 4 * DECODER_THREADS):
                paths = [self.paths[index] for index in indices[start : start + 4 * DECODER_THREADS]]
                yield from zip(map(str, paths), pool.map(self._decode, paths), strict=True)

    def _decode(self, path: Path) -> Item:
        with readable(path):
            return self.decoding.item(path)


class TensorImages:
    """Takes samples from memory: images uint8 [N, C, H, W] or clips uint8 [N, C, T, H, W], of 1 or 3 channels.

    Raises:
        InputError: Another type or shape.
    """

    kind = "memory"
    about: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, pixels: Tensor, source: str = "memory") -> None:
        if pixels.dtype != torch.uint8 or pixels.ndim not in (4, 5) or pixels.shape[1] not in (1, 3):
            raise InputError(
                f"images are {pixels.dtype} {list(pixels.shape)}, they must be uint8 [N, 1 or 3, H, W], clips"
                " uint8 [N, 1 or 3, T, H, W]"
            )
        self.source = source
        self.pixels = pixels.cpu()

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Sequence[int]) -> Iterator[tuple[str, Item]]:
        for index in indices:
            yield f"image {index}", to_item(np.ascontiguousarray(self.pixels[index].movedim(0, -1).numpy()))


class DatasetImages:
    """Images of a data set by its name, all of a split or a slice of it."""

    kind = "dataset"

    def __init__(self, name: str, images: Source, indices: slice, background: str) -> None:
        self.source = name
        self.about = {"background": background}
        self.images = images
        self.indices = range(len(images))[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Sequence[int]) -> Iterator[tuple[str, Image.Image]]:
        for index in (self.indices[place] for place in indices):
            name = self.images.name(index)
            with readable(name):
                image, _ = self.images.read(index)
            yield name, to_picture(image)

    def labels(self) -> Tensor:
        """The targets of the images, int64 [N], which are read for it."""
        return torch.tensor([self.images.read(index)[1] for index in self.indices])


def open_images(
    source: str,
    mode: str,
    image_size: int | None = None,
    root: str | None = None,
    background: str = "white",
    labels: LabelRule = UNLABELLED,
) -> ImageSet:
    """Opens images or clips for scoring.

    Args:
        source: A folder, also one of samples with their `images/` and `metadata.json`; an `.npz` file with uint8
            images; or a data set `NAME[:SPLIT][SLICE]`: `digits`, `canvas:train` (64 pixels unless `image_size` says
            otherwise), `folder:validation`, `hfds/NAME:train`, `digits[::2]` for every other image. Without a split,
            digits are all of them and other data sets their validation split.
        mode: `L` or `RGB`.
        image_size: As in `ImageSet`.
        root: Place of a data set that needs one.
        background: Colour behind transparent pixels.
        labels: What is done with samples of a data set that have no valid label.

    Raises:
        InputError: Nothing there, no images, or fewer than a slice asks for.
    """
    path, decoding = samples_of(source, "images"), Decoding(mode, background)
    if path.is_dir():
        return ImageSet(Folder(path, decoding), mode, image_size)
    if path.is_file():
        if path.suffix != ".npz":
            raise InputError(f"{source} is a file, images come from a folder, an .npz file or a data set")
        if "arr_0" not in npz_arrays(path):
            raise InputError(f"{source} has no images arr_0, it has {', '.join(npz_arrays(path))}")
        return ImageSet(NpzImages(path), mode, image_size)
    grid = (image_size, image_size) if image_size else ()
    opened = open_slice(source, (CHANNELS[mode], *grid), root, background=background, labels=labels)
    return ImageSet(DatasetImages(source, *opened, background), mode, image_size)


def samples_of(source: str, what: str) -> Path:
    """Finds the path of samples: of a folder of samples that `headmix-sample` wrote, what lies in its `images/`.

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
    """Opens a data set to score, `NAME[:SPLIT][SLICE]`: its split, and which of its samples are meant.

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
    """Reads START:STOP:STEP, of which each may be missing; None if it is no slice."""
    try:
        bounds = [int(part) if part else None for part in text.split(":")]
    except ValueError:
        return None
    return bounds if 2 <= len(bounds) <= 3 and bounds[2:] != [0] else None
