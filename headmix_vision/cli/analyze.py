"""`headmix analyze`: look into the attention layers of trained networks."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headmix_vision.analysis.analysis_request import MapsRequest, MixingRequest, ProfileRequest, SensitivityRequest
from headmix_vision.console import OneLineParser, add_options, importing, one_line_errors, sentence
from headmix_vision.errors import require_extra

_REQUESTS = {
    "rank": ("rank and stable rank of the attention matrices, by layer and head", ProfileRequest),
    "entropy": ("entropy and mean distance of the attention weights, by layer and head", ProfileRequest),
    "maps": ("attention maps of chosen query tokens over the image", MapsRequest),
    "sensitivity": ("error at the output when one attention layer alone is swapped", SensitivityRequest),
    "mixing": ("learned mixing weights: of heads (IHA, MEA) and of token blocks (MHLA)", MixingRequest),
}
_SWEEP = "train classifiers that differ in one thing, and compare them"


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    with one_line_errors():
        require_extra("analysis", "headmix analyze")
    options = _parser().parse_args(args)
    if options.kind == "sweep":
        options.kind = options.sweep
        with importing("analyze"):
            from headmix_lab.sweeps.command import run as sweep
        with one_line_errors():
            sweep(options)
        return
    with one_line_errors():
        request = _request(vars(options))
    with importing("analyze"):
        from headmix_vision.analysis.analysis_job import analyze
    with one_line_errors():
        analyze(request, lambda line: print(line, flush=True))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="headmix analyze", description="Measure and draw the attention of trained networks.")
    commands = parser.add_subparsers(dest="kind", required=True)
    for kind, (what, request) in _REQUESTS.items():
        one = commands.add_parser(kind, help=what, description=sentence(what))
        add_options(one, request, leave_out=("kind",), tokens={"type": _place, "metavar": "Y,X"})
    sweep = commands.add_parser("sweep", help=_SWEEP, description=sentence(_SWEEP))
    _add_sweep_options(sweep)
    return parser


def _add_sweep_options(parser: argparse.ArgumentParser) -> None:
    from headmix_lab.sweeps.kinds import SWEEPS

    add = parser.add_argument
    add(
        "sweep",
        metavar="kind",
        choices=SWEEPS,
        help="; ".join(f"{kind}: {sweep.about}" for kind, sweep in SWEEPS.items()),
    )
    add(
        "--task", nargs="+", default=["digits"], metavar="RECIPE",
        help="recipes of headmix train-cls: digits, canvas, emoji, emoji subgroups, imagenet, a file (default: digits)",
    )  # fmt: skip
    add("--root", help="folder of the data (default: the recipe's)")
    add("--out", type=Path, required=True, help="folder of the table, the figure and the run directories")
    add("--seeds", type=int, default=3, help="runs of each network (default: 3)")
    add(
        "--epochs", type=int, metavar="N",
        help="train all for N epochs, the rate falling by half a cosine (default: until validation stops rising)",
    )  # fmt: skip
    add("--rates", type=float, nargs="+", help="learning rates to choose from (default: the recipe's, half and twice)")
    add("--variants", nargs="+", metavar="NAME", help="these networks alone; --dry-run lists them (default: all)")
    add("--jobs", type=int, default=1, help="runs at a time, spread over the GPUs (default: 1)")
    add("--minutes", type=float, help="time after which the rest is left to the next call (default: none)")
    add("--dry-run", action="store_true", help="try the first run, say what would be run, and write nothing")
    add(
        "--options", nargs=argparse.REMAINDER, default=[], metavar="OPTION",
        help="further options of headmix train-cls fit, such as --trainer.max_epochs 50; they come last",
    )  # fmt: skip


def _place(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a place such as 3,4") from None


def _request(options: dict[str, Any]) -> ProfileRequest | MapsRequest | MixingRequest | SensitivityRequest:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    _, request = _REQUESTS[values["kind"]]
    return request(**{name: value for name, value in values.items() if name != "kind" or request is ProfileRequest})
