"""The scores, and the job of scoring from a request to a result; processes of torchrun share the work.

KID, inception score, precision and recall are torch-fidelity's, on features in float64.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import headmix_vision
from headmix_vision.console import default_device, open_device, progress
from headmix_vision.data.labels import LabelRule
from headmix_vision.errors import InputError, check_counts
from headmix_vision.evaluation.extractors import FeatureExtractor, open_extractor
from headmix_vision.evaluation.frechet import (
    Moments,
    Statistics,
    frechet_distance,
    holds_statistics,
    read_statistics,
    write_statistics,
)
from headmix_vision.evaluation.sample_sets import (
    UNLABELLED,
    SampleSet,
    check_complete,
    check_side_options,
    describe_size,
    open_samples,
)
from headmix_vision.evaluation.sample_sources import DatasetSamples, npz_labels
from headmix_vision.evaluation.score_request import (
    KID_SUBSET_SIZE,
    KID_SUBSETS,
    METRICS,
    NEIGHBOURS,
    REQUEST_METRICS,
    SPLITS,
    STATISTICS,
    Evaluation,
    ScoreRequest,
)
from headmix_vision.files.pictures import check_background
from headmix_vision.files.writing import atomic_path, check_place
from headmix_vision.processes import ALONE, Processes, process_numbers

Progress = Callable[[Iterable[Tensor], int], Iterable[Tensor]]
"""Wrapper of the batches of so many images, which shows how far they are."""
MAX_SUBSETS = 100_000
COPIED = 0.01  # share of held-out images that lie as near to training images as what is called a copy
_ROWS = 1024  # of a matrix of distances at a time
RNG_SEED = 2020
Side = SampleSet | Statistics


class Scorer:
    """Extractor at work on sets of samples.

    Args:
        extractor: The feature extractor.
        batch_size: Images at a time; changes features by rounding only.
        progress: Shows the progress over batches.
        processes: Who shares the work. The batches of a set are dealt to them; each gets the features of all, in the
            order of samples, and computes the same scores of them as one process would.
    """

    def __init__(
        self,
        extractor: FeatureExtractor,
        batch_size: int = 64,
        progress: Progress | None = None,
        processes: Processes = ALONE,
    ) -> None:
        check_counts(1, **{"batch size": batch_size})
        self.extractor = extractor
        self.batch_size = batch_size
        self.processes = processes
        self.progress: Progress = progress or (lambda batches, _: batches)

    def statistics(self, images: SampleSet) -> Statistics:
        """Compute the moments of the features, and of the spatial features where the extractor has them."""
        moments: dict[str, Moments] = {}
        for outputs in self.of_all(images, lambda *batch: {n: v for n, v in batch[-1].items() if n != "logits"}):
            for name, values in outputs.items():
                moments.setdefault(name, Moments()).update(values.to(self.extractor.device))
        gaussians = {name: moments[name].gaussian() for name in sorted(moments)}
        return Statistics(gaussians, images.description, self.extractor.description)

    def collect(self, images: SampleSet, name: str = "features") -> Tensor:
        """Collect all features, or logits, float64 [N, D]."""
        batches = self.of_all(images, lambda first, batch, outputs: {name: outputs[name]})
        return torch.cat([outputs[name] for outputs in batches]).double()

    def of_all(
        self, images: SampleSet, pick: Callable[[int, Tensor, dict[str, Tensor]], dict[str, Tensor]]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield what is made of each batch, on the CPU, in the order of samples, on all processes.

        Args:
            images: The samples.
            pick: Takes the number of the first sample of a batch, the samples, and what the extractor makes of them;
                returns what is to be known on all processes.

        Raises:
            InputError: A sample that cannot be read, or features that are not finite.
        """
        whole = -(-len(images) // self.batch_size)
        made = ({n: v.cpu() for n, v in pick(*batch).items()} for batch in self._outputs(images))
        return self.processes.in_turn(made, -(-whole // self.processes.world_size))

    def _outputs(self, images: SampleSet) -> Iterator[tuple[int, Tensor, dict[str, Tensor]]]:
        """Yield what `pick` takes, of the batches of this process."""
        rank, world_size, _ = self.processes
        share = self.progress(images.batches(self.batch_size, rank, world_size), len(images))
        for first, batch in zip(count(rank * self.batch_size, world_size * self.batch_size), share, strict=False):
            outputs = self.extractor(batch)
            for name, values in outputs.items():
                if not values.isfinite().all():
                    raise InputError(
                        f"{name} of {self.extractor.description['name']} are not finite within images {first} to"
                        f" {first + len(batch) - 1} of {images.description['source']}"
                    )
            yield first, batch, outputs


def open_side(
    source: str,
    extractor: FeatureExtractor,
    *,
    image_size: int | None = None,
    root: str | None = None,
    statistics: bool = True,
    background: str = "white",
    labels: LabelRule = UNLABELLED,
) -> SampleSet | Statistics:
    """Open one side of a comparison as a user names it: images, or the statistics of images.

    Where an npz file holds both, statistics are taken if they will do.

    Args:
        source: Images as `open_samples` takes them, or a file of statistics as `read_statistics` does.
        extractor: What the features will be made with.
        image_size: As in `open_samples`; it does not concern statistics.
        root: Place of a data set that needs one.
        statistics: Whether statistics will do, as for the Fréchet distance.
        background: Colour behind transparent pixels.
        labels: What is done with samples of a data set that have no valid label.

    Raises:
        InputError: Nothing there, nothing that can be read, statistics where images are needed or of another extractor.
    """
    path = Path(source)
    if not statistics or not holds_statistics(path):
        if path.suffix == ".safetensors" and path.is_file():
            raise InputError(f"{source} holds no images; statistics are enough for fid alone")
        return open_samples(source, extractor.mode, image_size, root, background, labels)
    read = read_statistics(path)
    _check_extractor(read, extractor)
    return read


def fid(scorer: Scorer, real: SampleSet | Statistics, fake: SampleSet | Statistics) -> dict[str, float]:
    """Compute the Fréchet distance, and `sfid` where both sides have spatial features.

    Raises:
        InputError: Statistics of another extractor, or sides that cannot be compared.
    """
    check_sizes(real, fake)
    sides = (real, fake)
    for side in sides:
        if isinstance(side, Statistics):
            _check_extractor(side, scorer.extractor)
    first, second = (side if isinstance(side, Statistics) else scorer.statistics(side) for side in sides)
    scores = {"fid": frechet_distance(first.gaussians["features"], second.gaussians["features"])}
    if "spatial" in first.gaussians and "spatial" in second.gaussians:
        scores["sfid"] = frechet_distance(first.gaussians["spatial"], second.gaussians["spatial"])
    return scores


def kid(
    scorer: Scorer, real: SampleSet, fake: SampleSet, subsets: int = KID_SUBSETS, subset_size: int | None = None
) -> dict[str, float]:
    """Compute the kernel distance of Bińkowski et al. (2018): mean and standard deviation over random subsets.

    Args:
        scorer: Extractor.
        real: Real images.
        fake: Generated images.
        subsets: Number of subsets.
        subset_size: Images in each; 1,000, or all of the smaller side if it has fewer, when None.

    Raises:
        InputError: A subset larger than a side.
    """
    check_sizes(real, fake)
    subset_size = kid_subset_size(min(len(real), len(fake)), subset_size)
    check_counts(1, MAX_SUBSETS, **{"kid subsets": subsets})
    mean, std = kernel_distance(scorer.collect(real), scorer.collect(fake), subsets, subset_size)
    return {"kid_mean": mean, "kid_std": std, "kid_subsets": subsets, "kid_subset_size": subset_size}


def kid_subset_size(smaller: int, subset_size: int | None) -> int:
    """Set the samples of a random subset, where the smaller side has so many.

    Raises:
        InputError: More than that, or fewer than two.
    """
    subset_size = min(KID_SUBSET_SIZE, smaller) if subset_size is None else subset_size
    if not 2 <= subset_size <= smaller:
        raise InputError(f"kid subset size is {subset_size}, it must be in [2, {smaller}], the samples of a side")
    return subset_size


def kernel_distance(first: Tensor, second: Tensor, subsets: int, subset_size: int) -> tuple[float, float]:
    """Compute the squared maximum mean discrepancy with the kernel (x y / D + 1)^3, unbiased, over random subsets.

    Args:
        first: Features of one side, float64 [N, D].
        second: Features of the other, float64 [M, D].
        subsets: Number of subsets.
        subset_size: Samples in each.

    Returns:
        Mean and standard deviation over the subsets.
    """
    from torch_fidelity.metric_kid import kid_features_to_metric

    settings = {"kid_subsets": subsets, "kid_subset_size": subset_size, "rng_seed": RNG_SEED, "verbose": False}
    result = kid_features_to_metric(first, second, **settings)
    return result["kernel_inception_distance_mean"], result["kernel_inception_distance_std"]


def inception_score(scorer: Scorer, fake: SampleSet, splits: int = SPLITS) -> dict[str, float]:
    """Compute the inception score of Salimans et al. (2016), from the classifier's probabilities.

    Raises:
        InputError: More splits than images.
    """
    from torch_fidelity.metric_isc import isc_features_to_metric

    if not 1 <= splits <= len(fake):
        raise InputError(f"splits is {splits}, it must be in [1, {len(fake)}], the number of images")
    result = isc_features_to_metric(scorer.collect(fake, "logits"), splits, shuffle=True, rng_seed=RNG_SEED)
    return {"is_mean": result["inception_score_mean"], "is_std": result["inception_score_std"], "is_splits": splits}


def precision_recall(
    scorer: Scorer, real: SampleSet, fake: SampleSet, neighbours: int = NEIGHBOURS
) -> dict[str, float]:
    """Compute the improved precision and recall of Kynkäänniemi et al. (2019).

    Raises:
        InputError: Not more images than neighbours.
    """
    from torch_fidelity.metric_prc import prc_features_to_metric

    check_sizes(real, fake)
    smaller = min(len(real), len(fake))
    if not 1 <= neighbours < smaller:
        raise InputError(f"neighbours is {neighbours}, it must be in [1, {smaller - 1}], below the images of a side")
    settings = {"prc_neighborhood": neighbours, "prc_batch_size": 2000, "save_cpu_ram": True, "verbose": False}
    result = prc_features_to_metric(scorer.collect(fake), scorer.collect(real), **settings)
    return {name: result[name] for name in ("precision", "recall", "f_score")} | {"prc_neighbours": neighbours}


def accuracy(scorer: Scorer, fake: SampleSet, labels: Tensor) -> dict[str, float]:
    """Compute the share of generated images that the classifier assigns to the class they were asked for.

    Args:
        scorer: Extractor.
        fake: Generated images.
        labels: Their classes, int64 [N].

    Returns:
        `top1`, and `balanced`, the mean of the shares of each class.

    Raises:
        InputError: Not one label per image, a label that the classifier does not know, or see `check_judge`.
    """
    check_judge(scorer.extractor, fake)
    if len(labels) != len(fake):
        raise InputError(f"there are {len(labels)} labels for {len(fake)} images")
    low, high = int(labels.min()), int(labels.max())
    classes = scorer.extractor.num_classes
    if low < 0 or high >= classes:
        raise InputError(f"labels are {low} to {high}, the classifier knows 0 to {classes - 1}")
    right = (scorer.collect(fake, "logits").argmax(1) == labels).double()
    shares = [right[labels == label].mean() for label in labels.unique()]
    return {"top1": right.mean().item(), "balanced": torch.stack(shares).mean().item()}


def check_judge(extractor: FeatureExtractor, images: SampleSet) -> None:
    """Check that a classifier and images have the same classes, as far as these are known.

    Raises:
        InputError: A network that judges no labels, or that has other classes than the data set.
    """
    name = extractor.description["name"]
    if not extractor.judges:
        raise InputError(
            f"{name} has classes of its own, which tell nothing about labels: accuracy needs the classifier of a run or"
            " an export, trained on these labels (--features PATH)"
        )
    if not isinstance(images.samples, DatasetSamples):
        return  # files have numbers for labels, which do not say of what
    known, wanted = extractor.class_names, images.samples.data.class_names
    if not wanted or known == wanted or (known is None and extractor.num_classes == len(wanted)):
        return
    first = next(iter(sorted(set(known or wanted) ^ set(wanted))), "their order")
    differ = "" if known is None else f"; they first differ in {first!r}"
    raise InputError(
        f"{images.samples.source} has {len(wanted)} classes, {name} was trained on {extractor.num_classes}{differ}"
    )


def nearest(features: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Find for each image the nearest one of others.

    Args:
        features: Features of the images, float64 [N, D].
        others: Features of the others, float64 [M, D].

    Returns:
        Euclidean distances, float64 [N], and numbers of the others, int64 [N].
    """
    found = [torch.cdist(rows, others).min(1) for rows in features.split(_ROWS)]
    return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])


def neighbours(scorer: Scorer, real: SampleSet, fake: SampleSet, held_out: SampleSet) -> dict[str, float]:
    """Compare how near generated images lie to training images with how near held-out images do.

    Args:
        scorer: Extractor.
        real: The images that the generator was trained on.
        fake: Generated images.
        held_out: Real images that it was not trained on.

    Returns:
        `nearer`, the probability that a generated image is nearer to its nearest training image than a held-out image
        to its own (Meehan et al., 2020, the statistic of Mann and Whitney): 0.5 for images like those held out, 1 for
        copies. `copied`, the share of generated images that are nearer than all but 1 % of those held out. The medians
        of the distances, `distance` and `held_out_distance`.
    """
    check_sizes(real, fake)
    check_sizes(real, held_out)
    known = scorer.collect(real)
    ours, theirs = (nearest(scorer.collect(images), known)[0] for images in (fake, held_out))
    ordered = theirs.sort().values
    passed = sum(torch.searchsorted(ordered, ours, right=right).double().mean().item() for right in (False, True)) / 2
    return {
        "nearer": 1 - passed / len(ordered),
        "copied": (ours < theirs.quantile(COPIED)).double().mean().item(),
        "distance": ours.median().item(),
        "held_out_distance": theirs.median().item(),
    }


def check_sizes(real: SampleSet | Statistics, fake: SampleSet | Statistics) -> None:
    """Raise InputError if the samples of the two sides are known to be of different sizes (frames included)."""
    sizes: Sequence[Any] = [side.description.get("size") for side in (real, fake)]
    if None not in sizes and list(sizes[0]) != list(sizes[1]):
        hint = "--image-size N brings both to one size"
        if len(sizes[0]) != len(sizes[1]):
            hint = "clips are scored against clips, by headmix evaluate fvd"
        raise InputError(
            f"real samples are {describe_size(sizes[0])}, fake ones {describe_size(sizes[1], unit='')}; {hint}"
        )


def _check_extractor(statistics: Statistics, extractor: FeatureExtractor) -> None:
    if statistics.extractor is not None and statistics.extractor["sha256"] != extractor.description["sha256"]:
        raise InputError(
            f"{statistics.description['source']} was made with {statistics.extractor['name']}"
            f" {statistics.extractor['sha256'][:8]}, the features asked for are {extractor.description['name']}"
            f" {extractor.description['sha256'][:8]}"
        )
    width = len(statistics.gaussians["features"].mean)
    if extractor.num_features is not None and width != extractor.num_features:
        raise InputError(
            f"{statistics.description['source']} is of {width} features, {extractor.description['name']} makes"
            f" {extractor.num_features}"
        )


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
    metric = REQUEST_METRICS[request.metric]
    result = metric(request, device, partial(_progress, processes=processes, unit=metric.unit), processes)
    if "dry_run" in result:
        return result
    _check_finite(result["scores"], metric.unit)
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
    return {"headmix_vision": headmix_vision.__version__, **packages}  # a copy of a clone is not installed


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
