"""Encode images or videos into latents once, for training: the shards of a cache, and the record of their origin.

An interrupted job goes on with the missing shards. The same latents come out of any number of processes. The names and
sizes of the files are recorded: a cache is not continued with other files than its shards were made of.

B images or clips of a batch, C channels, T frames, H x W pixels.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from headmix_vision.console import default_device, open_device, progress, say
from headmix_vision.data.batches import obey_parent
from headmix_vision.data.cache_prompts import Prompts, read_prompts
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.data.cache_sizes import cache_sizes, deal_to_sizes
from headmix_vision.data.cache_sources import CroppedImages, check_sources, is_clips, open_at_size
from headmix_vision.data.datasets.base import PIL_MODES, Source, SplitRequest
from headmix_vision.data.datasets.derived import Part
from headmix_vision.data.datasets.latents import (
    FORMAT,
    HASH,
    MANIFEST,
    NULL_PROMPT,
    check_shard,
    count_shards,
    find_difference,
    manifest_sha256,
    read_manifest,
    row_sums,
    shard_length,
    shard_name,
    sums_name,
    tensor_shapes,
)
from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.reading import check_disk, check_memory, check_workers
from headmix_vision.files.tensors import write_tensors
from headmix_vision.files.writing import atomic_path, check_place, hold_lock, is_temporary
from headmix_vision.models.autoencoders import Autoencoder, load_autoencoder
from headmix_vision.models.pipeline_folder import TextEncoder
from headmix_vision.processes import ALONE, Processes, process_numbers

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_Job = tuple[Source, CacheRequest, Prompts | None, tuple[int, int] | None]  # of a size
_SHARD_NUMBER = re.compile(r"\.shard-(\d+)\.")


def write_cache(
    source: Source,
    autoencoder: Autoencoder,
    request: CacheRequest,
    origin: str,
    clip: dict[str, Any] | None = None,
    processes: Processes = ALONE,
    prompts: Prompts | None = None,
    size: tuple[int, int] | None = None,
) -> int:
    """Encode what is missing of this process's share of a cache.

    Args:
        source: The images, or the clips at their final size.
        autoencoder: What to encode with; one without moments stores means, one that passes pixels on stores uint8.
        request: How to encode and store.
        origin: Where the images came from, for the record.
        clip: Of clips: `frames`, their number; `frame_rate` a second, None where it is not known or differs; and
            whatever else says how they were made, for the record.
        processes: This process writes shards rank, rank + world_size, ...
        prompts: Prompts to encode too.
        size: Height and width in pixels, where they are not the request's.

    Returns:
        Number of shards written, or to be written.

    Raises:
        InputError: An option out of range; a directory that holds something else, shards of other images or with
            other settings, or that another process writes to; an unreadable image; latents that are not finite.
    """
    out, workers = request.out, request.workers
    height, width = size or (request.image_size, request.image_size)
    if len(source) == 0:
        raise InputError(f"{origin} has no images")
    batch_size, shard_size = request.batch_size, request.shard_size
    if batch_size is None:
        batch_size = 32 if clip is None else 4
    if shard_size is None:
        shard_size = 4096 if clip is None else 256
    check_place(out)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, --out must be a directory")
    check_counts(1, image_size=height, width=width, batch_size=batch_size, shard_size=shard_size)
    check_counts(0, workers=workers)
    check_workers(workers=workers)
    batch = min(batch_size, len(source))
    pixels = batch * height * width * autoencoder.image_channels * (1 if clip is None else clip["frames"])
    check_memory(4 * pixels, f"a batch of {batch} of {height if size is None else f'{height}x{width}'} pixels")
    autoencoder.check_size(height, width)
    if clip is not None:
        autoencoder.check_frames(clip["frames"])
    images = CroppedImages(source, (height, width), PIL_MODES[autoencoder.image_channels])
    mean, std = autoencoder.moments(images[0][0][None] / 255)
    manifest = {
        "format": FORMAT,
        "count": len(source),
        "shape": list(mean.shape[1:]),
        "shard_size": shard_size,
        "store": "means" if std is None else request.store,
        "dtype": "uint8" if autoencoder.module is None else request.dtype,
        "flip": request.flip,
        "image_size": height if size is None else [height, width],
        "crop": "adm_center",
        "images": origin,
        "class_names": source.class_names,
        "autoencoder": autoencoder.description,
    }
    if clip is not None:
        rate = clip["frame_rate"]
        manifest |= {"clip": clip, "frame_rate": rate and rate / (autoencoder.time_downsampling or 1)}
    if prompts is not None:
        manifest["prompts"] = _describe_prompts(out, prompts)
    numbers = sum(math.prod(shape) for name, shape in tensor_shapes(manifest).items() if name != "labels")
    needed = len(source) * numbers * getattr(torch, str(manifest["dtype"])).itemsize
    there = sum(path.stat().st_size for path in out.glob("*.safetensors")) if out.is_dir() else 0
    check_disk(out, needed - there, f"a cache of {len(source)} {'images' if clip is None else 'clips'}")
    manifest["source"] = _source_hashes(source, manifest, prompts)
    if source.files() is not None and not _is_of_earlier_decoding(out, request.background):
        manifest["background"] = request.background
    if request.dry_run:
        _check_directory(out, manifest)
        return len(_missing(out, manifest, processes))
    with hold_lock(out / f".process-{processes.rank}.lock", f"cache {out}"):
        changed = _check_directory(out, manifest)
        _remove_leftovers(out, processes)
        if changed:
            with atomic_path(out / MANIFEST) as temporary:
                temporary.write_text(json.dumps({**manifest, HASH: manifest_sha256(manifest)}, indent=2) + "\n")
        if prompts is not None and processes.rank == 0:
            write_tensors(out / NULL_PROMPT, prompts.null(DTYPES[request.dtype]), {})
        todo = _missing(out, manifest, processes)
        _write_shards(images, autoencoder, out, manifest, todo, batch_size, workers, processes.rank == 0, prompts)
    return len(todo)


def _write_shards(
    images: CroppedImages,
    autoencoder: Autoencoder,
    out: Path,
    manifest: dict[str, Any],
    todo: list[int],
    batch_size: int,
    workers: int,
    show: bool,
    prompts: Prompts | None,
) -> None:
    batches = [batch for number in todo for batch in _batches(number, manifest, batch_size)]
    loader: Any = DataLoader(images, batch_sampler=batches, num_workers=workers, worker_init_fn=obey_parent)
    described = {name: value for name, value in manifest.items() if name != "source"}
    with progress(
        "caching", sum(map(len, batches)), "clips" if "clip" in manifest else "images", enabled=show
    ) as advance:
        stream = iter(loader)
        for number in todo:
            parts: dict[str, list[Tensor]] = {}
            for indices in _batches(number, manifest, batch_size):
                pixels, labels = next(stream)
                latents = _encode(autoencoder, pixels, manifest)
                if prompts is not None:
                    latents |= prompts.tensors(indices, DTYPES[manifest["dtype"]])
                for key, tensor in latents.items():
                    if tensor.is_floating_point() and not tensor.isfinite().all():
                        raise InputError(
                            f"{key} of the latents of {images.source.name(indices[0])} to"
                            f" {images.source.name(indices[-1])} is not finite: encode and store in float32"
                        )
                for key, tensor in {**latents, "labels": labels}.items():
                    parts.setdefault(key, []).append(tensor)
                advance(len(labels))
            tensors = {key: torch.cat(values).contiguous() for key, values in parts.items()}
            tensors |= {sums_name(name): row_sums(name, rows) for name, rows in tensors.items()}
            write_tensors(out / shard_name(number), tensors, {"latents": json.dumps(described)}, hashed=False)


def _is_of_earlier_decoding(out: Path, background: str) -> bool:
    """Tell, with a warning, whether a cache was begun before pictures were turned and put on a background."""
    if not (out / MANIFEST).is_file() or "background" in read_manifest(out) or background != "white":
        return False
    warnings.warn(
        f"{out} was begun by an earlier version, which did not turn photos by their EXIF and showed the colours of"
        " transparent pixels; if there are such pictures, choose another --out",
        stacklevel=2,
    )
    return True


def _describe_prompts(out: Path, prompts: Prompts) -> dict[str, Any]:
    """Describe the text encoder; a cache begun by an earlier version stays without its hash, with a warning."""
    described = prompts.encoder.description
    earlier = read_manifest(out)["prompts"] if (out / MANIFEST).is_file() else None
    if earlier is None or "sha256" in earlier:
        return described
    warnings.warn(f"{out} was begun by an earlier version, which did not record its text encoder", stacklevel=2)
    return {name: value for name, value in described.items() if name != "sha256"}


def _source_hashes(source: Source, manifest: dict[str, Any], prompts: Prompts | None) -> list[str]:
    """Hash names, sizes and prompts of each shard's images; where there are no files, the name of the data set."""
    files, size = source.files(), manifest["shard_size"]
    starts = range(0, manifest["count"], size)
    parts: list[Any] = [manifest["images"] if files is None else files[start : start + size] for start in starts]
    if prompts is not None:
        parts = [[part, prompts.texts[start : start + size]] for part, start in zip(parts, starts, strict=True)]
    return [hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16] for part in parts]


def _check_directory(out: Path, manifest: dict[str, Any]) -> bool:
    """Check that a cache may be begun here or continued; return whether its manifest is to be written."""
    if not (out / MANIFEST).is_file():
        others = out.is_dir() and any(not entry.name.startswith(".") for entry in out.iterdir())
        # asked again, because another process may have written it meanwhile
        if others and not (out / MANIFEST).is_file():
            raise InputError(f"{out} is not empty and holds no latents; choose another --out")
        return True
    earlier = read_manifest(out)
    key = find_difference(manifest, earlier)
    if key is not None:
        raise InputError(
            f"{out} was begun with {key} {_short(earlier.get(key))}, now it is {_short(manifest[key])};"
            " choose another --out or the same options"
        )
    if earlier["source"] is None:
        warnings.warn(f"{out} was begun by an earlier version, which did not record its images", stacklevel=2)
        return False
    if len(earlier["source"]) != len(manifest["source"]):
        raise InputError(
            f"{out / MANIFEST} is damaged: it has {len(earlier['source'])} hashes of images for"
            f" {len(manifest['source'])} shards"
        )
    # Images of shards that are still missing may have been replaced, such as one that could not be read.
    differ = "names, sizes or prompts" if "prompts" in manifest else "names or sizes"
    for number, (before, now) in enumerate(zip(earlier["source"], manifest["source"], strict=True)):
        if before != now and (out / shard_name(number)).is_file():
            raise InputError(
                f"{out} holds latents of other images than {manifest['images']}: {differ} differ"
                f" (first in {shard_name(number)}, made from {earlier['images']}); choose another --out"
            )
    return bool(earlier["source"] != manifest["source"])


def _missing(out: Path, manifest: dict[str, Any], processes: Processes) -> list[int]:
    own = range(processes.rank, count_shards(manifest), processes.world_size)
    return [number for number in own if not _is_complete(out, number, manifest)]


def _remove_leftovers(out: Path, processes: Processes) -> None:
    """Delete what a killed process was writing of the shards of this one, and with one process of all other files."""
    for entry in out.iterdir():
        if not is_temporary(entry.name):
            continue
        shard = _SHARD_NUMBER.match(entry.name)  # other files may be in the making by other processes
        is_own = processes.world_size == 1 if shard is None else int(shard[1]) % processes.world_size == processes.rank
        if is_own:
            entry.unlink(missing_ok=True)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _is_complete(out: Path, number: int, manifest: dict[str, Any]) -> bool:
    if not (out / shard_name(number)).is_file():
        return False
    try:
        check_shard(out, number, manifest)
    except InputError:
        return False
    return True


def _batches(number: int, manifest: dict[str, Any], batch_size: int) -> Iterator[list[int]]:
    """Indices of the images of a shard, in batches that depend on nothing but the shard and `batch_size`."""
    first = number * manifest["shard_size"]
    last = first + shard_length(number, manifest)
    for start in range(first, last, batch_size):
        yield list(range(start, min(start + batch_size, last)))


def _encode(autoencoder: Autoencoder, pixels: Tensor, manifest: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of a shard for a batch of uint8 images [B, C, H, W] or clips [B, C, T, H, W]."""
    stored = {}
    for suffix, images in (("", pixels), ("_flipped", pixels.flip(-1)))[: 1 + manifest["flip"]]:
        if autoencoder.module is None:
            stored[f"mean{suffix}"] = images
            continue
        mean, std = autoencoder.moments(images / 255)
        stored[f"mean{suffix}"] = mean.to("cpu", DTYPES[manifest["dtype"]])
        if manifest["store"] == "moments" and std is not None:
            stored[f"std{suffix}"] = std.to("cpu", DTYPES[manifest["dtype"]])
    return stored


@dataclass(frozen=True)
class Cached:
    """Result of `cache_latents`, of one process.

    Args:
        out: Directory of the cache.
        written: Number of shards that the process wrote, or would write in a dry run.
        shards: Number of all shards; None after a dry run.
        shape: Shape of a sample's latents; None after a dry run.
        rank: Number of the process.
        world_size: Number of processes.
        full_prompts: Number of prompts that fill all tokens of the text encoder, in the shards that it wrote.
    """

    out: Path
    written: int
    shards: int | None
    shape: tuple[int, ...] | None
    rank: int
    world_size: int
    full_prompts: int = 0

    def __str__(self) -> str:
        who = f"process {self.rank} of {self.world_size} " if self.world_size > 1 else ""
        if self.shape is None:
            return f"{self.out}: {who}would write {self.written} shards"
        cut = f"; prompts that fill all tokens, where longer ones are cut: {self.full_prompts}"
        wrote = f"wrote {self.written} of {self.shards} shards, latents {[*self.shape]}"
        return f"{self.out}: {who}{wrote}{cut if self.full_prompts else ''}"


def cache_latents(request: CacheRequest) -> Cached:
    """Encode images or videos into latents; the same request again goes on with the missing shards.

    Raises:
        InputError: Wrong input, before anything is written; see also `write_cache`.
    """
    processes = process_numbers()
    check_sources(request)
    device = open_device(request.device or default_device(), processes.local_rank)
    autoencoder = load_autoencoder(request.vae, device, DTYPES[request.encoder_dtype])
    if request.gray:
        autoencoder.image_channels = 1
    dataset, split = request.dataset or ("videos" if is_clips(request) else "folder"), request.split or "train"
    shape = (autoencoder.image_channels, *cache_sizes(request)[0])
    wanted = SplitRequest(
        dataset,
        split,
        shape,
        "caching",
        root=request.root,
        background=request.background,
        needs_labels=request.prompts is None or request.skip_unlabelled,
        skip_unlabelled=request.skip_unlabelled,
    )
    sizes = cache_sizes(request)
    opened = [open_at_size(request, wanted, autoencoder, size) for size in sizes]
    first, clip = opened[0]
    texts = None
    if request.prompts is not None:
        place = Path(str(request.images or request.videos))
        texts = read_prompts(request.prompts, first, place if place.is_dir() else place.parent)
        encoder = TextEncoder(request.vae, device, DTYPES[request.encoder_dtype])
    origin = request.images or request.videos or " ".join(filter(None, (dataset, request.root, split)))
    jobs: list[_Job] = []
    for size, (source, _), indices in zip(sizes, opened, deal_to_sizes(first, sizes), strict=True):
        if not indices:
            say(f"no file is nearest to {size[0]}x{size[1]}: this size gets no cache")
            continue
        prompts = None if texts is None else Prompts([texts[index] for index in indices], encoder)
        of_size = replace(request, out=request.out / f"{size[0]}x{size[1]}") if request.sizes else request
        whole = Part(source, indices) if request.sizes else source
        jobs.append((whole, of_size, prompts, size if request.sizes else None))

    def write(job: _Job, dry_run: bool) -> int:
        source, of_size, prompts, size = job
        of_size = replace(of_size, dry_run=dry_run)
        return write_cache(source, autoencoder, of_size, origin, clip, processes, prompts, size)

    if len(jobs) > 1 and not request.dry_run:  # all sizes are checked, and their folders tell that more is to come
        for job in jobs:
            write(job, True)
        for job in jobs:
            job[1].out.mkdir(parents=True, exist_ok=True)
    written = sum(write(job, request.dry_run) for job in jobs)
    full = sum(prompts.full for _, _, prompts, _ in jobs if prompts is not None)
    if request.dry_run:
        return Cached(request.out, written, None, None, processes.rank, processes.world_size)
    manifests = [read_manifest(of_size.out) for _, of_size, _, _ in jobs]
    shards, shape = sum(map(count_shards, manifests)), tuple(manifests[0]["shape"])
    return Cached(request.out, written, shards, shape, processes.rank, processes.world_size, full)
