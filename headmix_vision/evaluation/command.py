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
from headmix_vision.evaluation import scores
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.npz import npz_arrays, npz_labels
from headmix_vision.evaluation.sample_sets import ImageSet, open_images
from headmix_vision.evaluation.statistics import Statistics, read_statistics, write_statistics


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
    metrics = parser.add_subparsers(dest="metric", required=True)
    for name, text in (
        ("fid", "Fréchet distance, and sFID with Inception features"),
        ("kid", "kernel distance"),
        ("is", "inception score"),
        ("prc", "precision and recall"),
        ("accuracy", "share of images that the classifier assigns to their label, of an npz file with labels"),
        ("stats", "keep the statistics of real images in a file"),
    ):
        metric = metrics.add_parser(name, help=text)
        metric.add_argument(
            "--real", required=name not in ("is", "accuracy"), help="real images, or for fid their statistics"
        )
        if name != "stats":
            metric.add_argument("--fake", required=True, help="generated images, or for fid their statistics")
        metric.add_argument(
            "--features", default="inception", help="inception, digits, or a run or weights file (inception)"
        )
        metric.add_argument("--out", type=Path, required=name == "stats", help="file to write; it must not exist")
        metric.add_argument("--root", help="place of a data set that needs one")
        metric.add_argument("--image-size", type=int, help="scale and centre-crop all images to this size first")
        metric.add_argument("--batch-size", type=int, default=64, help="images at a time (64)")
        metric.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
        if name == "kid":
            metric.add_argument("--subsets", type=int, default=scores.KID_SUBSETS, help="number of random subsets")
            metric.add_argument("--subset-size", type=int, help="images in each (1000, or as many as there are)")
        if name == "is":
            metric.add_argument("--splits", type=int, default=scores.SPLITS, help="number of parts")
        if name == "prc":
            metric.add_argument("--neighbours", type=int, default=scores.NEIGHBOURS, help="which neighbour's distance")
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
    scorer = scores.Scorer(extractor, options.batch_size, _progress)
    if options.metric == "stats":
        statistics = scorer.statistics(_images(options, options.real, extractor.mode))
        write_statistics(options.out, statistics)
        return statistics.description
    sides: dict[str, ImageSet | Statistics] = {}
    for side in ("real", "fake"):
        source = getattr(options, side)
        if source is not None and not (options.metric in ("is", "accuracy") and side == "real"):
            sides[side] = _open(options, source, extractor.mode)
    return {
        "metric": options.metric,
        "scores": _score(options, scorer, sides),
        **{side: images.description for side, images in sides.items()},
        "extractor": extractor.description,
        "rng_seed": scores.RNG_SEED,
        "versions": {
            name: version(name) for name in ("headmix_vision", "torch", "torch-fidelity", "timm", "numpy", "pillow")
        },
        "device": options.device,
    }


def _score(options: argparse.Namespace, scorer: scores.Scorer, sides: dict[str, Any]) -> dict[str, float]:
    match options.metric:
        case "fid":
            return scores.fid(scorer, sides["real"], sides["fake"])
        case "kid":
            return scores.kid(scorer, sides["real"], sides["fake"], options.subsets, options.subset_size)
        case "is":
            return scores.inception_score(scorer, sides["fake"], options.splits)
        case "accuracy":
            path = Path(options.fake)
            if path.suffix != ".npz":
                raise InputError(f"accuracy needs an .npz file with labels, --fake is {path}")
            return scores.accuracy(scorer, sides["fake"], npz_labels(path))
        case _:
            return scores.precision_recall(scorer, sides["real"], sides["fake"], options.neighbours)


def _open(options: argparse.Namespace, source: str, mode: str) -> ImageSet | Statistics:
    path = Path(source)
    holds_statistics = path.suffix == ".safetensors" and path.is_file()
    if path.suffix == ".npz" and path.is_file():
        # ADM's references hold both: statistics of all images, and some of the images for the other scores
        arrays = npz_arrays(path)
        holds_statistics = "arr_0" not in arrays or (options.metric == "fid" and {"mu", "sigma"} <= set(arrays))
    if not holds_statistics:
        return _images(options, source, mode)
    if options.metric != "fid":
        raise InputError(f"{source} holds no images, only their statistics, which are enough for fid alone")
    return read_statistics(path)


def _images(options: argparse.Namespace, source: str, mode: str) -> ImageSet:
    return open_images(source, mode, options.image_size, options.root)


def _progress(batches: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    console = Console(stderr=True)
    with RichProgress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=count)
        for batch in batches:
            yield batch
            bar.advance(task, len(batch))


if __name__ == "__main__":
    main()
