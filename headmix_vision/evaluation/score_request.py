"""The tables of metrics, and requests for scores, without an import of torch.

A new metric is a function in `scores` and a line in `METRICS`; the function is imported when it is called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from headmix_vision.errors import InputError, check_counts, check_request, suggest

KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000
NEIGHBOURS = 3
SPLITS = 10
STATISTICS = "stats"
SIDES = ("real", "fake", "held_out")


def _load(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"headmix_vision.evaluation.{module}"), name)
    return found


@dataclass(frozen=True)
class Metric:
    """Metric of images.

    Args:
        compute: Takes the scorer, the real samples if it compares, the generated ones, and the options by name; as
            `module:function` of this folder, or the function itself.
        help: What it measures.
        compares: Whether it compares generated samples with real ones.
        takes_statistics: Whether the statistics of samples are enough.
        takes_labels: Whether `compute` takes the generated samples' labels too.
        takes_held_out: Whether it also compares with real samples that were not trained on.
        options: Whole numbers by name, with default and help.
    """

    compute: Callable[..., dict[str, float]] | str
    help: str
    compares: bool = True
    takes_statistics: bool = False
    takes_labels: bool = False
    takes_held_out: bool = False
    options: dict[str, tuple[int | None, str]] = field(default_factory=dict)

    def __call__(self, *samples: Any, **options: Any) -> dict[str, float]:
        """Compute the scores."""
        return _load(self.compute)(*samples, **options)


METRICS = {
    "fid": Metric("scores:fid", "Fréchet distance, and sFID with Inception features", takes_statistics=True),
    "kid": Metric(
        "scores:kid",
        "kernel distance",
        options={
            "subsets": (KID_SUBSETS, "number of random subsets"),
            "subset_size": (None, "images in each (1000, or as many as there are)"),
        },
    ),
    "is": Metric(
        "scores:inception_score",
        "inception score",
        compares=False,
        options={"splits": (SPLITS, "number of parts")},
    ),
    "prc": Metric(
        "scores:precision_recall",
        "precision and recall",
        options={"neighbours": (NEIGHBOURS, "which neighbour's distance")},
    ),
    "accuracy": Metric(
        "scores:accuracy",
        "share of images that the classifier assigns to their label, of an npz file with labels or a data set",
        compares=False,
        takes_labels=True,
    ),
    "neighbours": Metric(
        "scores:neighbours",
        "distance of images to the training images (--real), beside --held-out: finds copies",
        takes_held_out=True,
    ),
}


@dataclass(frozen=True)
class RequestMetric:
    """Metric with a request of its own.

    Args:
        run: Scores the samples of a request, shows the progress, and shares the work among processes.
        help: What it measures.
        unit: What its samples are.
    """

    run: str
    help: str
    unit: str = "clips"

    def __call__(self, *arguments: Any) -> dict[str, Any]:
        """Score the samples of a request."""
        result: dict[str, Any] = _load(self.run)(*arguments)
        return result


CLIP_METRICS = {
    "fvd": RequestMetric("clip_scores:run_fvd", "Fréchet video distance, kernel distance and controls, of clips"),
    "moving-digits": RequestMetric(
        "clip_scores:run_moving_digits",
        "shares of frames and clips that show the digit and the motion of their label",
    ),
}
FEATURE_METRICS = {
    "probe": RequestMetric(
        "probes:run_probe",
        "accuracy of nearest neighbours and a linear probe on frozen features of a model",
        unit="images",
    ),
}
REQUEST_METRICS = CLIP_METRICS | FEATURE_METRICS


def sides_of(metric: str) -> tuple[str, ...]:
    """Name the sides of a score of images, or of `stats`, out of `SIDES`."""
    if metric == STATISTICS:
        return ("real",)
    asked = METRICS[metric]
    return tuple(
        side for side in SIDES if side == "fake" or (asked.compares if side == "real" else asked.takes_held_out)
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Settings that all requests for scores share.

    Samples are a folder, an `.npz` file or a data set `NAME[:SPLIT][SLICE]`.

    Args:
        metric: One of `METRICS`, `REQUEST_METRICS` or `stats`, which keeps the statistics of real images in a file.
        out: File to write.
        overwrite: Replace the file if it exists.
        root: Folder or file of a data set that needs one.
        image_size: Scale and centre-crop all samples to this size first.
        background: Colour behind transparent pixels.
        batch_size: Samples at a time.
        device: Device as torch names it; a GPU if there is one when None.
        incomplete: Score folders of samples that are not complete.
        dry_run: Check everything and score nothing.

    Raises:
        InputError: An unknown metric, or a setting that is none of those allowed.
    """

    metric: str
    out: Path | None = None
    overwrite: bool = False
    root: str | None = None
    image_size: int | None = None
    background: str = "white"
    batch_size: int = 64
    device: str | None = None
    incomplete: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        known = [*METRICS, STATISTICS, *REQUEST_METRICS]
        if self.metric not in known:
            raise InputError(f"no metric is called {self.metric!r}{suggest(self.metric, known, ', '.join(known))}")
        check_request(self)


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Evaluation):
    """Request for scores of images, or for their statistics.

    Args:
        real: Real images, or their statistics for `fid`.
        fake: Generated images, or their statistics for `fid`.
        held_out: Real images that were not trained on, for `neighbours`.
        features: `inception`, `digits`, `lite0:PATH`, or a run or weights file.
        skip_unlabelled: Leave out, and count, images of a data set that have no valid label.
        options: Whole numbers of the metric by name, see `METRICS`; its defaults where they are not named.

    Raises:
        InputError: Also for samples or options that the metric lacks or does not take.
    """

    real: str | None = None
    fake: str | None = None
    held_out: str | None = None
    features: str = "inception"
    skip_unlabelled: bool = False
    options: Mapping[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        metric = METRICS.get(self.metric)
        if metric is None and self.metric != STATISTICS:
            unit = REQUEST_METRICS[self.metric].unit
            raise InputError(f"{self.metric} scores {unit} by a request of its own: make that one")
        if metric is None and self.out is None:
            raise InputError("stats needs a file to write: give out")
        for name in SIDES:
            taken = name in sides_of(self.metric)
            if taken != (getattr(self, name) is not None):
                raise InputError(f"{self.metric} {'needs' if taken else 'does not take'} {name}")
        if self.skip_unlabelled and not (metric is not None and metric.takes_labels):
            raise InputError(f"{self.metric} reads no labels: leave skip_unlabelled out")
        for name in self.options:
            if name not in (known := [] if metric is None else [*metric.options]):
                raise InputError(f"{self.metric} has no option {name}{suggest(name, known, ', '.join(known))}")


@dataclass(frozen=True, kw_only=True)
class FvdRequest(Evaluation):
    """Request for the Fréchet video distance.

    Args:
        real: Real clips: a folder, an `.npz` file or a data set.
        fake: Generated clips, likewise.
        features: `i3d`, its TorchScript file (`.pt`), `digits[:PATH]`, or an image extractor.
        features_sha256: SHA-256 of the TorchScript file, without which it is not opened.
        frame_features: Image extractor of `frame_fid`; that of `features` when None.
        protocol: How clips are sampled.
        frames: Frames of a clip.
        count: At most so many clips of a side; as the protocol says, 2048, when None.
        real_stride: Take every `real_stride`-th frame of real clips; as the protocol says when None.
        real_offset: Where real clips begin in their files; as the protocol says when None.
        fake_stride: Take every `fake_stride`-th frame of generated clips; as the protocol says when None.
        fake_offset: Where generated clips begin in their files; as the protocol says when None.
        mirror_real: Score real clips a second time, mirrored.
        skip_short: Leave out, and count, clips of too few frames.
        seed: Seed of offsets, of the choice of clips and of the controls.
        subsets: Random subsets of the kernel distance.
        subset_size: Clips in each; 1000, or as many as there are, when None.
    """

    metric: str = "fvd"
    real: str
    fake: str
    batch_size: int = 16
    features: str = "i3d"
    features_sha256: str | None = None
    frame_features: str | None = None
    protocol: Literal["stylegan-v", "latte"] = "stylegan-v"
    frames: int = 16
    count: int | None = None
    real_stride: int | None = None
    real_offset: Literal["first", "random"] | None = None
    fake_stride: int | None = None
    fake_offset: Literal["first", "random"] | None = None
    mirror_real: bool = False
    skip_short: bool = False
    seed: int = 0
    subsets: int = KID_SUBSETS
    subset_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class MovingDigitsRequest(Evaluation):
    """Request for the share of moving digits that show the digit and the motion of their label.

    Args:
        fake: Generated clips with labels: a folder of samples or an `.npz` file.
        real: Real clips, for the judge's ceiling.
        features: A classifier of the ten digits: `digits`, a run or a weights file.
        count: At most so many clips of a side; as many as there are generated ones when None.
        frame_rate: Frames a second of the clips; the rate of the samples when None.
    """

    metric: str = "moving-digits"
    fake: str
    real: str = "moving_digits"
    batch_size: int = 16
    features: str = "digits"
    count: int | None = None
    frame_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeRequest(Evaluation):
    """Request for k-NN and linear-probe scores of a model's frozen features.

    Args:
        model: A run directory, `.ckpt`, export, a model of timm that comes with weights, or `local-dir:` with a folder
            that timm or transformers has saved.
        train: Labelled images that neighbours and the probe come from, of a data set `NAME[:SPLIT][SLICE]`. Each fifth
            chooses the number of neighbours and the regularisation.
        test: Labelled images that are scored, likewise.
        teacher: Model whose features of the test images are compared with the model's, by their cosine.
        input_size: Image size in pixels at which models see images; their own when None.
        skip_unlabelled: Leave out, and count, images that have no valid label.
    """

    metric: str = "probe"
    model: str
    train: str
    test: str
    teacher: str | None = None
    input_size: int | None = None
    skip_unlabelled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input_size is not None:
            check_counts(1, **{"--input-size": self.input_size})
        if self.train == self.test:
            raise InputError(f"--train and --test are both {self.test}: test images must not be those trained on")
