"""Encode images into latents once, for training: `python -m headmix_vision.data.cache_latents --help`.

    python -m headmix_vision.data.cache_latents --images /data/imagenet/train --vae /models/sd-vae-ft-ema --flip \\
        --image-size 256 --out /data/latents256
    torchrun --nproc-per-node 8 -m headmix_vision.data.cache_latents ...    # shards are dealt to the processes

An interrupted run goes on with the shards that are missing. The same latents come out of any number of processes.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from headmix_vision.atomic import atomic_path
from headmix_vision.data.center_crop import center_crop
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import PIL_MODES, Source, SplitRequest, to_picture
from headmix_vision.data.datasets.folders import open_class_folders
from headmix_vision.data.datasets.image_files import ImageFiles, find_images
from headmix_vision.data.datasets.latents import FORMAT, MANIFEST, count_shards, read_manifest, shard_name
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.models.autoencoders import PIXELS, Autoencoder, load_autoencoder

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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

    Returns:
        Number of shards written.

    Raises:
        InputError: An option out of range, a directory that holds something else, or an unreadable image.
    """
    for name, value in (("image_size", image_size), ("batch_size", batch_size), ("shard_size", shard_size)):
        if value < 1:
            raise InputError(f"{name} is {value}, it must be at least 1")
    if workers < 0:
        raise InputError(f"workers is {workers}, it must be at least 0")
    if store not in ("moments", "means"):
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
    _settle_directory(out, manifest)
    todo = [n for n in range(rank, count_shards(manifest), world_size) if not _is_complete(out, n, manifest)]
    batches = [batch for number in todo for batch in _batches(number, manifest, batch_size)]
    loader: Any = DataLoader(images, batch_sampler=batches, num_workers=workers)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal or rank > 0) as bar:
        task = bar.add_task("images", total=sum(map(len, batches)))
        stream = iter(loader)
        for number in todo:
            parts: dict[str, list[Tensor]] = {}
            for _ in range(-(-_shard_length(number, manifest) // batch_size)):
                pixels, labels = next(stream)
                for key, tensor in {**_encode(autoencoder, pixels, manifest), "labels": labels}.items():
                    parts.setdefault(key, []).append(tensor)
                bar.advance(task, len(labels))
            tensors = {key: torch.cat(values).contiguous() for key, values in parts.items()}
            with atomic_path(out / shard_name(number)) as temporary:
                save_file(tensors, temporary, metadata={"latents": json.dumps(manifest)})
    return len(todo)


def _settle_directory(out: Path, manifest: dict[str, Any]) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, --out must be a directory")
    if not (out / MANIFEST).is_file():
        others = out.is_dir() and any(not entry.name.startswith(".") for entry in out.iterdir())
        # asked again, because another process may have written it meanwhile
        if others and not (out / MANIFEST).is_file():
            raise InputError(f"{out} is not empty and holds no latents; choose another --out")
        with atomic_path(out / MANIFEST) as temporary:
            temporary.write_text(json.dumps(manifest, indent=2) + "\n")
        return
    earlier = read_manifest(out)
    # where weights and images lie may change, what they are may not
    for key, value in manifest.items():
        if key != "images" and _without_source(earlier.get(key)) != _without_source(value):
            raise InputError(
                f"{out} was begun with {key} {_short(earlier.get(key))}, now it is {_short(value)};"
                " choose another --out or the same options"
            )


def _without_source(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "source"} if isinstance(value, dict) else value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _is_complete(out: Path, number: int, manifest: dict[str, Any]) -> bool:
    path = out / shard_name(number)
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as file:
            return bool(file.get_slice("labels").get_shape() == [_shard_length(number, manifest)])
    except (SafetensorError, OSError):
        return False


def _shard_length(number: int, manifest: dict[str, Any]) -> int:
    return int(min(manifest["shard_size"], manifest["count"] - number * manifest["shard_size"]))


def _batches(number: int, manifest: dict[str, Any], batch_size: int) -> Iterator[list[int]]:
    """Indices of the images of a shard, in batches that depend on nothing but the shard and `batch_size`."""
    first = number * manifest["shard_size"]
    last = first + _shard_length(number, manifest)
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
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    with one_line_errors():
        autoencoder = load_autoencoder(options.vae, device, DTYPES[options.encoder_dtype])
        if options.gray and options.vae == PIXELS:
            autoencoder.image_channels = 1
        shape = (autoencoder.image_channels, options.image_size, options.image_size)
        request = SplitRequest(options.dataset, options.split, shape, "caching", root=options.root)
        written = write_cache(
            open_images(options.images, request),
            autoencoder,
            options.out,
            image_size=options.image_size,
            origin=options.images or f"{options.dataset} {options.root or ''} {options.split}",
            flip=options.flip,
            store=options.store,
            dtype=options.dtype,
            batch_size=options.batch_size,
            shard_size=options.shard_size,
            workers=options.workers,
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
        )
    manifest = read_manifest(options.out)
    print(f"{options.out}: wrote {written} of {count_shards(manifest)} shards, latents {manifest['shape']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headmix_vision.data.cache_latents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--images", help="folder with a folder of images per class, or with images alone")
    parser.add_argument("--dataset", default="folder", help="instead of --images: a data set as in train_cls.py")
    parser.add_argument("--root", help="place of the data set")
    parser.add_argument("--split", default="train", help="split of the data set (train)")
    parser.add_argument("--vae", required=True, help="directory or hub id of an image autoencoder, or none: pixels")
    parser.add_argument("--out", type=Path, required=True, help="directory to write, or to go on with")
    parser.add_argument("--image-size", type=int, default=256, help="centre crop in pixels (256)")
    parser.add_argument("--flip", action="store_true", help="store mirrored images too")
    parser.add_argument("--gray", action="store_true", help="one channel; with --vae none only")
    parser.add_argument("--store", choices=("moments", "means"), default="moments", help="sampled at load, or not")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float16", help="type on disk (float16)")
    parser.add_argument("--encoder-dtype", choices=tuple(DTYPES), default="float32", help="type to encode in")
    parser.add_argument("--batch-size", type=int, default=32, help="images at a time (32)")
    parser.add_argument("--shard-size", type=int, default=4096, help="images in a file (4096)")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images (4)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    return parser


if __name__ == "__main__":
    main()
