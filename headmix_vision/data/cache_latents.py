"""Encode images into latents once, for training: `headmix-cache-latents --help`.

    headmix-cache-latents --images /data/imagenet/train --vae /models/sd-vae-ft-ema --flip \\
        --image-size 256 --out /data/latents256
    torchrun --nproc-per-node 8 --no-python headmix-cache-latents ...    # shards are dealt to the processes

An interrupted run goes on with the shards that are missing. The same latents come out of any number of processes. The
names and sizes of the images are recorded: a cache is not continued with others than its shards were made of.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from headmix_vision.console.arguments import OneLineParser
from headmix_vision.console.devices import default_device, open_device
from headmix_vision.console.processes import process_numbers
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import Source, SplitRequest
from headmix_vision.data.datasets.folders import open_class_folders
from headmix_vision.data.datasets.image_files import ImageFiles, find_images
from headmix_vision.data.datasets.latents import STORES, count_shards, read_manifest
from headmix_vision.data.latent_cache import DTYPES, write_cache
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.models.autoencoders import PIXELS, load_autoencoder


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
    with one_line_errors():
        processes = process_numbers()
        _check_sources(options)
        device = open_device(options.device, processes.local_rank)
        autoencoder = load_autoencoder(options.vae, device, DTYPES[options.encoder_dtype])
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
            rank=processes.rank,
            world_size=processes.world_size,
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
    parser.add_argument("--dataset", help="instead of --images: a data set as in headmix-train-cls (folder)")
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
    parser.add_argument("--device", default=default_device(), help="where to run")
    parser.add_argument("--dry-run", action="store_true", help="check everything, encode one image, write nothing")
    return parser


if __name__ == "__main__":
    main()
