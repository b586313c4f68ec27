"""`headmix index-shards`: make the index of a folder of tar shards."""

import argparse
import sys
from collections.abc import Sequence

from headmix_vision.console import OneLineParser, importing, one_line_errors
from headmix_vision.errors import require_extra

_DESCRIPTION = """Make the index of a folder of tar shards, once, for `dataset: shards`.

    headmix index-shards /data/imagenet/train                 # pictures with .cls
    headmix index-shards /data/clips --label class            # videos with an entry of .json as their label

Files of one name that stand together in a tar file are a sample, as in WebDataset: 000017.jpg, 000017.cls. Labels are
the texts of .cls where there are such files, or what --label names. Whole numbers count as the numbers of classes,
other texts are numbered in their order. Samples without a picture or video are left out, and counted. A sample without
a valid label among others is refused, unless --skip-unlabelled leaves it out.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    with one_line_errors():
        require_extra("diffusion", "headmix index-shards")
        options = vars(_parser().parse_args(args))
    with importing("index-shards"):
        from headmix_vision.data.shard_index import IndexRequest, index_shards
    with one_line_errors():
        indexed = index_shards(IndexRequest(**options))
        for name in indexed.left_out:
            print(f"left out {name}", file=sys.stderr)
        print(indexed)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="headmix index-shards", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", help="folder of the shards of a split")
    add("--label", help="entry of .json that is the label (the text of .cls)")
    add("--unlabelled", action="store_true", help="leave labels out")
    add("--skip-unlabelled", action="store_true", help="leave out, and count, samples without a valid label")
    add("--suffix", help="ending of the files that are the samples, where there are several")
    add("--check", action="store_true", help="read all samples, and leave out damaged ones")
    add("--workers", type=int, default=4, help="processes that read shards (4)")
    return parser
