"""The tables of metrics; the functions that compute them are imported when they are called.

A new metric is a function in `scores` and a line in `METRICS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000
NEIGHBOURS = 3
SPLITS = 10


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
        "how near images are to those of training (--real), beside --held-out: copies",
        takes_held_out=True,
    ),
}


@dataclass(frozen=True)
class ClipMetric:
    """Metric of clips.

    Args:
        run: Scores the clips of a request, shows the progress, and shares the work among processes.
        help: What it measures.
    """

    run: str
    help: str

    def __call__(self, *arguments: Any) -> dict[str, Any]:
        """Score the clips of a request."""
        result: dict[str, Any] = _load(self.run)(*arguments)
        return result


CLIP_METRICS = {
    "fvd": ClipMetric("clip_score_job:run_fvd", "Fréchet video distance, kernel distance and controls, of clips"),
    "moving-digits": ClipMetric(
        "clip_score_job:run_moving_digits",
        "share of frames and clips of moving digits with their label's digit and motion",
    ),
}
