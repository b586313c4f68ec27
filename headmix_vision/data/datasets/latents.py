"""Cached latents: the files that `headmix cache-latents` writes, and their reader.

A cache is a directory with `latents.json`, which says how the latents were made, and shards of a fixed number of
images in the order of the data set: `shard-00000.safetensors`, ... A cache with prompts also has the embedding of each
image's prompt in its shard, and that of the empty prompt in `null_prompt.safetensors`. Caches of several sizes lie side
by side in one directory, `480x832/`, ...

Each shard holds a CRC-32 of each image or clip, `mean.crc32` beside `mean`, which is compared whenever one is read.
This costs 0.35 s of CPU time per GiB, in the processes that read. Caches of earlier versions have none.

n images or clips of a shard, C latent channels, * the axes of the latent grid: h and w of an image, t, h and w of a
clip.
"""

import hashlib
import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headmix_vision.data.datasets.base import PreparedSource, SplitRequest
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_fields, parse_json, read_json
from headmix_vision.files.tensors import open_tensors, read_tensors, refuse_damage, tensor_bytes
from headmix_vision.models.autoencoders import LatentScale

MANIFEST = "latents.json"
NULL_PROMPT = "null_prompt.safetensors"
PROMPT, PROMPT_MASK = "prompt", "prompt_mask"
HASH = "sha256"
FORMAT = 1
STORES = ("moments", "means")
Prompt = tuple[Tensor, ...]
_SIZE = re.compile(r"[1-9]\d*x[1-9]\d*")
_ENTRIES = {
    "format": int,
    "count": int,
    "shape": list,
    "shard_size": int,
    "store": str,
    "dtype": str,
    "flip": bool,
    "class_names": list,
    "autoencoder": dict,
    "source": list | None,
    "frame_rate": int | float | None,
    "prompts": dict | None,
}
_AUTOENCODER = {"scale": int | float | list, "shift": int | float | list}
_PROMPTS = {"shape": list, "masked": bool}


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def count_shards(manifest: dict[str, Any]) -> int:
    """Number of shards of a complete cache."""
    return -(-int(manifest["count"]) // int(manifest["shard_size"]))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read `latents.json` of a cache, without its hash, which is compared.

    Raises:
        InputError: Absent, damaged, or of another format.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise InputError(f"{path} has no {MANIFEST}: make a cache with headmix cache-latents")
    stored = read_json(file)
    manifest = check_fields(str(file), stored, {"format": int})
    if manifest["format"] != FORMAT:
        raise InputError(f"{file} is of format {manifest['format']!r}, this version reads {FORMAT}")
    manifest = check_fields(str(file), manifest, _ENTRIES)
    check_fields(f"the autoencoder in {file}", manifest["autoencoder"], _AUTOENCODER)
    if manifest["prompts"] is not None:
        check_fields(f"the prompts in {file}", manifest["prompts"], _PROMPTS)
    if manifest["store"] not in STORES:
        raise InputError(f"{file}: entry 'store' is {manifest['store']!r}, it must be one of {', '.join(STORES)}")
    for name in ("count", "shard_size"):
        if manifest[name] < 1:
            raise InputError(f"{file}: entry {name!r} is {manifest[name]}, it must be at least 1")
    if HASH in stored and stored[HASH] != manifest_sha256(stored):
        raise InputError(
            f"{file} is damaged or was edited: it does not have the SHA-256 in its entry {HASH!r};"
            " remove the entry from an edited file"
        )
    manifest.pop(HASH, None)
    return manifest


def manifest_sha256(manifest: dict[str, Any]) -> str:
    """Compute the hash over all other entries of a manifest."""
    others = {name: value for name, value in manifest.items() if name != HASH}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def shard_length(number: int, manifest: dict[str, Any]) -> int:
    """Number of images in a shard."""
    return int(min(manifest["shard_size"], manifest["count"] - number * manifest["shard_size"]))


def check_shard(path: Path, number: int, manifest: dict[str, Any]) -> None:
    """Check that a shard is whole and holds what the manifest says.

    Raises:
        InputError: Damaged, tensors that are missing or of another shape, labels beyond the classes, or a shard of
            another cache.
    """
    length = shard_length(number, manifest)
    with open_tensors(path / shard_name(number), check=False) as file:
        expected = {name: [length, *shape] for name, shape in tensor_shapes(manifest).items()}
        expected |= {sums_name(name): [length] for name in expected if sums_name(name) in file.keys()}  # noqa: SIM118
        for name, wanted in expected.items():
            shape = file.get_slice(name).get_shape()
            if shape != wanted:
                raise InputError(f"{path / shard_name(number)}: {name} is {shape}, it must be {wanted}")
        labels, classes = read_rows(path / shard_name(number), file, "labels"), max(len(manifest["class_names"]), 1)
        header = f"the header of {path / shard_name(number)}"
        made = check_fields(header, parse_json((file.metadata() or {}).get("latents", "{}"), header), {})
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(
            f"{path / shard_name(number)}: labels are {int(labels.min())} to {int(labels.max())}, there are"
            f" {classes} classes"
        )
    different = find_difference(made, manifest)
    if different is not None:
        raise InputError(f"{path / shard_name(number)} is of another cache: its {different} is not that of {MANIFEST}")


def find_difference(made: dict[str, Any], manifest: dict[str, Any]) -> str | None:
    """Find the first entry of a record that a manifest has otherwise; where images and weights lie does not count."""
    for name, value in made.items():
        if name not in ("images", "source") and _without_source(manifest.get(name)) != _without_source(value):
            return name
    return None


def _without_source(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "source"} if isinstance(value, dict) else value


def sums_name(name: str) -> str:
    """Name of the tensor with the sums of another."""
    return f"{name}.crc32"


def row_sums(name: str, rows: Tensor) -> Tensor:
    """CRC-32 of the name and type of a tensor and of each of its rows, int64 [n]."""
    start = zlib.crc32(f"{name} {rows.dtype} {list(rows.shape[1:])}".encode())
    content = tensor_bytes(rows)
    size = len(content) // max(len(rows), 1)
    sums = [zlib.crc32(content[i * size : (i + 1) * size], start) for i in range(len(rows))]
    return torch.tensor(sums, dtype=torch.int64)


def read_rows(path: Path, file: Any, name: str, rows: slice = slice(None)) -> Tensor:
    """Read rows of a tensor of a shard, and compare their sums, if it has any.

    Args:
        path: The shard, to be named.
        file: The same, opened.
        name: The tensor.
        rows: The rows; all by default.

    Raises:
        InputError: If a row is damaged.
    """
    found: Tensor = file.get_slice(name)[rows]
    if sums_name(name) in file.keys():  # noqa: SIM118 - not a mapping
        wrong = (row_sums(name, found) != file.get_slice(sums_name(name))[rows]).nonzero()
        if len(wrong):
            place = (rows.start or 0) + int(wrong[0])
            raise InputError(f"{path} is damaged: {name} {place} does not have the CRC-32 that was written with it")
    return found


def tensor_shapes(manifest: dict[str, Any]) -> dict[str, list[int]]:
    """Shape of a row of each tensor in a shard."""
    kinds = ("mean", "std") if manifest["store"] == "moments" else ("mean",)
    suffixes = ("", "_flipped") if manifest["flip"] else ("",)
    shapes = {"labels": []} | {f"{kind}{suffix}": manifest["shape"] for kind in kinds for suffix in suffixes}
    prompts = manifest.get("prompts")
    if prompts is not None:
        shapes |= {PROMPT: prompts["shape"]} | ({PROMPT_MASK: prompts["shape"][:1]} if prompts["masked"] else {})
    return shapes


def find_caches(root: str | None, split: str, train_split: str) -> list[Path]:
    """Find the caches of a split: a folder of the root, or the root itself for training; one, or one for each size.

    Raises:
        InputError: No such folder.
    """
    if root is None:
        raise InputError("dataset 'latents' needs root, the directory of cached latents")
    folder = Path(root) / split
    if not folder.is_dir():
        folder = Path(root)
        if split != train_split:
            raise InputError(f"{folder} has no folder {split}: set data.val_split=null to train without")
    if (folder / MANIFEST).is_file() or not folder.is_dir():
        return [folder]
    return sorted(path for path in folder.iterdir() if _SIZE.fullmatch(path.name) and path.is_dir()) or [folder]


def open_latents(request: SplitRequest) -> "LatentShards | LatentBuckets":
    """Open the caches of a split.

    Raises:
        InputError: No such cache, latents of another shape than the network takes, or no prompts where it needs them.
    """
    wanted, folders = request.prompt_dropout, find_caches(request.root, request.split, request.train_split)
    caches = [LatentShards(folder, request.seed, prompt_dropout=wanted) for folder in folders]
    if wanted is not None:
        return caches[0] if len(caches) == 1 else LatentBuckets(caches)
    if len(caches) > 1:
        raise InputError(
            f"{caches[0].path.parent} holds latents of {len(caches)} sizes, the network takes one: name it"
        )
    (shards,) = caches
    channels, *grid = request.shape
    if (
        len(grid) == 3
        and grid[0] == 1
        and shards.shape in ((channels, *grid[1:]), (channels, shards.frames, *grid[1:]))
    ):
        shards.as_stills()
    if shards.shape != request.shape:
        raise InputError(
            f"the latents of {shards.path} are of shape {list(shards.shape)}, the network takes {list(request.shape)}"
        )
    return shards


class LatentShards(PreparedSource):
    """Latents of a cache, scaled as a diffusion model takes them.

    Where the cache holds moments, a latent is drawn from them; where it holds mirrored images too, one of the two is
    taken. Both depend on (seed, draw, index) alone; `draw` is for the epoch.

    Args:
        path: Directory of the cache.
        seed: Seed of what is drawn.
        flip: Probability of taking the mirrored image; half where the cache holds mirrored images, when None.
        prompt_dropout: Probability of taking the empty prompt, and the prompt in the place of the label; None for
            labels.

    Raises:
        InputError: No cache there, an unfinished or damaged one, `flip` without mirrored images, or `prompt_dropout`
            without prompts.
    """

    def __init__(
        self, path: str | Path, seed: int = 0, flip: float | None = None, prompt_dropout: float | None = None
    ) -> None:
        self.path = Path(path)
        self.seed = seed
        self.manifest = read_manifest(self.path)
        self.class_names: list[str] = self.manifest["class_names"]
        self.num_classes = len(self.class_names)
        self.frame_rate: float | None = self.manifest["frame_rate"]
        count = count_shards(self.manifest)
        self.shard_sizes = [shard_length(number, self.manifest) for number in range(count)]
        self._stills = False
        self.shape: tuple[int, ...] = tuple(self.manifest["shape"])
        scale = self.manifest["autoencoder"]
        self.scale = LatentScale(scale["scale"], scale["shift"])
        self.flip = (0.5 if self.manifest["flip"] else 0.0) if flip is None else flip
        if not 0 <= self.flip <= 1 or (self.flip and not self.manifest["flip"]):
            allowed = "in [0, 1]" if self.manifest["flip"] else "0, the cache has no mirrored images"
            raise InputError(f"flip is {flip}, it must be {allowed}")
        missing = [n for n in range(count_shards(self.manifest)) if not (self.path / shard_name(n)).is_file()]
        if missing:
            raise InputError(
                f"{self.path} lacks {len(missing)} of {count_shards(self.manifest)} shards, first"
                f" {shard_name(missing[0])}; run headmix cache-latents again to finish it"
            )
        for number in range(count_shards(self.manifest)):
            check_shard(self.path, number, self.manifest)
        self._files: dict[int, Any] = {}
        self.prompt_dropout = prompt_dropout
        if prompt_dropout is not None:
            self._null = self._read_null()

    def _read_null(self) -> Prompt:
        if self.manifest["prompts"] is None:
            raise InputError(f"{self.path} has no prompts: make the cache with headmix cache-latents --prompts")
        if not (self.path / NULL_PROMPT).is_file():
            raise InputError(f"{self.path} lacks {NULL_PROMPT}; run headmix cache-latents again to finish it")
        found = read_tensors(self.path / NULL_PROMPT)
        shapes = tensor_shapes(self.manifest)
        for name in (PROMPT, PROMPT_MASK) if self.manifest["prompts"]["masked"] else (PROMPT,):
            if name not in found or list(found[name].shape) != shapes[name]:
                raise InputError(f"{self.path / NULL_PROMPT} is of another cache: {name} is not {shapes[name]}")
        return (found[PROMPT], found[PROMPT_MASK]) if self.manifest["prompts"]["masked"] else (found[PROMPT],)

    @property
    def frames(self) -> int:
        """Latent frames of a clip, 1 of an image."""
        return self.shape[1] if len(self.shape) == 4 else 1

    def as_stills(self) -> None:
        """From now on, give images, or the first frames of clips, as clips of one frame [C, 1, h, w].

        The first latent frame of a clip stands for its first frame alone. Wan and LTX make it of nothing else, the
        norms of CogVideoX look at the whole clip.
        """
        self._stills = True
        self.shape = (self.shape[0], 1, *self.shape[-2:])
        self.frame_rate = None

    def __len__(self) -> int:
        return int(self.manifest["count"])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Latent, float32 [C, *grid], and label."""
        return self.read(index)

    def read(self, index: int, draw: int = 0) -> tuple[Tensor, Any]:
        """Latent, float32 [C, *grid], and label; another `draw` (epoch) is another sample of the same image.

        Instead of the label the prompt, where it is wanted: embedding [L, D] and, of a masked one, mask [L].
        """
        if not 0 <= index < len(self):
            raise IndexError(f"latent {index} of {len(self)}")
        number, place = divmod(index, int(self.manifest["shard_size"]))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, draw, index))
        mirrored = float(torch.rand((), generator=generator)) < self.flip
        suffix = "_flipped" if mirrored else ""
        latent = self._latent(number, f"mean{suffix}", place)
        if latent.dtype == torch.uint8:
            latent = latent.float() / 255 * 2 - 1
        latent = latent.float()
        if self.manifest["store"] == "moments":
            std = self._latent(number, f"std{suffix}", place).float()
            latent = latent + std * torch.randn(latent.shape, generator=generator)
        latent = self.scale.apply(latent[None])[0]
        if self.prompt_dropout is None:
            return latent, int(self._rows(number, "labels", place))
        if float(torch.rand((), generator=generator)) < self.prompt_dropout:
            return latent, self._null
        names = (PROMPT, PROMPT_MASK)[: len(self._null)]
        return latent, tuple(self._rows(number, name, place)[0] for name in names)

    def _rows(self, number: int, name: str, place: int) -> Tensor:
        return read_rows(self.path / shard_name(number), self._open(number), name, slice(place, place + 1))

    def _latent(self, number: int, name: str, place: int) -> Tensor:
        latent = self._rows(number, name, place)
        if not self._stills:
            return latent[0]
        return latent[0, :, :1] if len(self.manifest["shape"]) == 4 else latent.transpose(0, 1)

    def name(self, index: int) -> str:
        return f"{self.path}[{index}]"

    def keys(self) -> list[str]:
        """Return what the manifest says, hashes of the source included, but no places."""
        known = {name: _without_source(value) for name, value in self.manifest.items() if name != "images"}
        if known["prompts"] is None:  # as in caches of earlier versions
            del known["prompts"]
        return [json.dumps(known, sort_keys=True)]

    def labels(self) -> Tensor:
        """All labels, int64 [count]."""
        shards = range(count_shards(self.manifest))
        return torch.cat([read_rows(self.path / shard_name(n), self._open(n), "labels") for n in shards])

    def _open(self, number: int) -> Any:
        if number not in self._files:
            path = self.path / shard_name(number)
            with refuse_damage(path):
                self._files[number] = safe_open(path, "pt")
        return self._files[number]

    def __getstate__(self) -> dict[str, Any]:
        # open files stay in the process that opened them
        return {**self.__dict__, "_files": {}}


class LatentBuckets(PreparedSource):
    """Latents of several sizes with their prompts: caches one after another.

    Args:
        caches: A cache for each size.

    Raises:
        InputError: Caches of different autoencoders or text encoders.
    """

    def __init__(self, caches: Sequence[LatentShards]) -> None:
        self.caches = list(caches)
        first = self.caches[0]
        for other in self.caches[1:]:
            for entry in ("autoencoder", "prompts"):
                one, two = (_without_source(cache.manifest[entry]) for cache in (first, other))
                if "sha256" not in one or "sha256" not in two:  # of a text encoder, as earlier versions cached
                    one, two = ({k: v for k, v in made.items() if k != "sha256"} for made in (one, two))
                if one != two:
                    raise InputError(f"{other.path} has another entry {entry!r} than {first.path}: cache them alike")
        self.class_names = first.class_names
        self.bucket_sizes = [len(cache) for cache in self.caches]
        self._ends = list(accumulate(map(len, self.caches)))

    def __len__(self) -> int:
        return self._ends[-1]

    def _place(self, index: int) -> tuple[LatentShards, int]:
        bucket = bisect_right(self._ends, index)
        return self.caches[bucket], index - self._ends[bucket] + len(self.caches[bucket])

    def read(self, index: int, draw: int = 0) -> tuple[Tensor, Any]:
        cache, place = self._place(index)
        return cache.read(place, draw)

    def name(self, index: int) -> str:
        cache, place = self._place(index)
        return cache.name(place)

    def keys(self) -> list[str]:
        """Return the keys of all caches."""
        return [key for cache in self.caches for key in cache.keys()]  # noqa: SIM118 - not a mapping
