"""Scores generated images: `python -m headmix_vision.evaluate fid --real X --fake Y`.

X and Y are a folder of images, an npz file of ADM (images, or mu and sigma), a statistics file (.safetensors), or a
data set NAME[:SPLIT][SLICE]. `stats` keeps the statistics of X, to read its images only once.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as RichProgress
from torch import Tensor

from headmix_vision.atomic import atomic_path
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.npz import npz_labels
from headmix_vision.evaluation.sample_sets import open_images
from headmix_vision.evaluation.scores import METRICS, RNG_SEED, Scorer, open_side
from headmix_vision.evaluation.statistics import write_statistics


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong input ends the process with one line and exit status 2."""
    options = _parser().parse_args(args)
    with warnings.catch_warnings(record=True) as caught, one_line_errors():
        warnings.simplefilter("default")
        _check_out(options)
        result = _run(options)
    notes = [str(warning.message) for warning in caught if warning.category is UserWarning]
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    if options.metric == "stats":
        print(f"{options.out}: {result['count']} images")
        return
    result["warnings"] = notes
    if options.out is not None:
        with atomic_path(options.out) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n")
    print(" · ".join(f"{name} {value:.6g}" for name, value in result["scores"].items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headmix_vision.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="metric", required=True)
    described = {name: metric.help for name, metric in METRICS.items()}
    for name, text in {**described, "stats": "keep the statistics of real images in a file"}.items():
        command = commands.add_parser(name, help=text)
        compares = name == "stats" or METRICS[name].compares
        command.add_argument("--real", required=compares, help="real images, or for fid their statistics")
        if name != "stats":
            command.add_argument("--fake", required=True, help="generated images, or for fid their statistics")
        command.add_argument(
            "--features", default="inception", help="inception, digits, or a run or weights file (inception)"
        )
        command.add_argument("--out", type=Path, required=name == "stats", help="file to write; it must not exist")
        command.add_argument("--root", help="place of a data set that needs one")
        command.add_argument("--image-size", type=int, help="scale and centre-crop all images to this size first")
        command.add_argument("--batch-size", type=int, default=64, help="images at a time (64)")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
        for option, (default, about) in METRICS[name].options.items() if name != "stats" else ():
            command.add_argument(f"--{option.replace('_', '-')}", type=int, default=default, help=about)
    return parser


def _check_out(options: argparse.Namespace) -> None:
    out: Path | None = options.out
    if options.metric == "stats" and out is not None and out.suffix != ".safetensors":
        raise InputError(f"--out of stats must end in .safetensors, got {out}")
    if out is not None and out.exists():
        raise InputError(f"{out} already exists; choose another --out or remove it")
    if options.image_size is not None and options.image_size < 1:
        raise InputError(f"--image-size is {options.image_size}, it must be at least 1")


def _run(options: argparse.Namespace) -> dict[str, Any]:
    extractor = open_extractor(options.features, options.device)
    if not extractor.description.get("official", True):
        warnings.warn("these Inception weights are not the official file, scores compare with nothing", stacklevel=1)
    scorer = Scorer(extractor, options.batch_size, _progress)
    if options.metric == "stats":
        statistics = scorer.statistics(open_images(options.real, extractor.mode, options.image_size, options.root))
        write_statistics(options.out, statistics)
        return statistics.description
    metric = METRICS[options.metric]
    names = ("real", "fake") if metric.compares else ("fake",)
    sides = {
        side: open_side(
            getattr(options, side),
            extractor,
            image_size=options.image_size,
            root=options.root,
            statistics=metric.takes_statistics,
        )
        for side in names
    }
    arguments = {name: getattr(options, name) for name in metric.options}
    if metric.takes_labels:
        if Path(options.fake).suffix != ".npz":
            raise InputError(f"{options.metric} needs an .npz file with labels, --fake is {options.fake}")
        arguments["labels"] = npz_labels(Path(options.fake))
    return {
        "metric": options.metric,
        "scores": metric.compute(scorer, *sides.values(), **arguments),
        **{side: images.description for side, images in sides.items()},
        "extractor": extractor.description,
        "rng_seed": RNG_SEED,
        "versions": {
            name: version(name) for name in ("headmix_vision", "torch", "torch-fidelity", "timm", "numpy", "pillow")
        },
        "device": options.device,
    }


def _progress(batches: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    console = Console(stderr=True)
    with RichProgress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=count)
        for batch in batches:
            yield batch
            bar.advance(task, len(batch))
