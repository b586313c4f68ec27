"""`headmix evaluate`: score generated images and clips, and classifiers."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headmix_vision.console import OneLineParser, add_options, importing, one_line_errors, sentence

if TYPE_CHECKING:
    from headmix_vision.evaluation.score_request import Evaluation
    from headmix_vision.evaluation.scores import Scored

_DESCRIPTION = """Score images (fid, kid, is, prc, accuracy, neighbours), clips (fvd, moving-digits), features (probe).

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
        from headmix_vision.evaluation.scores import evaluate
    with one_line_errors():
        evaluate(request, _show)


def _show(scored: "Scored") -> None:
    for note in scored.warnings:
        print(f"warning: {note}", file=sys.stderr)
    print(scored, flush=True)


def _parser() -> argparse.ArgumentParser:
    from headmix_vision.evaluation import score_request as requests
    from headmix_vision.evaluation.score_request import (
        CLIP_METRICS,
        METRICS,
        REQUEST_METRICS,
        SIDES,
        STATISTICS,
        sides_of,
    )

    parser = OneLineParser(
        prog="headmix evaluate", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="metric", required=True)
    for name in (*METRICS, STATISTICS):
        metric, sides = METRICS.get(name), sides_of(name)
        about = "keep the statistics of real images in a file" if metric is None else metric.help
        unlabelled = () if metric is not None and metric.takes_labels else ("skip_unlabelled",)
        left_out = ("metric", "options", *unlabelled, *(side for side in SIDES if side not in sides))
        command = commands.add_parser(name, help=about, description=sentence(about))
        add_options(
            command, requests.ScoreRequest, leave_out=left_out, required=(*sides, *(("out",) if metric is None else ()))
        )
        for option, (default, about) in (metric.options if metric else {}).items():
            command.add_argument(f"--{option.replace('_', '-')}", type=int, default=default, help=about)
    for name, request in _own_requests().items():
        left_out = ("metric", *(() if name in CLIP_METRICS else ("incomplete",)))
        about = REQUEST_METRICS[name].help
        add_options(commands.add_parser(name, help=about, description=sentence(about)), request, leave_out=left_out)
    return parser


def _own_requests() -> "dict[str, type[Evaluation]]":
    from headmix_vision.evaluation.score_request import FvdRequest, MovingDigitsRequest, ProbeRequest

    return {"fvd": FvdRequest, "moving-digits": MovingDigitsRequest, "probe": ProbeRequest}


def _request(options: dict[str, Any]) -> "Evaluation":
    from headmix_vision.evaluation.score_request import METRICS, ScoreRequest

    own = _own_requests()
    if options["metric"] in own:
        return own[options["metric"]](**options)
    metric = METRICS.get(options["metric"])
    numbers = {name: options.pop(name) for name in (metric.options if metric else ())}
    return ScoreRequest(**options, options=numbers)
