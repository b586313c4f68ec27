"""`shards`: images or videos in tar files, as WebDataset and img2dataset write them, read by their number.

`headmix index-shards` makes the index of a folder of shards once, `index.safetensors`: for each of N samples where its
picture or video begins in its tar file, its bytes and its label; for each shard its name, size, number of samples and a
hash of its beginning.
"""

import hashlib
import io
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.datasets.base import ClipSource, Pictures, RawImage, Source, SplitRequest, to_picture
from headmix_vision.data.datasets.folders import split_candidates
from headmix_vision.data.fitting import crop_frames
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import Decoding, ending, is_hidden
from headmix_vision.files.reading import check_fields, check_file, parse_json
from headmix_vision.files.tensors import open_tensors
from headmix_vision.files.video import ClipInfo, EncodedVideo, probe, read_frames, require_av

INDEX = "index.safetensors"
FORMAT = 1
KINDS = ("images", "clips")
TENSORS = ("offset", "size", "label")
_ENTRIES = {"format": int, "kind": str, "class_names": list, "shards": list}
_SHARD = {"name": str, "bytes": int, "samples": int, "head": str}
_HEAD_BYTES = 4096
_THREADS = 16
_AGAIN = "restore it, or make the index again with headmix index-shards"


def open_shards(request: SplitRequest) -> Source:
    """Open the shards of a split: a folder of the root, or the root itself for training.

    Raises:
        InputError: No such folder, no index, shards that do not match the index, images where clips are wanted or
            the other way round, or no labels for a classifier.
    """
    root = request.existing_root()
    folder = next((root / name for name in split_candidates(request.split) if (root / name).is_dir()), root)
    if request.split in ("", ".", "..") or (folder == root and request.split != request.train_split):
        raise InputError(f"root {str(root)!r} has no folder {request.split!r} of shards")
    shards = Shards(folder)
    wanted = "clips" if len(request.grid) in (1, 3) else "images"
    still = wanted == "clips" and request.grid[0] == 1 and shards.kind == "images"
    if shards.kind != wanted and not still:
        raise InputError(f"the shards of {folder} hold {shards.kind}, asked for {wanted}")
    names = shards.class_names
    if not names and request.needs_labels and request.use != "caching":
        raise InputError(
            f"the shards of {folder} have no labels: make the index again with headmix index-shards --label, or train a"
            " generator without classes by model.num_classes=0"
        )
    if names == [str(number) for number in range(len(names))]:  # not every split has a sample of the last class
        names = [str(number) for number in range(max(len(names), request.num_classes))]
    if shards.kind == "images":
        images = ShardImages(shards, names, request.decoding)
        return ShardStills(images, request.grid[1:]) if still else images
    require_av("reading a video")
    return ShardClips(shards, names, request)


class Shards:
    """The encoded samples of a folder of shards, which must match its index.

    Args:
        folder: The folder.

    Raises:
        InputError: No index there, a damaged one, or a shard that is missing, unknown, of another size or another one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / INDEX
        if not path.is_file():
            raise InputError(f"{folder} has no {INDEX}: make it with headmix index-shards {folder}")
        with open_tensors(path) as file:
            found = parse_json((file.metadata() or {}).get("shards", "null"), f"the header of {path}")
            index = check_fields(str(path), found, {"format": int})
            if index["format"] != FORMAT:
                raise InputError(f"{path} is of format {index['format']}, this version reads {FORMAT}")
            index = check_fields(str(path), index, _ENTRIES)
            shards = [check_fields(f"a shard in {path}", shard, _SHARD) for shard in index["shards"]]
            self.offsets, self.sizes, self.labels = (file.get_tensor(name) for name in TENSORS)
        self.kind: str = index["kind"]
        self.class_names: list[str] = index["class_names"]
        self.names = [shard["name"] for shard in shards]
        self.shard_sizes = [shard["samples"] for shard in shards]
        self._ends = list(accumulate(self.shard_sizes))
        self.keys = [f"{shard['name']} {shard['bytes']} {shard['samples']} {shard['head']}" for shard in shards]
        self.keys.append(str(self.labels.tolist()))
        if not {len(self.offsets), len(self.sizes), len(self.labels)} == {sum(self.shard_sizes)}:
            raise InputError(f"{path} has {len(self.offsets)} samples, its shards have {sum(self.shard_sizes)}")
        _check_places(path, self.offsets, self.sizes, shards)
        low, high = (int(self.labels.min()), int(self.labels.max())) if len(self.labels) else (0, 0)
        if not 0 <= low <= high < max(len(self.class_names), 1):
            raise InputError(f"{path}: labels are {low} to {high}, there are {len(self.class_names)} classes")
        self._check(shards)

    def _check(self, shards: list[dict[str, Any]]) -> None:
        existing = {path.name for path in find_shards(self.folder)}
        missing = sorted({*self.names} - existing)
        if missing:
            raise InputError(
                f"{self.folder} lacks {len(missing)} of {len(shards)} shards, first {missing[0]}: {_AGAIN}"
            )
        unknown = sorted(existing - {*self.names})
        if unknown:
            raise InputError(f"{self.folder / unknown[0]} is not in {INDEX}: remove it, or make the index again")
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(describe_shard, (self.folder / name for name in self.names)))
        for shard, now in zip(shards, found, strict=True):
            if now["bytes"] != shard["bytes"]:
                what = f"has {now['bytes']} bytes, {INDEX} says {shard['bytes']}"
            elif now["head"] != shard["head"]:
                what = f"is another shard than {INDEX} was made of"
            else:
                continue
            raise InputError(f"{self.folder / shard['name']} {what}: {_AGAIN}")

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, index: int) -> bytes:
        """The file of a sample's picture or video; ValueError if its shard ends before."""
        size = int(self.sizes[index])
        with (self.folder / self.names[self._shard(index)]).open("rb") as file:
            file.seek(int(self.offsets[index]))
            data = file.read(size)
        if len(data) < size:
            raise ValueError(f"the shard ends after {len(data)} of {size} bytes")
        return data

    def name(self, index: int) -> str:
        """The path of a sample's shard, with its number therein."""
        return f"{self.folder}/{self._relative(index)}"

    def files(self) -> list[tuple[str, int]]:
        """Shards with the number therein, and sizes in bytes, of all samples."""
        return [(self._relative(index), size) for index, size in enumerate(self.sizes.tolist())]

    def _relative(self, index: int) -> str:
        number = self._shard(index)
        return f"{self.names[number]}[{index - self._ends[number] + self.shard_sizes[number]}]"

    def _shard(self, index: int) -> int:
        return bisect_right(self._ends, index)


class ShardImages(Pictures):
    """Images of shards.

    Args:
        shards: The shards.
        class_names: One name per label.
        decoding: The pixels that they become.
    """

    data: Shards

    def __init__(self, shards: Shards, class_names: list[str], decoding: Decoding) -> None:
        super().__init__(shards, class_names, decoding)
        self.shard_sizes = shards.shard_sizes

    def read(self, index: int) -> tuple[RawImage, int]:
        return self.decoding.first_frame(self.data.read(index)), int(self.data.labels[index])

    def name(self, index: int) -> str:
        return self.data.name(index)

    def files(self) -> list[tuple[str, int]]:
        return self.data.files()

    def keys(self) -> list[str]:
        """Shards and labels."""
        return self.data.keys


class ShardStills(ShardImages):
    """Images of shards as clips of one frame, float32 [C, 1, H, W] in [0, 1].

    Args:
        images: The images.
        size: H and W to which they are cropped; empty to leave them as they are.
    """

    def __init__(self, images: ShardImages, size: Sequence[int]) -> None:
        super().__init__(images.data, images.class_names, images.decoding)
        self.size = size

    def read(self, index: int) -> tuple[RawImage, int]:
        image, target = super().read(index)
        return crop_frames([to_picture(image)], self.size), target


class ShardClips(ClipSource):
    """Clips of the videos of shards.

    Args:
        shards: The shards.
        class_names: One name per label.
        request: Frames, size, channels and choice of the frames of a clip.
    """

    def __init__(self, shards: Shards, class_names: list[str], request: SplitRequest) -> None:
        self.shards = shards
        self.kept: Sequence[int] = range(len(shards))
        self.class_names = class_names
        self.shard_sizes: list[int] | None = shards.shard_sizes
        self.num_frames, *self.size = request.grid
        self.decoding = request.decoding
        self.clip: ClipConfig = request.clip

    def __len__(self) -> int:
        return len(self.kept)

    def read_part(self, index: int, place: float) -> tuple[Tensor, int]:
        """As `ClipSource` says; ValueError for a video that is damaged, too short or too slow."""
        try:
            frames = read_frames(self._video(index), lambda info: self._choose(info, place), self.decoding.background)
            pictures = [Image.fromarray(frame).convert(self.decoding.mode) for frame in frames]
            return crop_frames(pictures, self.size), int(self.shards.labels[self.kept[index]])
        except InputError as error:
            raise ValueError(str(error)) from None  # one of many: training skips it

    def _video(self, index: int) -> EncodedVideo:
        return EncodedVideo(self.name(index), self.shards.read(self.kept[index]))

    def _choose(self, info: ClipInfo, place: float) -> list[int]:
        return self.clip.frames(self.num_frames, info.num_frames, info.frame_rate, place, info.times)

    def leave_out_unusable(self) -> list[str]:
        """As `ClipSource` says."""
        with ThreadPoolExecutor(_THREADS) as pool:
            faults = list(pool.map(self._fault, range(len(self))))
        self.kept = [number for number, fault in zip(self.kept, faults, strict=True) if fault is None]
        self.shard_sizes = None
        return [fault for fault in faults if fault is not None]

    def _fault(self, index: int) -> str | None:
        try:
            self._choose(probe(self._video(index)), 0)
        except (ValueError, OSError) as error:
            return f"{self.name(index)} ({error})"
        return None

    def name(self, index: int) -> str:
        return self.shards.name(self.kept[index])

    def files(self) -> list[tuple[str, int]]:
        files = self.shards.files()
        return [files[number] for number in self.kept]

    def keys(self) -> list[str]:
        """Shards and labels; their number tells which are left out."""
        return self.shards.keys


def _check_places(path: Path, offsets: Tensor, sizes: Tensor, shards: list[dict[str, Any]]) -> None:
    """Raise InputError for samples that an index states to lie outside of their shards."""
    numbers = [[shard[name] for shard in shards] for name in ("samples", "bytes")]
    wrong = not all(0 <= number < 1 << 62 for number in chain(*numbers))
    if not wrong:
        counts, ends = map(torch.tensor, numbers)
        room = ends.repeat_interleave(counts)
        wrong = bool(((offsets < 0) | (sizes < 0) | (sizes > room - offsets)).any())
    if wrong:
        raise InputError(f"{path} is damaged: samples lie outside of their shards; {_AGAIN}")


def find_shards(folder: Path) -> list[Path]:
    """List the tar files of a folder by name."""
    return sorted(path for path in folder.iterdir() if ending(path) == ".tar" and not is_hidden(path.name))


def describe_shard(path: Path) -> dict[str, Any]:
    """Identity of a shard: its size, `bytes`, and a hash of its first 4096 bytes, `head`."""
    check_file(path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        return {"bytes": file.seek(0, io.SEEK_END), "head": hashlib.sha256(head).hexdigest()[:16]}
