"""Reading and writing statistics files: mean and covariance of features, and what they were made of.

The safetensors file holds `mu` and `sigma` and, for Inception features, `mu_s` and `sigma_s` of the spatial features
(the names of ADM's reference files), all float64; the header holds a JSON description.
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headmix_vision.atomic import atomic_path
from headmix_vision.errors import InputError
from headmix_vision.evaluation.frechet import Gaussian

_FEATURE_SETS = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}
_HEADER = "headmix_vision_statistics"


@dataclass(frozen=True)
class Statistics:
    """Holds the moments of one side of a comparison.

    Args:
        gaussians: By the name of the features: `features`, and `spatial` where there are any.
        description: What the result file says about them.
        extractor: Description of the extractor, None where the file does not tell.
    """

    gaussians: dict[str, Gaussian]
    description: dict[str, Any]
    extractor: dict[str, Any] | None


def write_statistics(path: Path, statistics: Statistics) -> None:
    """Writes a safetensors statistics file."""
    tensors: dict[str, torch.Tensor] = {}
    for name, gaussian in statistics.gaussians.items():
        mean, covariance = _FEATURE_SETS[name]
        tensors |= {mean: gaussian.mean.contiguous(), covariance: gaussian.covariance.contiguous()}
    header = {"images": statistics.description, "extractor": statistics.extractor}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", _HEADER: json.dumps(header)})


def read_statistics(path: Path) -> Statistics:
    """Reads a statistics file: safetensors of `write_statistics`, or an `.npz` with mu and sigma as ADM publishes.

    Raises:
        InputError: Truncated, without mu and sigma, or with values that are no moments.
    """
    return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)


def _read_safetensors(path: Path) -> Statistics:
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is truncated or no safetensors file: {error}") from None
    if header is None:
        raise InputError(f"{path} is no statistics file: make one with python -m headmix_vision.evaluate stats")
    described = json.loads(header)
    count = described["images"]["count"]
    description = {**described["images"], "source": str(path), "kind": "statistics"}
    return Statistics(_gaussians(path, tensors, count), description, described["extractor"])


def _read_npz(path: Path) -> Statistics:
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [name for pair in _FEATURE_SETS.values() for name in pair if name in file]
            arrays = {name: file[name] for name in names}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise InputError(f"{path}: {name} is {array.dtype}, it must be float32 or float64")
    tensors = {name: torch.from_numpy(array.astype(np.float64)) for name, array in arrays.items()}
    description = {"source": str(path), "kind": "statistics", "extractor": "not recorded"}
    return Statistics(_gaussians(path, tensors, None), description, None)


def _gaussians(path: Path, tensors: dict[str, torch.Tensor], count: int | None) -> dict[str, Gaussian]:
    gaussians = {}
    for name, (mean, covariance) in _FEATURE_SETS.items():
        if mean in tensors and covariance in tensors:
            try:
                gaussians[name] = Gaussian(tensors[mean].double(), tensors[covariance].double(), count)
            except ValueError as error:
                raise InputError(f"{path}: {error}") from None
    if "features" not in gaussians:
        raise InputError(f"{path} has no mu and sigma, it has {', '.join(tensors) or 'no arrays of that name'}")
    return gaussians
