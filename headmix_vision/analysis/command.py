"""Draws what a network has learned to mix: `headmix-analyze RUN --out DIRECTORY`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headmix_vision.analysis.folder import PictureFolder
from headmix_vision.analysis.layers import attention_layers
from headmix_vision.analysis.pictures import PICTURES
from headmix_vision.console.arguments import OneLineParser
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.runs.opening import open_network


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong input ends the process with one line and exit status 2."""
    options = _parser().parse_args(args)
    with one_line_errors():
        analyze(options)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="headmix-analyze",
        description="Draw what a trained network mixes: heads (IHA, MEA) and token blocks (MHLA), layer by layer.",
    )
    add = parser.add_argument
    add("network", type=Path, metavar="RUN", help="run directory, .ckpt, or export (.safetensors, pipeline directory)")
    add("--out", type=Path, required=True, help="folder to write: iha.png, mea.png, mhla.png and numbers.json")
    add("--checkpoint", help="best, last or a file; of a run directory (default: best, of a generator last)")
    add("--raw", action="store_true", help="the weights being trained, not their moving average")
    add("--dry-run", action="store_true", help="open and check everything, say what would be drawn, and write nothing")
    return parser


def analyze(options: argparse.Namespace) -> None:
    """Draws the pictures that the network has.

    Raises:
        InputError: For wrong input, or a network of which nothing can be drawn, before anything is written.
    """
    network, about = open_network(options.network, checkpoint=options.checkpoint, raw=options.raw)
    folder = PictureFolder(options.out)
    folder.check(about["weights_sha256"])
    layers = attention_layers(network)
    drawn = {name: draw(layers, _title(about)) for name, draw in PICTURES.items()}
    pictures = {name: picture for name, picture in drawn.items() if picture is not None}
    if not pictures:
        raise InputError(
            f"{options.network} is of {about['name']}, of which nothing can be drawn: it has neither the head mix iha,"
            " nor mea, nor the core mhla"
        )
    if not options.dry_run:
        folder.write(about, pictures)
    for name, picture in pictures.items():
        print(f"{'would draw ' if options.dry_run else ''}{folder.path / f'{name}.png'}: {picture.summary}")


def _title(about: dict[str, Any]) -> str:
    step = about.get("step")
    kind = {"ema": "averaged", "raw": "raw", "exported": "exported"}[about["weights"]]
    return f"{about['name']}, {kind} weights" + ("" if step is None else f", step {step:,}")
