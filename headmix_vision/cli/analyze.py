"""`headmix analyze`: look into the attention layers of trained networks."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headmix_vision.analysis.analysis_request import NOISE_LEVEL, MapsRequest, MixingRequest, ProfileRequest
from headmix_vision.console.terminal import OneLineParser, importing
from headmix_vision.errors import one_line_errors, require_extra

_COMMANDS = {
    "rank": "rank and stable rank of the attention matrices, by layer and head",
    "entropy": "how widely and how far queries look, by layer and head",
    "maps": "what chosen query tokens attend to, as maps over the image",
    "mixing": "what has been learned to mix: heads (IHA, MEA) and token blocks (MHLA)",
    "sweep": "train classifiers that differ in one thing, and compare them",
}
_MODEL = (
    "run directory, .ckpt, export (.safetensors, pipeline directory), or the name of a model that comes with weights"
)


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
    parser = OneLineParser(prog="headmix analyze", description="Look into the attention layers of trained networks.")
    commands = parser.add_subparsers(dest="kind", required=True)
    for kind, what in _COMMANDS.items():
        one = commands.add_parser(kind, help=what, description=f"{what[0].upper()}{what[1:]}.")
        if kind == "sweep":
            _add_sweep_options(one)
            continue
        _add_model_options(one, several=kind != "mixing")
        if kind != "mixing":
            _add_data_options(one, images=1 if kind == "maps" else 8)
        if kind == "maps":
            about = "query tokens by row and column, of clips by frame, row and column (the middle)"
            one.add_argument("--tokens", nargs="+", type=_place, default=(), metavar="Y,X", help=about)
        if kind in ("rank", "entropy"):
            one.add_argument("--queries", type=int, help="number of query tokens, drawn by a fixed seed (all)")
    return parser


def _add_model_options(parser: argparse.ArgumentParser, several: bool) -> None:
    add = parser.add_argument
    if several:
        add("--model", nargs="+", required=True, metavar="RUN", help=f"{_MODEL}; one or several")
    else:
        add("--model", required=True, metavar="RUN", help=_MODEL)
    add("--out", required=True, help="folder to write")
    add("--checkpoint", help="checkpoint of a run directory: best, last or a file (best, of a generator last)")
    add("--raw", action="store_true", help="the weights being trained, not their EMA")
    add("--dry-run", action="store_true", help="open and check everything, say what would be drawn, and write nothing")


def _add_data_options(parser: argparse.ArgumentParser, images: int) -> None:
    add = parser.add_argument
    add("--data", required=True, help="data set: digits, folder, torch/NAME, latents, moving_digits, ...")
    add("--root", help="place of the data")
    add("--split", default="validation", help="split of the data (validation)")
    add("--images", type=int, default=images, help=f"images, evenly spaced over the split ({images})")
    add("--background", default="white", help="colour behind transparent pixels (white)")
    about = f"noise of the images of a generator, 0 to 1 ({NOISE_LEVEL})"
    add("--noise-level", type=float, default=NOISE_LEVEL, help=about)
    add("--layers", type=int, nargs="+", help="numbers of attention layers, from 0 (all; maps: the last)")
    add("--device", help="device that computes, in float64 (a GPU if there is one)")


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
    add("--root", help="place of the data (default: that of the recipe)")
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
        raise argparse.ArgumentTypeError(f"{text!r} is no place such as 3,4") from None


def _request(options: dict[str, Any]) -> ProfileRequest | MapsRequest | MixingRequest:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    kind = values.pop("kind")
    if kind == "mixing":
        return MixingRequest(**values)
    return MapsRequest(**values) if kind == "maps" else ProfileRequest(kind=kind, **values)
