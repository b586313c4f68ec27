"""`headmix cache-latents`: encode images or videos into latents."""

import argparse
from collections.abc import Sequence

from headmix_vision.console import OneLineParser, add_options, importing, one_line_errors
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.errors import require_extra

_DESCRIPTION = r"""Encode images or videos into latents once, for training.

    headmix cache-latents --images /data/imagenet/train --vae /models/sd-vae-ft-ema --flip \
        --image-size 256 --out /data/latents256
    headmix cache-latents --videos /data/ucf101 --frames 17 --frame-rate 12.5 --vae /models/wan-vae \
        --image-size 256 --out /data/clips256
    torchrun --nproc-per-node 8 --no-python headmix cache-latents ...    # shards are dealt to the processes

The same command resumes an interrupted job. Latents do not depend on the number of processes. The cache records names
and sizes of its files: it is not continued with other files.

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
    add_options(parser, CacheRequest)
    return parser
