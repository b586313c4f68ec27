"""Scores generated images: `headmix-evaluate fid --real X --fake Y`, and clips: `headmix-evaluate fvd`.

X and Y are a folder of images, an npz file of ADM (images, or mu and sigma), a statistics file (.safetensors), or a
data set NAME[:SPLIT][SLICE]. `stats` keeps the statistics of X, to read its images only once. For clips they are a
folder of videos, of animated PNGs or of folders of frames, an npz file [N, T, H, W, C], or a data set of clips.
Processes of torchrun share the work: torchrun --nproc-per-node 8 --no-python -- headmix-evaluate fid ...
"""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from torch import Tensor

import headmix_vision
from headmix_vision.checks import check_counts
from headmix_vision.console.arguments import OneLineParser
from headmix_vision.console.devices import default_device, open_device
from headmix_vision.console.processes import Processes, process_numbers
from headmix_vision.console.progress import progress
from headmix_vision.data.labels import LabelRule
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.evaluation.clip_command import CLIP_METRICS
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.npz import npz_labels
from headmix_vision.evaluation.sample_folders import check_complete
from headmix_vision.evaluation.sample_sets import DatasetImages, ImageSet, check_side_options
from headmix_vision.evaluation.scores import METRICS, RNG_SEED, Scorer, check_judge, open_side
from headmix_vision.evaluation.statistics import Statistics, write_statistics
from headmix_vision.files.atomic import atomic_path, check_place
from headmix_vision.files.pictures import check_background

Side = ImageSet | Statistics


class _DryRun(Exception):
    """Ends a dry run where the first image would be scored."""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong input ends the process with one line and exit status 2."""
    options = _parser().parse_args(args)
    with one_line_errors():
        processes = process_numbers()
        processes.connect()
        with processes.agreed(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            _check_out(options)
            result = _run(options, processes)
        if processes.rank:
            return
        notes = [str(warning.message) for warning in caught if warning.category is UserWarning]
        for note in notes:
            print(f"warning: {note}", file=sys.stderr)
        if "dry_run" in result:
            print(result["dry_run"])
        elif options.metric == "stats":
            print(f"{options.out}: {result['count']} images")
        else:
            # before the file: a disk that is full must not cost the score
            printed = result.pop("printed", [])
            print(" · ".join(f"{name} {value:.6g}" for name, value in result["scores"].items()), *printed, sep="\n")
            sys.stdout.flush()
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
        if compares:
            command.add_argument("--real", required=True, help="real images, or for fid their statistics")
        if name != "stats":
            command.add_argument("--fake", required=True, help="generated images, or for fid their statistics")
            if METRICS[name].takes_labels:
                about = "leave out, and count, images of a data set that have no valid label"
                command.add_argument("--skip-unlabelled", action="store_true", help=about)
            if METRICS[name].takes_held_out:
                command.add_argument("--held-out", required=True, help="real images that were not trained on")
        about = "inception, digits, lite0:PATH, or a run or weights file (inception)"
        command.add_argument("--features", default="inception", help=about)
        _add_common(command, "images", 64)
        for option, (default, about) in METRICS[name].options.items() if name != "stats" else ():
            command.add_argument(f"--{option.replace('_', '-')}", type=int, default=default, help=about)
    for name, clip_metric in CLIP_METRICS.items():
        command = commands.add_parser(name, help=clip_metric.help)
        clip_metric.add_options(command)
        _add_common(command, "clips", 16)
    return parser


def _add_common(command: argparse.ArgumentParser, what: str, batch_size: int) -> None:
    required = command.prog.endswith(" stats")
    command.add_argument("--out", type=Path, required=required, help="file to write; it must not exist")
    command.add_argument("--root", help="place of a data set that needs one")
    command.add_argument("--image-size", type=int, help=f"scale and centre-crop all {what} to this size first")
    command.add_argument("--background", default="white", help="colour behind transparent pixels (white)")
    command.add_argument("--batch-size", type=int, default=batch_size, help=f"{what} at a time ({batch_size})")
    command.add_argument("--device", default=default_device(), help="where to run")
    command.add_argument("--incomplete", action="store_true", help="score folders of samples that are not complete")
    command.add_argument("--dry-run", action="store_true", help="open and check everything, score nothing")


def _check_out(options: argparse.Namespace) -> None:
    out: Path | None = options.out
    if options.metric == "stats" and out is not None and out.suffix != ".safetensors":
        raise InputError(f"--out of stats must end in .safetensors, got {out}")
    if out is not None and out.exists():
        raise InputError(f"{out} already exists; choose another --out or remove it")
    if out is not None:
        check_place(out)
    check_background(options.background)
    if options.image_size is not None:
        check_counts(1, **{"--image-size": options.image_size})


def _run(options: argparse.Namespace, processes: Processes) -> dict[str, Any]:
    if processes.world_size > 1:
        options.device = str(open_device(options.device, processes.local_rank))
    if options.metric in CLIP_METRICS:
        return _run_clips(options, processes)
    extractor = open_extractor(options.features, options.device)
    if not extractor.description.get("official", True):
        warnings.warn("these Inception weights are not the official file, scores compare with nothing", stacklevel=1)
    shown = _stop if options.dry_run else partial(_progress, processes=processes)
    scorer = Scorer(extractor, options.batch_size, shown, processes)
    metric = METRICS.get(options.metric)
    names = ["real"] if metric is None else ["real", "fake"] if metric.compares else ["fake"]
    if metric is not None and metric.takes_held_out:
        names.append("held_out")
    for name in names:
        check_complete(getattr(options, name), f"--{name.replace('_', '-')}", options.incomplete)
    sides = {
        name: open_side(
            getattr(options, name),
            extractor,
            image_size=options.image_size,
            root=options.root,
            statistics=metric is not None and metric.takes_statistics,
            background=options.background,
            labels=LabelRule(metric is not None and metric.takes_labels, getattr(options, "skip_unlabelled", False)),
        )
        for name in names
    }
    check_side_options(options.root, options.background, *(getattr(options, name) for name in sides))
    try:
        return _score(options, scorer, sides)
    except _DryRun:
        described = " and ".join(f"{name} {_describe(side)}" for name, side in sides.items())
        target = "" if options.out is None else f", write {options.out}"
        return {"dry_run": f"would score {described} by {extractor.description['name']} on {options.device}{target}"}


def _run_clips(options: argparse.Namespace, processes: Processes) -> dict[str, Any]:
    shown = partial(_progress, processes=processes, unit="clips")
    result = CLIP_METRICS[options.metric].run(options, shown, processes)
    if "dry_run" in result:
        return result
    _check_finite(result["scores"], "clips")
    return {"metric": options.metric, **result, "versions": _versions("av"), "device": options.device}


def _check_finite(scores: dict[str, float], what: str) -> None:
    for name, value in scores.items():
        if not math.isfinite(value):
            raise InputError(f"{name} is {value}: these {what} have no such score")


def _versions(*more: str) -> dict[str, str]:
    names = ("torch", "torch-fidelity", "timm", "numpy", "pillow", *more)
    packages = {name: version(name) for name in names if name not in more or find_spec(name)}
    return {"headmix_vision": headmix_vision.__version__, **packages}  # a copy of a clone is no installed package


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
        if scorer.processes.rank == 0:
            write_statistics(options.out, statistics)
        return statistics.description
    metric = METRICS[options.metric]
    arguments = {name: getattr(options, name) for name in metric.options}
    if metric.takes_labels:
        check_judge(extractor, cast("ImageSet", sides["fake"]))  # before all images are read for their labels
        arguments["labels"] = _labels(options, sides["fake"])
    scores = metric.compute(scorer, *sides.values(), **arguments)
    _check_finite(scores, "images")
    if options.dry_run:
        raise _DryRun
    return {
        "metric": options.metric,
        "scores": scores,
        **{side: images.description for side, images in sides.items()},
        "extractor": extractor.description,
        "rng_seed": RNG_SEED,
        "versions": _versions(),
        "device": options.device,
    }


def _labels(options: argparse.Namespace, images: Side) -> Tensor:
    if isinstance(images, ImageSet) and isinstance(images.pictures, DatasetImages):
        return images.pictures.labels()
    if Path(options.fake).suffix != ".npz":
        raise InputError(f"{options.metric} needs an .npz file with labels or a data set, --fake is {options.fake}")
    if options.skip_unlabelled:
        raise InputError(f"--skip-unlabelled applies to data sets, --fake is {options.fake}: leave it out")
    return npz_labels(Path(options.fake))


def _progress(batches: Iterable[Tensor], count: int, processes: Processes, unit: str = "images") -> Iterator[Tensor]:
    with progress("scoring", count, unit, enabled=processes.rank == 0) as advance:
        for batch in batches:
            yield batch
            advance(len(batch) * processes.world_size)  # assuming that all are equally fast


def _stop(batches: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    raise _DryRun
