"""`headmix evaluate`: score generated images and clips, and classifiers."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headmix_vision.console.terminal import OneLineParser, importing
from headmix_vision.errors import literals, one_line_errors

if TYPE_CHECKING:
    from headmix_vision.evaluation.score_job import Scored
    from headmix_vision.evaluation.score_request import Evaluation

_DESCRIPTION = """Score generated images (fid, kid, is, prc, accuracy, neighbours) and clips (fvd, moving-digits).

--real and --fake are a folder of images, an npz file of ADM (images, or mu and sigma), a statistics file (.safetensors)
or a data set NAME[:SPLIT][SLICE]. `stats` keeps the statistics of real images, to read the images only once. Clips are
a folder of videos, of animated PNGs or of folders of frames, an npz file [N, T, H, W, C], or a data set of clips.
Processes of torchrun share the work: torchrun --nproc-per-node 8 --no-python -- headmix evaluate fid ...
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    with one_line_errors():
        request = _request(vars(_parser().parse_args(args)))
    with importing("evaluate"):
        from headmix_vision.evaluation.score_job import evaluate
    with one_line_errors():
        evaluate(request, _show)


def _show(scored: "Scored") -> None:
    for note in scored.warnings:
        print(f"warning: {note}", file=sys.stderr)
    print(scored, flush=True)


def _parser() -> argparse.ArgumentParser:
    from headmix_vision.evaluation.score_request import CLIP_METRICS, METRICS

    parser = OneLineParser(
        prog="headmix evaluate", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="metric", required=True)
    for name, metric in METRICS.items():
        command = commands.add_parser(name, help=metric.help)
        if metric.compares:
            command.add_argument("--real", required=True, help="real images, or for fid their statistics")
        command.add_argument("--fake", required=True, help="generated images, or for fid their statistics")
        if metric.takes_labels:
            about = "leave out, and count, images of a data set that have no valid label"
            command.add_argument("--skip-unlabelled", action="store_true", help=about)
        if metric.takes_held_out:
            command.add_argument("--held-out", required=True, help="real images that were not trained on")
        _add_image_options(command)
        for option, (default, about) in metric.options.items():
            command.add_argument(f"--{option.replace('_', '-')}", type=int, default=default, help=about)
    command = commands.add_parser("stats", help="keep the statistics of real images in a file")
    command.add_argument("--real", required=True, help="real images")
    _add_image_options(command, writes=True)
    for name, add in {"fvd": _add_fvd, "moving-digits": _add_moving_digits}.items():
        command = commands.add_parser(name, help=CLIP_METRICS[name].help)
        add(command)
        _add_common(command, "clips", 16)
    return parser


def _add_image_options(parser: argparse.ArgumentParser, writes: bool = False) -> None:
    about = "inception, digits, lite0:PATH, or a run or weights file (inception)"
    parser.add_argument("--features", default="inception", help=about)
    _add_common(parser, "images", 64, writes)


def _add_common(parser: argparse.ArgumentParser, what: str, batch_size: int, writes: bool = False) -> None:
    add = parser.add_argument
    add("--out", required=writes, help="file to write")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    add("--root", help="place of a data set that needs one")
    add("--image-size", type=int, help=f"scale and centre-crop all {what} to this size first")
    add("--background", default="white", help="colour behind transparent pixels (white)")
    add("--batch-size", type=int, default=batch_size, help=f"{what} at a time ({batch_size})")
    add("--device", help="for example cuda:1 (a GPU if there is one)")
    add("--incomplete", action="store_true", help="score folders of samples that are not complete")
    add("--dry-run", action="store_true", help="open and check everything, score nothing")


def _add_fvd(parser: argparse.ArgumentParser) -> None:
    from headmix_vision.evaluation.score_request import KID_SUBSETS, FvdRequest

    add = parser.add_argument
    add("--real", required=True, help="real clips: a folder, an npz file or a data set")
    add("--fake", required=True, help="generated clips, likewise")
    add("--features", default="i3d", help="i3d, its TorchScript file (.pt), digits[:PATH], or an image extractor (i3d)")
    add("--features-sha256", metavar="HASH", help="SHA-256 of the TorchScript file, without which it is not opened")
    add("--frame-features", help="image extractor of frame_fid, as for images (as --features)")
    protocols = literals(FvdRequest, "protocol")
    add("--protocol", default="stylegan-v", choices=protocols, help="how clips are sampled (stylegan-v)")
    add("--frames", type=int, default=16, help="frames of a clip (16)")
    add("--count", type=int, help="at most so many clips of a side (as the protocol says, 2048)")
    for side in ("real", "fake"):
        add(f"--{side}-stride", type=int, help=f"frame stride of {side} clips (as the protocol says)")
        offsets = literals(FvdRequest, f"{side}_offset")
        add(f"--{side}-offset", choices=offsets, help=f"where {side} clips begin in their files")
    add("--mirror-real", action="store_true", help="score real clips a second time, mirrored")
    add("--skip-short", action="store_true", help="leave out, and count, clips of too few frames")
    add("--seed", type=int, default=0, help="seed of offsets, of the choice of clips and of the controls (0)")
    add("--subsets", type=int, default=KID_SUBSETS, help=f"random subsets of the kernel distance ({KID_SUBSETS})")
    add("--subset-size", type=int, help="clips in each (1000, or as many as there are)")


def _add_moving_digits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--fake", required=True, help="generated clips with labels: a folder of samples or an npz file")
    add("--real", default="moving_digits", help="real clips, for the judge's ceiling (moving_digits)")
    add("--features", default="digits", help="a classifier of the ten digits: digits, a run or a weights file")
    add("--count", type=int, help="at most so many clips of a side (as many as there are generated ones)")
    add("--frame-rate", "--fps", type=float, help="frames a second of the clips (the rate of the samples)")


def _request(options: dict[str, Any]) -> "Evaluation":
    from headmix_vision.evaluation.score_request import METRICS, FvdRequest, MovingDigitsRequest, ScoreRequest

    clips = {"fvd": FvdRequest, "moving-digits": MovingDigitsRequest}
    if options["metric"] in clips:
        return clips[options["metric"]](**options)
    metric = METRICS.get(options["metric"])
    numbers = {name: options.pop(name) for name in (metric.options if metric else ())}
    return ScoreRequest(**options, options=numbers)
