"""Encode images into latents once, for training: `headmix-cache-latents --help`.

    headmix-cache-latents --images /data/imagenet/train --vae /models/sd-vae-ft-ema --flip \\
        --image-size 256 --out /data/latents256
    torchrun --nproc-per-node 8 --no-python headmix-cache-latents ...    # shards are dealt to the processes

An interrupted run goes on with the shards that are missing. The same latents come out of any number of processes. The
names and sizes of the images are recorded: a cache is not continued with others than its shards were made of.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from headmix_vision.console.arguments import OneLineParser
from headmix_vision.console.devices import open_device
from headmix_vision.console.progress import progress
from headmix_vision.data.center_crop import center_crop
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import PIL_MODES, Source, SplitRequest, to_picture
from headmix_vision.data.datasets.folders import open_class_folders
from headmix_vision.data.datasets.image_files import ImageFiles, find_images
from headmix_vision.data.datasets.latents import (
    FORMAT,
    MANIFEST,
    STORES,
    check_shard,
    count_shards,
    read_manifest,
    shard_length,
    shard_name,
)
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.files.atomic import atomic_path, check_place, is_temporary
from headmix_vision.files.locks import hold_lock
from headmix_vision.files.tensor_files import write_tensors
from headmix_vision.models.autoencoders import PIXELS, Autoencoder, load_autoencoder

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SHARD_NUMBER = re.compile(r"\.shard-(\d+)\.")


class CroppedImages(Dataset[tuple[Tensor, int]]):
    """Centre-cropped images of a source, uint8 [C, size, size], with their label.

    Args:
        source: The images.
        size: Side in pixels.
        mode: PIL mode, `L` or `RGB`.
    """

    def __init__(self, source: Source, size: int, mode: str) -> None:
        self.source = source
        self.size = size
        self.mode = mode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from torchvision.transforms.functional import pil_to_tensor

        try:
            image, label = self.source.read(index)
        except Exception as error:  # decoders raise whatever comes to mind on a damaged file
            raise InputError(f"{self.source.name(index)} cannot be read ({type(error).__name__}: {error})") from None
        return pil_to_tensor(center_crop(to_picture(image).convert(self.mode), self.size)), max(label, 0)


def write_cache(
    source: Source,
    autoencoder: Autoencoder,
    out: Path,
    *,
    image_size: int,
    origin: str,
    flip: bool = False,
    store: str = "moments",
    dtype: str = "float16",
    batch_size: int = 32,
    shard_size: int = 4096,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    dry_run: bool = False,
) -> int:
    """Encode what is missing of this process's share of a cache.

    Args:
        source: The images.
        autoencoder: What to encode with.
        out: Directory of the cache.
        image_size: Images are centre-cropped to this many pixels, as ADM does.
        origin: Where the images came from, for the record.
        flip: Store the latents of mirrored images too.
        store: `moments` (mean and standard deviation) or `means`; an autoencoder without moments stores means.
        dtype: Type on disk: float32, float16 or bfloat16; pixels are uint8.
        batch_size: Images at a time.
        shard_size: Images in a file.
        workers: Processes that read images.
        rank: This process: it writes shards rank, rank + world_size, ...
        world_size: Number of processes.
        dry_run: Check everything, encode the first image, write nothing.

    Returns:
        Number of shards written, or to be written.

    Raises:
        InputError: An option out of range; a directory that holds something else, shards of other images or with
            other settings, or that another process writes to; an unreadable image; latents that are not finite.
    """
    if not 0 <= rank < world_size:
        raise InputError(f"rank is {rank}, it must be in [0, {world_size}), the number of processes")
    if len(source) == 0:
        raise InputError(f"{origin} has no images")
    check_place(out)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, --out must be a directory")
    for name, value in (("image size", image_size), ("batch size", batch_size), ("shard size", shard_size)):
        if value < 1:
            raise InputError(f"{name} is {value}, it must be at least 1")
    if workers < 0:
        raise InputError(f"workers is {workers}, it must be at least 0")
    if store not in STORES:
        raise InputError(f"store is {store!r}, it must be moments or means")
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}, it must be one of {', '.join(DTYPES)}")
    autoencoder.check_size(image_size, image_size)
    mode = PIL_MODES[autoencoder.image_channels]
    images = CroppedImages(source, image_size, mode)
    mean, std = autoencoder.moments(images[0][0][None] / 255)
    manifest = {
        "format": FORMAT,
        "count": len(source),
        "shape": list(mean.shape[1:]),
        "shard_size": shard_size,
        "store": "means" if std is None else store,
        "dtype": "uint8" if autoencoder.module is None else dtype,
        "flip": flip,
        "image_size": image_size,
        "crop": "adm_center",
        "images": origin,
        "class_names": source.class_names,
        "autoencoder": autoencoder.description,
    }
    manifest["source"] = _source_hashes(source, manifest)
    if dry_run:
        _check_directory(out, manifest)
        return len(_missing(out, manifest, rank, world_size))
    with hold_lock(out / f".process-{rank}.lock", f"cache {out}"):
        changed = _check_directory(out, manifest)
        _remove_leftovers(out, rank, world_size)
        if changed:
            with atomic_path(out / MANIFEST) as temporary:
                temporary.write_text(json.dumps(manifest, indent=2) + "\n")
        todo = _missing(out, manifest, rank, world_size)
        _write_shards(images, autoencoder, out, manifest, todo, batch_size, workers, show=rank == 0)
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
) -> None:
    batches = [batch for number in todo for batch in _batches(number, manifest, batch_size)]
    loader: Any = DataLoader(images, batch_sampler=batches, num_workers=workers, worker_init_fn=_ignore_interrupts)
    described = {name: value for name, value in manifest.items() if name != "source"}
    with progress("caching", sum(map(len, batches)), "images", enabled=show) as advance:
        stream = iter(loader)
        for number in todo:
            parts: dict[str, list[Tensor]] = {}
            for indices in _batches(number, manifest, batch_size):
                pixels, labels = next(stream)
                latents = _encode(autoencoder, pixels, manifest)
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
            write_tensors(out / shard_name(number), tensors, {"latents": json.dumps(described)})


def _ignore_interrupts(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started the workers ends them


def _source_hashes(source: Source, manifest: dict[str, Any]) -> list[str]:
    """Hashes the names and sizes of each shard's images; where there are no files, the name of the data set."""
    files, size = source.files(), manifest["shard_size"]
    starts = range(0, manifest["count"], size)
    parts = [manifest["images"] if files is None else files[start : start + size] for start in starts]
    return [hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16] for part in parts]


def _check_directory(out: Path, manifest: dict[str, Any]) -> bool:
    """Checks that a cache may be begun here or continued; tells whether its manifest is to be written."""
    if not (out / MANIFEST).is_file():
        others = out.is_dir() and any(not entry.name.startswith(".") for entry in out.iterdir())
        # asked again, because another process may have written it meanwhile
        if others and not (out / MANIFEST).is_file():
            raise InputError(f"{out} is not empty and holds no latents; choose another --out")
        return True
    earlier = read_manifest(out)
    # where weights and images lie may change, what they are may not
    for key, value in manifest.items():
        if key not in ("images", "source") and _without_source(earlier.get(key)) != _without_source(value):
            raise InputError(
                f"{out} was begun with {key} {_short(earlier.get(key))}, now it is {_short(value)};"
                " choose another --out or the same options"
            )
    if earlier["source"] is None:
        warnings.warn(f"{out} was begun by an earlier version, which did not record its images", stacklevel=2)
        return False
    # Images of shards that are still missing may have been replaced, such as one that could not be read.
    for number, (before, now) in enumerate(zip(earlier["source"], manifest["source"], strict=True)):
        if before != now and (out / shard_name(number)).is_file():
            raise InputError(
                f"{out} holds latents of other images than those of {manifest['images']}: names or sizes differ"
                f" (first in {shard_name(number)}, made from {earlier['images']}); choose another --out"
            )
    return bool(earlier["source"] != manifest["source"])


def _missing(out: Path, manifest: dict[str, Any], rank: int, world_size: int) -> list[int]:
    return [n for n in range(rank, count_shards(manifest), world_size) if not _is_complete(out, n, manifest)]


def _remove_leftovers(out: Path, rank: int, world_size: int) -> None:
    """Deletes what a killed process was writing of the shards of this one."""
    for entry in out.iterdir():
        shard = _SHARD_NUMBER.match(entry.name) if is_temporary(entry.name) else None
        if shard is not None and int(shard[1]) % world_size == rank:
            entry.unlink(missing_ok=True)


def _without_source(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "source"} if isinstance(value, dict) else value


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
    """Tensors of a shard for a batch of uint8 images [B, C, H, W]."""
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


def open_images(images: str | None, request: SplitRequest) -> Source:
    """Open the images to encode: a folder (of class folders, or of images alone, which have label 0) or a data set.

    Raises:
        InputError: Nothing there, or a data set that cannot be cached.
    """
    if images is None:
        return open_source(request)
    folder = Path(images)
    if not folder.is_dir():
        raise InputError(f"--images {images} is no folder")
    files = find_images(images, "--images")
    if any(path.parent == folder for path in files):
        return ImageFiles(files, request.mode)
    return open_class_folders(folder, request.mode)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    options = _parser().parse_args(args)
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    with one_line_errors():
        _check_sources(options)
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if options.device == "cuda" else options.device
        autoencoder = load_autoencoder(options.vae, open_device(device), DTYPES[options.encoder_dtype])
        if options.gray:
            autoencoder.image_channels = 1
        shape = (autoencoder.image_channels, options.image_size, options.image_size)
        dataset, split = options.dataset or "folder", options.split or "train"
        request = SplitRequest(dataset, split, shape, "caching", root=options.root)
        written = write_cache(
            open_images(options.images, request),
            autoencoder,
            options.out,
            image_size=options.image_size,
            origin=options.images or " ".join(filter(None, (dataset, options.root, split))),
            flip=options.flip,
            store=options.store,
            dtype=options.dtype,
            batch_size=options.batch_size,
            shard_size=options.shard_size,
            workers=options.workers,
            rank=rank,
            world_size=world_size,
            dry_run=options.dry_run,
        )
        if options.dry_run:
            print(f"{options.out}: would write {written} shards")
            return
        manifest = read_manifest(options.out)
        print(f"{options.out}: wrote {written} of {count_shards(manifest)} shards, latents {manifest['shape']}")


def _check_sources(options: argparse.Namespace) -> None:
    if options.images is None and options.dataset is None and options.root is None:
        raise InputError("neither --images nor --dataset is given")
    for name in ("dataset", "root", "split"):
        if options.images is not None and getattr(options, name) is not None:
            raise InputError(f"--images names the images already, leave out --{name}")
    if options.gray and options.vae != PIXELS:
        raise InputError(f"--gray goes with --vae {PIXELS} alone, --vae is {options.vae}")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="headmix-cache-latents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--images", help="folder with a folder of images per class, or with images alone")
    parser.add_argument("--dataset", help="instead of --images: a data set as in train_cls.py (folder)")
    parser.add_argument("--root", help="place of the data set")
    parser.add_argument("--split", help="split of the data set (train)")
    parser.add_argument("--vae", required=True, help="directory or hub id of an image autoencoder, or none: pixels")
    parser.add_argument("--out", type=Path, required=True, help="directory to write, or to go on with")
    parser.add_argument("--image-size", type=int, default=256, help="centre crop in pixels (256)")
    parser.add_argument("--flip", action="store_true", help="store mirrored images too")
    parser.add_argument("--gray", action="store_true", help="one channel; with --vae none only")
    parser.add_argument("--store", choices=STORES, default="moments", help="sampled at load, or not")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float16", help="type on disk (float16)")
    parser.add_argument("--encoder-dtype", choices=tuple(DTYPES), default="float32", help="type to encode in")
    parser.add_argument("--batch-size", type=int, default=32, help="images at a time (32)")
    parser.add_argument("--shard-size", type=int, default=4096, help="images in a file (4096)")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images (4)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--dry-run", action="store_true", help="check everything, encode one image, write nothing")
    return parser


if __name__ == "__main__":
    main()
