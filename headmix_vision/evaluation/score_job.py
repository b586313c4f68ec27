"""The job of scoring, from a request to a result. Processes of torchrun share the work."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from torch import Tensor

import headmix_vision
from headmix_vision.console.processes import Processes, default_device, open_device, process_numbers
from headmix_vision.console.terminal import progress
from headmix_vision.data.labels import LabelRule
from headmix_vision.errors import InputError, check_counts
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.sample_sets import SampleSet, check_complete, check_side_options
from headmix_vision.evaluation.sample_sources import DatasetSamples, npz_labels
from headmix_vision.evaluation.score_request import CLIP_METRICS, METRICS, STATISTICS, Evaluation, ScoreRequest
from headmix_vision.evaluation.scores import RNG_SEED, Scorer, Statistics, check_judge, open_side, write_statistics
from headmix_vision.files.pictures import check_background
from headmix_vision.files.writing import atomic_path, check_place

Side = SampleSet | Statistics


class _DryRun(Exception):
    """End of a dry run where the first image would be scored."""


@dataclass(frozen=True)
class Scored:
    """Result of `evaluate`.

    Args:
        scores: The scores by name; empty after a dry run, and for statistics.
        about: All that a file of the result holds: samples, features, versions and so on.
        lines: The result for a person.
        warnings: What limits the result.
    """

    scores: dict[str, float]
    about: dict[str, Any]
    lines: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def evaluate(request: Evaluation, found: Callable[[Scored], object] = lambda scored: None) -> Scored | None:
    """Score images or clips, or keep the statistics of images.

    Args:
        request: What is scored, and how.
        found: Called with the result before it is written to a file: a full disk must not cost the score.

    Returns:
        The result; None in processes other than the first.

    Raises:
        InputError: Wrong input, before anything is written.
    """
    processes = process_numbers()
    processes.connect()
    with processes.agreed(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        _check_out(request)
        result = _run(request, processes)
    if processes.rank:
        return None
    notes = tuple(str(warning.message) for warning in caught if warning.category is UserWarning)
    scores, plan = result.get("scores", {}), result.get("dry_run")
    shown = " · ".join(f"{name} {value:.6g}" for name, value in scores.items())
    if request.metric == STATISTICS:
        shown = f"{request.out}: {result.get('count')} images"
    scored = Scored(scores, result, (plan or shown, *result.pop("printed", [])), notes)
    found(scored)
    if request.out is not None and scores:
        with atomic_path(request.out) as temporary:
            temporary.write_text(json.dumps({**result, "warnings": notes}, indent=2) + "\n")
    return scored


def _check_out(request: Evaluation) -> None:
    out = request.out
    if request.metric == STATISTICS and out is not None and out.suffix != ".safetensors":
        raise InputError(f"--out of stats must end in .safetensors, got {out}")
    if out is not None and out.exists() and not request.overwrite:
        raise InputError(f"--out {out} already exists; choose another one, or replace it with --overwrite")
    if out is not None:
        check_place(out)
    check_background(request.background)
    if request.image_size is not None:
        check_counts(1, **{"--image-size": request.image_size})


def _run(request: Evaluation, processes: Processes) -> dict[str, Any]:
    device = request.device or default_device()
    if processes.world_size > 1:
        device = str(open_device(device, processes.local_rank))
    if isinstance(request, ScoreRequest):
        return _run_images(request, device, processes)
    shown = partial(_progress, processes=processes, unit="clips")
    result = CLIP_METRICS[request.metric](request, device, shown, processes)
    if "dry_run" in result:
        return result
    _check_finite(result["scores"], "clips")
    return {"metric": request.metric, **result, "versions": _versions("av"), "device": device}


def _run_images(request: ScoreRequest, device: str, processes: Processes) -> dict[str, Any]:
    extractor = open_extractor(request.features, device)
    if not extractor.description.get("official", True):
        warnings.warn("these Inception weights are not the official file, scores compare with nothing", stacklevel=1)
    shown = _stop if request.dry_run else partial(_progress, processes=processes)
    scorer = Scorer(extractor, request.batch_size, shown, processes)
    metric = METRICS.get(request.metric)
    given = {name: source for name in ("real", "fake", "held_out") if (source := getattr(request, name)) is not None}
    for name, source in given.items():
        check_complete(source, f"--{name.replace('_', '-')}", request.incomplete)
    sides = {
        name: open_side(
            source,
            extractor,
            image_size=request.image_size,
            root=request.root,
            statistics=metric is not None and metric.takes_statistics,
            background=request.background,
            labels=LabelRule(metric is not None and metric.takes_labels, request.skip_unlabelled),
        )
        for name, source in given.items()
    }
    check_side_options(request.root, request.background, *given.values())
    try:
        return _score(request, device, scorer, sides)
    except _DryRun:
        described = " and ".join(f"{name} {_describe(side)}" for name, side in sides.items())
        target = "" if request.out is None else f", write {request.out}"
        return {"dry_run": f"would score {described} by {extractor.description['name']} on {device}{target}"}


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
        f"{about['source']} ({len(side)} images)" if isinstance(side, SampleSet) else f"{about['source']} (statistics)"
    )


def _score(request: ScoreRequest, device: str, scorer: Scorer, sides: dict[str, Side]) -> dict[str, Any]:
    extractor = scorer.extractor
    if request.metric == STATISTICS:
        (images,) = sides.values()
        assert isinstance(images, SampleSet)
        statistics = scorer.statistics(images)
        if scorer.processes.rank == 0 and request.out is not None:
            write_statistics(request.out, statistics)
        return statistics.description
    metric = METRICS[request.metric]
    arguments: dict[str, Any] = {name: default for name, (default, _) in metric.options.items()} | {**request.options}
    if metric.takes_labels:
        check_judge(extractor, cast("SampleSet", sides["fake"]))  # before all images are read for their labels
        arguments["labels"] = _labels(request, sides["fake"])
    scores = metric(scorer, *sides.values(), **arguments)
    _check_finite(scores, "images")
    if request.dry_run:
        raise _DryRun
    return {
        "metric": request.metric,
        "scores": scores,
        **{side: images.description for side, images in sides.items()},
        "extractor": extractor.description,
        "rng_seed": RNG_SEED,
        "versions": _versions(),
        "device": device,
    }


def _labels(request: ScoreRequest, images: Side) -> Tensor:
    if isinstance(images, SampleSet) and isinstance(images.samples, DatasetSamples):
        return images.labels()
    if Path(request.fake or "").suffix != ".npz":
        raise InputError(f"{request.metric} needs an .npz file with labels or a data set, --fake is {request.fake}")
    if request.skip_unlabelled:
        raise InputError(f"--skip-unlabelled applies to data sets, --fake is {request.fake}: leave it out")
    return npz_labels(Path(request.fake or ""))


def _progress(batches: Iterable[Tensor], count: int, processes: Processes, unit: str = "images") -> Iterator[Tensor]:
    with progress("scoring", count, unit, enabled=processes.rank == 0) as advance:
        for batch in batches:
            yield batch
            advance(len(batch) * processes.world_size)  # assuming that all are equally fast


def _stop(batches: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    raise _DryRun
