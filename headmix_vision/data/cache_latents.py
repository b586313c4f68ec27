"""Encode images or videos into latents once, for training: `headmix-cache-latents --help`.

    headmix-cache-latents --images /data/imagenet/train --vae /models/sd-vae-ft-ema --flip \\
        --image-size 256 --out /data/latents256
    headmix-cache-latents --videos /data/ucf101 --frames 17 --frame-rate 12.5 --vae /models/wan-vae \\
        --image-size 256 --out /data/clips256
    torchrun --nproc-per-node 8 --no-python headmix-cache-latents ...    # shards are dealt to the processes

An interrupted run goes on with the shards that are missing. The same latents come out of any number of processes. The
names and sizes of the files are recorded: a cache is not continued with others than its shards were made of.

--videos is a folder with a folder for each class, of video files or of folders of frames, a folder of these alone, or a
table .csv with the columns path and label, and, where there are such columns, split, start and end (numbers of frames).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headmix_vision.checks import check_counts
from headmix_vision.console.arguments import OneLineParser
from headmix_vision.console.devices import default_device, open_device
from headmix_vision.console.notes import say_left_out
from headmix_vision.console.processes import process_numbers
from headmix_vision.data.clips import ClipConfig
from headmix_vision.data.datasets import find_dataset, open_source
from headmix_vision.data.datasets.base import ClipSource, Source, SplitRequest
from headmix_vision.data.datasets.folders import find_class_folders, open_class_folders
from headmix_vision.data.datasets.image_files import ImageFiles
from headmix_vision.data.datasets.latents import STORES, count_shards, read_manifest
from headmix_vision.data.datasets.moving_digits import MovingDigits
from headmix_vision.data.datasets.videos import open_video_folder
from headmix_vision.data.latent_cache import DTYPES, EvenClips, write_cache
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.files.pictures import check_background
from headmix_vision.models.autoencoders import PIXELS, Autoencoder, load_autoencoder


def open_images(images: str | None, request: SplitRequest) -> Source:
    """Open the images to encode: a folder (of class folders, or of images alone, which have label 0) or a data set.

    Raises:
        InputError: Nothing there, a data set that cannot be cached, or an image without a valid label.
    """
    if images is None:
        return open_source(request)
    folder = Path(images)
    if not images or not folder.is_dir():
        raise InputError(f"--images {images} is not a folder" if images else "--images is '', it must be a folder")
    listing = find_class_folders(folder)
    listing.check_filled(f"--images {images!r}", "image")
    if any(path.parent != folder for path in listing.paths):
        return open_class_folders(folder, request, listing)
    say_left_out(folder, len(listing.paths), "pictures", listing.left_out)
    return ImageFiles(listing.paths, request.decoding)


def open_clips(
    videos: str | None, request: SplitRequest, clips_per_video: int = 1, skip_unusable: bool = False
) -> Source:
    """Open the clips to encode: a folder or table of videos, or a data set; names and counts the videos it skips.

    Raises:
        InputError: Nothing there, or a data set that cannot be cached, or not so many times.
    """
    if videos is not None and not Path(videos).exists():
        raise InputError(f"--videos {videos} does not exist")
    source = open_source(request) if videos is None else open_video_folder(Path(videos), request)
    if skip_unusable and isinstance(source, ClipSource):
        total, faults = len(source), source.leave_out_unusable()
        for number, fault in enumerate(faults, start=1):
            print(f"skipped {fault}, {number} of {total} videos", file=sys.stderr)
    if clips_per_video == 1:
        return source
    if not isinstance(source, ClipSource):
        raise InputError(f"--clips-per-video is {clips_per_video}, a sample of {request.name} is one clip")
    return EvenClips(source, clips_per_video)


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
        is_clips = _is_clips(options)
        dataset, split = options.dataset or ("videos" if is_clips else "folder"), options.split or "train"
        shape = (autoencoder.image_channels, options.image_size, options.image_size)
        request = SplitRequest(
            dataset,
            split,
            shape,
            "caching",
            root=options.root,
            background=options.background,
            skip_unlabelled=options.skip_unlabelled,
        )
        clip = None
        if is_clips:
            request, clip = _ask_for_clips(options, request, autoencoder)
            source = open_clips(options.videos, request, options.clips_per_video, options.skip_unusable)
            if isinstance(source, MovingDigits):
                clip["frame_rate"] = source.frame_rate
        else:
            source = open_images(options.images, request)
        written = write_cache(
            source,
            autoencoder,
            options.out,
            image_size=options.image_size,
            origin=options.images or options.videos or " ".join(filter(None, (dataset, options.root, split))),
            clip=clip,
            background=options.background,
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
        who = f"process {processes.rank} of {processes.world_size} " if processes.world_size > 1 else ""
        if options.dry_run:
            print(f"{options.out}: {who}would write {written} shards")
            return
        manifest = read_manifest(options.out)
        print(f"{options.out}: {who}wrote {written} of {count_shards(manifest)} shards, latents {manifest['shape']}")


def _ask_for_clips(
    options: argparse.Namespace, request: SplitRequest, autoencoder: Autoencoder
) -> tuple[SplitRequest, dict[str, Any]]:
    """Adds length and frame rate of the clips to a request; returns them for the record too."""
    if options.frames is None:
        raise InputError("--frames is not given: the number of frames of a clip")
    check_counts(1, frames=options.frames, clips_per_video=options.clips_per_video)
    autoencoder.check_size(options.image_size, options.image_size)
    autoencoder.check_frames(options.frames)
    config = ClipConfig(options.frame_rate, options.stride)
    channels, *size = request.shape
    record = {"frames": options.frames, **asdict(config), "clips_per_video": options.clips_per_video}
    return replace(request, shape=(channels, options.frames, *size), clip=config), record


def _is_clips(options: argparse.Namespace) -> bool:
    entry = find_dataset(options.dataset or "folder", "caching")
    return options.videos is not None or entry.is_clips or (3 in entry.grid_axes and options.frames is not None)


def _check_sources(options: argparse.Namespace) -> None:
    if options.images is None and options.videos is None and options.dataset is None and options.root is None:
        raise InputError("neither --images nor --videos nor --dataset is given")
    if options.images is not None and options.videos is not None:
        raise InputError("--images and --videos are both given, a cache holds one of them")
    for given in ("images", "videos"):
        for name in ("dataset", "root", *(("split",) if given == "images" else ())):
            if getattr(options, given) is not None and getattr(options, name) is not None:
                raise InputError(f"--{given} names the {given} already, leave out --{name}")
    clip_options = {"--frames": options.frames, "--frame-rate": options.frame_rate, "--stride": options.stride}
    is_clips = _is_clips(options)
    for name, value in clip_options.items():
        if not is_clips and value is not None:
            raise InputError(f"{name} is for videos, there are images")
    for name, given in (
        ("--clips-per-video", options.clips_per_video != 1),
        ("--skip-unusable", options.skip_unusable),
    ):
        if not is_clips and given:
            raise InputError(f"{name} is for videos, there are images")
    if options.flip and not find_dataset(options.dataset or "folder", "caching").can_flip:
        raise InputError(f"--flip does not apply to {options.dataset}: mirrored clips move the other way")
    check_background(options.background)
    if options.gray and options.vae != PIXELS:
        raise InputError(f"--gray goes with --vae {PIXELS} alone, --vae is {options.vae}")
    if options.vae == PIXELS and options.encoder_dtype != "float32":
        raise InputError(f"--encoder-dtype {options.encoder_dtype} applies to autoencoders, --vae is {PIXELS}")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="headmix-cache-latents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--images", help="folder with a folder of images per class, or with images alone")
    parser.add_argument("--videos", help="folder or table of videos: latents of clips")
    parser.add_argument("--frames", type=int, help="frames of a clip")
    parser.add_argument("--frame-rate", type=float, help="frames a second of a clip (those of the video)")
    parser.add_argument("--stride", type=int, help="instead: every so many frames of the video (1)")
    parser.add_argument("--clips-per-video", type=int, default=1, help="clips of each video, in even distances (1)")
    parser.add_argument("--skip-unusable", action="store_true", help="leave out videos that are too short or no videos")
    parser.add_argument("--dataset", help="instead: a data set as in headmix-train-cls or headmix-train-gen (folder)")
    parser.add_argument("--root", help="place of the data set")
    parser.add_argument("--split", help="split of the data set (train)")
    parser.add_argument(
        "--vae", required=True, help="directory or hub id of an autoencoder of images or videos; none: pixels"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write, or to go on with")
    parser.add_argument("--image-size", type=int, default=256, help="centre crop in pixels (256)")
    parser.add_argument("--flip", action="store_true", help="store mirrored images too")
    parser.add_argument("--gray", action="store_true", help="one channel; with --vae none only")
    parser.add_argument("--background", default="white", help="colour behind transparent pixels (white)")
    parser.add_argument("--skip-unlabelled", action="store_true", help="leave out, and count, what has no valid label")
    parser.add_argument("--store", choices=STORES, default="moments", help="sampled at load, or not")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float16", help="type on disk (float16)")
    parser.add_argument("--encoder-dtype", choices=tuple(DTYPES), default="float32", help="type to encode in")
    parser.add_argument("--batch-size", type=int, help="images at a time (32), or clips (4)")
    parser.add_argument("--shard-size", type=int, help="images in a file (4096), or clips (256)")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images or clips (4)")
    parser.add_argument("--device", default=default_device(), help="where to run")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, encode one image or clip, write nothing"
    )
    return parser


if __name__ == "__main__":
    main()
