"""The feature extractor that an option `features` names, trained classifiers included."""

from pathlib import Path

import torch

from headmix_vision.errors import InputError
from headmix_vision.evaluation.extractors import (
    ClassifierExtractor,
    FeatureExtractor,
    InceptionExtractor,
    inception_path,
    open_weights,
)
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY, find_checkpoint, read_checkpoint
from headmix_vision.runs.networks import create_network

DIGITS_RUNS = ("runs/digits", "runs/demo")


def open_extractor(features: str, device: torch.device | str = "cpu") -> FeatureExtractor:
    """Open the feature extractor of a score.

    Args:
        features: `inception` (torch-fidelity's weights in torch's download folder), `digits` (the best checkpoint of
            the run that `python train_cls.py fit` or `make demo` leaves), or a path: a run directory, a `.ckpt`, an
            export, or Inception's weights.
        device: Where to run.

    Raises:
        InputError: Weights that are missing, with where to get them, or that cannot be used.
    """
    if features == "inception":
        return InceptionExtractor(inception_path(), device)
    if features == "digits":
        run = next((run for run in DIGITS_RUNS if (Path(run) / "checkpoints" / "best.ckpt").is_file()), None)
        if run is None:
            raise InputError(
                f"no digits classifier in {' or '.join(DIGITS_RUNS)}: train one with python train_cls.py fit,"
                " or give its run directory or export with --features PATH"
            )
        return _from_checkpoint(find_checkpoint(run, "best"), device)
    path = Path(features)
    if path.is_dir():
        return _from_checkpoint(find_checkpoint(path, "best"), device)
    if path.suffix == ".ckpt":
        return _from_checkpoint(path, device)
    if not path.is_file():
        raise InputError(f"features {features!r} must be inception, digits, or the path of a run or a weights file")
    return open_weights(path, device)


def _from_checkpoint(path: Path, device: torch.device | str) -> ClassifierExtractor:
    description = read_checkpoint(path)[DESCRIPTION_KEY]
    name, size = description["name"], description["img_size"]
    network = create_network(name, description["num_classes"], size, description["model_args"], str(path))
    return ClassifierExtractor(network, name, device)
