"""Scores generated images: `headmix-evaluate fid --real X --fake Y`.

X and Y are a folder of images, an npz file of ADM (images, or mu and sigma), a statistics file (.safetensors), or a
data set NAME[:SPLIT][SLICE]. `stats` keeps the statistics of X, to read its images only once.
"""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmix_vision.console.arguments import OneLineParser
from headmix_vision.console.progress import progress
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.npz import npz_labels
from headmix_vision.evaluation.sample_sets import ImageSet
from headmix_vision.evaluation.scores import METRICS, RNG_SEED, Scorer, open_side
from headmix_vision.evaluation.statistics import Statistics, write_statistics
from headmix_vision.files.atomic import atomic_path, check_place

Side = ImageSet | Statistics


class _DryRun(Exception):
    """Ends a dry run where the first image would be scored."""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong input ends the process with one line and exit status 2."""
    options = _parser().parse_args(args)
    with one_line_errors():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            _check_out(options)
            result = _run(options)
        notes = [str(warning.message) for warning in caught if warning.category is UserWarning]
        for note in notes:
            print(f"warning: {note}", file=sys.stderr)
        if "dry_run" in result:
            print(result["dry_run"])
        elif options.metric == "stats":
            print(f"{options.out}: {result['count']} images")
        else:
            # before the file: a disk that is full must not cost the score
            print(" · ".join(f"{name} {value:.6g}" for name, value in result["scores"].items()), flush=True)
            if options.out is not None:
                with atomic_path(options.out) as temporary:
                    temporary.write_text(json.dumps({**result, "warnings": notes}, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="headmix-evaluate",
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
        command.add_argument("--dry-run", action="store_true", help="open and check everything, score nothing")
        for option, (default, about) in METRICS[name].options.items() if name != "stats" else ():
            command.add_argument(f"--{option.replace('_', '-')}", type=int, default=default, help=about)
    return parser


def _check_out(options: argparse.Namespace) -> None:
    out: Path | None = options.out
    if options.metric == "stats" and out is not None and out.suffix != ".safetensors":
        raise InputError(f"--out of stats must end in .safetensors, got {out}")
    if out is not None and out.exists():
        raise InputError(f"{out} already exists; choose another --out or remove it")
    if out is not None:
        check_place(out)
    if options.image_size is not None and options.image_size < 1:
        raise InputError(f"--image-size is {options.image_size}, it must be at least 1")


def _run(options: argparse.Namespace) -> dict[str, Any]:
    extractor = open_extractor(options.features, options.device)
    if not extractor.description.get("official", True):
        warnings.warn("these Inception weights are not the official file, scores compare with nothing", stacklevel=1)
    scorer = Scorer(extractor, options.batch_size, _stop if options.dry_run else _progress)
    metric = METRICS.get(options.metric)
    names = ("real",) if metric is None else ("real", "fake") if metric.compares else ("fake",)
    sides = {
        name: open_side(
            getattr(options, name),
            extractor,
            image_size=options.image_size,
            root=options.root,
            statistics=metric is not None and metric.takes_statistics,
        )
        for name in names
    }
    if options.root is not None and not any(side.description["kind"] == "dataset" for side in sides.values()):
        raise InputError(f"--root is {options.root}, but no side is a data set")
    try:
        return _score(options, scorer, sides)
    except _DryRun:
        described = " and ".join(f"{name} {_describe(side)}" for name, side in sides.items())
        target = "" if options.out is None else f", write {options.out}"
        return {"dry_run": f"would score {described} by {extractor.description['name']} on {options.device}{target}"}


def _describe(side: Side) -> str:
    about = side.description
    return (
        f"{about['source']} ({len(side)} images)" if isinstance(side, ImageSet) else f"{about['source']} (statistics)"
    )


def _score(options: argparse.Namespace, scorer: Scorer, sides: dict[str, Side]) -> dict[str, Any]:
    extractor = scorer.extractor
    if options.metric == "stats":
        (images,) = sides.values()
        assert isinstance(images, ImageSet)
        statistics = scorer.statistics(images)
        write_statistics(options.out, statistics)
        return statistics.description
    metric = METRICS[options.metric]
    arguments = {name: getattr(options, name) for name in metric.options}
    if metric.takes_labels:
        if Path(options.fake).suffix != ".npz":
            raise InputError(f"{options.metric} needs an .npz file with labels, --fake is {options.fake}")
        arguments["labels"] = npz_labels(Path(options.fake))
    scores = metric.compute(scorer, *sides.values(), **arguments)
    for name, value in scores.items():
        if not math.isfinite(value):
            raise InputError(f"{name} is {value}: these images have no such score")
    if options.dry_run:
        raise _DryRun
    return {
        "metric": options.metric,
        "scores": scores,
        **{side: images.description for side, images in sides.items()},
        "extractor": extractor.description,
        "rng_seed": RNG_SEED,
        "versions": {
            name: version(name) for name in ("headmix_vision", "torch", "torch-fidelity", "timm", "numpy", "pillow")
        },
        "device": options.device,
    }


def _progress(batches: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    with progress("scoring", count, "images") as advance:
        for batch in batches:
            yield batch
            advance(len(batch))


def _stop(batches: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    raise _DryRun
