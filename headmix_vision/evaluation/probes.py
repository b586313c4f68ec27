"""Probe frozen features: nearest neighbours, a linear classifier, and the cosine to another model's features.

N images, D features. Number of neighbours and regularisation are chosen on each fifth training image; the test images
choose nothing.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from headmix_vision.data.labels import LabelRule
from headmix_vision.errors import InputError
from headmix_vision.evaluation.extractors import BackboneExtractor, open_backbone
from headmix_vision.evaluation.sample_sets import SampleSet, check_side_options, open_samples
from headmix_vision.evaluation.sample_sources import DatasetSamples
from headmix_vision.evaluation.score_request import ProbeRequest
from headmix_vision.evaluation.scores import Progress, Scorer
from headmix_vision.processes import Processes

HELD_OUT = 5  # one of so many training images chooses
NEIGHBOURS = (5, 10, 20, 50)
TEMPERATURE = 0.07  # of the votes of neighbours, as in DINO (Caron et al., 2021)
INVERSE_DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # C of scikit-learn's logistic regression, of standardised features
ITERATIONS = 1000


class Labelled(NamedTuple):
    """Features and labels of images.

    Attributes:
        features: Float32 [N, D].
        labels: Int64 [N].
    """

    features: np.ndarray
    labels: np.ndarray

    def part(self, chosen: np.ndarray) -> "Labelled":
        """Select images."""
        return Labelled(self.features[chosen], self.labels[chosen])


class Probed(NamedTuple):
    """Result of a probe.

    Attributes:
        top1: Share of test images that it classifies correctly.
        balanced: Mean of the shares of each class.
        chosen: The number of neighbours or the inverse decay.
        tuning: Share of correct images among those that chose it.
    """

    top1: float
    balanced: float
    chosen: float
    tuning: float


def nearest_neighbours(train: Labelled, test: Labelled) -> Probed:
    """Classify images by the votes of their nearest neighbours, as DINO does.

    A vote weighs exp(cosine / 0.07). Neighbours are by the cosine.
    """
    from sklearn.neighbors import KNeighborsClassifier

    def votes(distances: np.ndarray) -> np.ndarray:
        return np.exp(-(distances**2) / (2 * TEMPERATURE))  # distances of unit vectors

    train, test = (Labelled(_unit(one.features), one.labels) for one in (train, test))
    fitting = len(train.labels) - -(-len(train.labels) // HELD_OUT)
    counts = [count for count in NEIGHBOURS if count <= fitting] or [fitting]
    return _tuned(train, test, counts, lambda count: KNeighborsClassifier(count, weights=votes))


def linear_probe(train: Labelled, test: Labelled) -> Probed:
    """Classify images by logistic regression on features with mean 0 and variance 1 over training images."""
    from sklearn.linear_model import LogisticRegression

    mean, deviation = train.features.mean(0), train.features.std(0)
    scale = np.where(deviation > 0, deviation, 1)
    train, test = (Labelled((one.features - mean) / scale, one.labels) for one in (train, test))
    return _tuned(train, test, INVERSE_DECAYS, lambda value: LogisticRegression(C=value, max_iter=ITERATIONS))


def _tuned(train: Labelled, test: Labelled, settings: Any, make: Any) -> Probed:
    """Choose a setting on the images that are held out, then fit all training images."""
    held = _held(len(train.labels))
    fitting, tuning = train.part(~held), train.part(held)
    shares = {value: make(value).fit(*fitting).score(*tuning) for value in settings}
    chosen = max(shares, key=lambda value: shares[value])
    right = make(chosen).fit(*train).predict(test.features) == test.labels
    balanced = [right[test.labels == label].mean() for label in np.unique(test.labels)]
    return Probed(float(right.mean()), float(np.mean(balanced)), chosen, float(shares[chosen]))


def _held(count: int) -> np.ndarray:
    return np.arange(count) % HELD_OUT == 0


def _unit(features: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths > 0, lengths, 1)


PROBES = {"knn": nearest_neighbours, "linear": linear_probe}


def run_probe(request: ProbeRequest, device: str, progress: Progress, processes: Processes) -> dict[str, Any]:
    """Extract features of training and test images, probe them, and compare them with a teacher's.

    Returns:
        `scores`: `knn_class_token`, `linear_class_token`, `knn_patch_mean`, `linear_patch_mean`, each also with
        `_balanced`; with a teacher `cosine_class_token`, `cosine_patch_mean` and, where both have equally many patches,
        `cosine_patches`; and `commonest`, the share of the commonest class of the test images.

    Raises:
        InputError: Images have no labels or are too few, or the two splits have different classes.
    """
    model = open_backbone(request.model, device, request.input_size)
    teacher = None if request.teacher is None else open_backbone(request.teacher, device, request.input_size)
    if teacher is not None and teacher.mode != model.mode:
        raise InputError(f"--teacher takes {teacher.mode} images, --model takes {model.mode}: the modes must be equal")
    check_side_options(request.root, request.background, request.train, request.test)
    train, test = (_open(request, side, model) for side in ("train", "test"))
    _check_classes(train, test)
    labels = {side: images.labels().numpy() for side, images in (("train", train), ("test", test))}
    _check_labels(labels["train"])
    if request.dry_run:
        target = "" if request.out is None else f", write {request.out}"
        return {
            "dry_run": f"would probe {model.description['name']} on {len(train)} and {len(test)} images"
            f" on {device}{target}"
        }
    scorer = Scorer(model, request.batch_size, progress, processes)
    known, asked = _features(scorer, train), _features(scorer, test, teacher)
    scores: dict[str, float] = {}
    chosen: dict[str, dict[str, float]] = {}
    for name, features in known.items():
        for kind, probe in PROBES.items():
            found = probe(Labelled(features.numpy(), labels["train"]), Labelled(asked[name].numpy(), labels["test"]))
            scores |= {f"{kind}_{name}": found.top1, f"{kind}_{name}_balanced": found.balanced}
            chosen[f"{kind}_{name}"] = {"chosen": found.chosen, "top1_when_chosen": found.tuning}
    scores |= {name: values.double().mean().item() for name, values in asked.items() if name not in known}
    scores["commonest"] = float(np.bincount(labels["test"]).max() / len(test))
    about = {} if teacher is None else {"teacher": teacher.description}
    return {
        "scores": scores,
        "chosen": chosen,
        "train": train.description,
        "test": test.description,
        "extractor": model.description,
        **about,
    }


def _open(request: ProbeRequest, side: str, model: BackboneExtractor) -> SampleSet:
    labels = LabelRule(True, request.skip_unlabelled)
    images = open_samples(
        getattr(request, side), model.mode, request.image_size, request.root, request.background, labels
    )
    if not isinstance(images.samples, DatasetSamples):
        raise InputError(
            f"--{side} must be a data set NAME[:SPLIT][SLICE], which has labels, got {images.samples.source}"
        )
    return images


def _check_classes(train: SampleSet, test: SampleSet) -> None:
    first, second = (cast("DatasetSamples", images.samples).data.class_names for images in (train, test))
    if first != second:
        differ = next(iter(sorted(set(first) ^ set(second))), "their order")
        raise InputError(f"--train has {len(first)} classes, --test has {len(second)}; they first differ in {differ!r}")


def _check_labels(labels: np.ndarray) -> None:
    if len(np.unique(labels[~_held(len(labels))])) < 2:
        raise InputError("--train needs images of at least 2 classes besides each fifth, which chooses the settings")


def _features(scorer: Scorer, images: SampleSet, teacher: BackboneExtractor | None = None) -> dict[str, Tensor]:
    """Collect the features of all images, float32 [N, D], and their cosines to the teacher's, [N]."""

    def pick(first: int, batch: Tensor, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: values for name, values in outputs.items() if name != "patches"}
        if teacher is not None:
            for name, values in teacher(batch).items():
                own = outputs.get(name)
                if own is not None and own.shape == values.shape:
                    found[f"cosine_{name}"] = cosine_similarity(own, values, -1).reshape(len(batch), -1).mean(1)
        return found

    parts = list(scorer.of_all(images, pick))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
