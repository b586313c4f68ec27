"""`headmix cache-latents`: encode images or videos into latents."""

import argparse
from collections.abc import Sequence

from headmix_vision.checks import literals
from headmix_vision.cli.starting import importing
from headmix_vision.console.arguments import OneLineParser
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.errors import one_line_errors
from headmix_vision.extras import require_extra

_DESCRIPTION = r"""Encode images or videos into latents once, for training.

    headmix cache-latents --images /data/imagenet/train --vae /models/sd-vae-ft-ema --flip \
        --image-size 256 --out /data/latents256
    headmix cache-latents --videos /data/ucf101 --frames 17 --frame-rate 12.5 --vae /models/wan-vae \
        --image-size 256 --out /data/clips256
    torchrun --nproc-per-node 8 --no-python headmix cache-latents ...    # shards are dealt to the processes

An interrupted job goes on with the missing shards. The same latents come out of any number of processes. The names and
sizes of the files are recorded: a cache is not continued with other files than its shards were made of.

--videos is a folder with a folder for each class, of video files or of folders of frames, a folder of these alone, or a
table .csv with the columns path and label, and, where there are such columns, split, start and end (numbers of frames).
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    with one_line_errors():
        require_extra("diffusion", "headmix cache-latents")
        request = CacheRequest(**vars(_parser().parse_args(args)))
    with importing("cache-latents"):
        from headmix_vision.data.latent_cache import cache_latents
    with one_line_errors():
        print(cache_latents(request))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="headmix cache-latents", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, types = parser.add_argument, literals(CacheRequest, "dtype")
    add("--images", help="folder with a folder of images per class, or with images alone")
    add("--videos", help="folder or table of videos: latents of clips")
    add("--frames", type=int, help="frames of a clip")
    add("--frame-rate", "--fps", type=float, help="frames a second of a clip (those of the video)")
    add("--stride", type=int, help="frame stride instead: every so many frames of the video (1)")
    add("--clips-per-video", type=int, default=1, help="clips of each video, in even distances (1)")
    add("--skip-unusable", action="store_true", help="leave out videos that are too short or cannot be read")
    add("--dataset", help="instead: a data set as in headmix train-cls or headmix train-gen (folder)")
    add("--root", help="place of the data set")
    add("--split", help="split of the data set (train)")
    add("--vae", required=True, help="directory or hub id of an autoencoder of images or videos; none: pixels")
    add("--out", required=True, help="directory to write, or to go on with")
    add("--image-size", type=int, default=256, help="centre crop in pixels (256)")
    add("--flip", action="store_true", help="store mirrored images too")
    add("--gray", action="store_true", help="one channel; with --vae none only")
    add("--background", default="white", help="colour behind transparent pixels (white)")
    add("--skip-unlabelled", action="store_true", help="leave out, and count, samples without a valid label")
    add("--store", choices=literals(CacheRequest, "store"), default="moments", help="sampled at load, or not")
    add("--dtype", choices=types, default="float16", help="type on disk (float16)")
    add("--encoder-dtype", choices=types, default="float32", help="type to encode in (float32)")
    add("--batch-size", type=int, help="images at a time (32), or clips (4)")
    add("--shard-size", type=int, help="images in a file (4096), or clips (256)")
    add("--workers", type=int, default=4, help="processes that read images or clips (4)")
    add("--device", help="for example cuda:1 (a GPU if there is one)")
    add("--dry-run", action="store_true", help="check everything, encode one image or clip, write nothing")
    return parser
