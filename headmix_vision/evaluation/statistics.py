"""Reading and writing statistics files: mean and covariance of features, and what they were made of.

The safetensors file holds `mu` and `sigma` and, for Inception features, `mu_s` and `sigma_s` of the spatial features
(the names of ADM's reference files), all float64; the header holds a JSON description.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headmix_vision.errors import InputError
from headmix_vision.evaluation.frechet import Gaussian
from headmix_vision.evaluation.npz import npz_array, npz_arrays
from headmix_vision.files.reading import check_fields, check_memory, parse_json
from headmix_vision.files.tensors import open_tensors, write_tensors

_FEATURE_SETS = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}
_HEADER = "headmix_vision_statistics"
_IMAGES = {"count": int, "size": list | None}
_EXTRACTOR = {"name": str, "sha256": str}


@dataclass(frozen=True)
class Statistics:
    """Moments of one side of a comparison.

    Args:
        gaussians: By the name of the features: `features`, and `spatial` where there are any.
        description: What the result file says about them.
        extractor: Description of the extractor, None where the file does not tell.
    """

    gaussians: dict[str, Gaussian]
    description: dict[str, Any]
    extractor: dict[str, Any] | None


def write_statistics(path: Path, statistics: Statistics) -> None:
    """Write a safetensors statistics file."""
    tensors: dict[str, torch.Tensor] = {}
    for name, gaussian in statistics.gaussians.items():
        mean, covariance = _FEATURE_SETS[name]
        tensors |= {mean: gaussian.mean.contiguous(), covariance: gaussian.covariance.contiguous()}
    header = {"images": statistics.description, "extractor": statistics.extractor}
    write_tensors(path, tensors, {"format": "pt", _HEADER: json.dumps(header)})


def holds_statistics(path: Path) -> bool:
    """Return whether a file holds statistics, of whatever extractor, not only images.

    ADM's references hold both: the statistics of all images, and some of the images for the other scores.

    Raises:
        InputError: An npz file that cannot be read.
    """
    if path.suffix == ".npz" and path.is_file():
        arrays = npz_arrays(path)
        return "arr_0" not in arrays or {"mu", "sigma"} <= set(arrays)
    return path.suffix == ".safetensors" and path.is_file()


def read_statistics(path: Path) -> Statistics:
    """Read a statistics file: safetensors of `write_statistics`, or an `.npz` with mu and sigma as ADM publishes.

    Raises:
        InputError: Damaged, without mu and sigma, or with values that are no moments: not finite, a covariance that is
            not symmetric or has negative eigenvalues.
    """
    return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)


def _read_safetensors(path: Path) -> Statistics:
    with open_tensors(path) as file:
        check_memory(4 * path.stat().st_size, f"the statistics {path}")
        header = (file.metadata() or {}).get(_HEADER)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    if header is None:
        raise InputError(f"{path} is not a statistics file: make one with headmix evaluate stats")
    described = parse_json(header, f"the header of {path}")
    described = check_fields(f"the header of {path}", described, {"images": dict, "extractor": dict | None})
    images = check_fields(f"the header of {path}, images", described["images"], _IMAGES)
    extractor = described["extractor"]
    if extractor is not None:
        check_fields(f"the header of {path}, extractor", extractor, _EXTRACTOR)
    description = {**images, "source": str(path), "kind": "statistics"}
    return Statistics(_gaussians(path, tensors, images["count"]), description, extractor)


def _read_npz(path: Path) -> Statistics:
    present = npz_arrays(path)
    arrays = {name: npz_array(path, name) for pair in _FEATURE_SETS.values() for name in pair if name in present}
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
            if not (tensors[mean].is_floating_point() and tensors[covariance].is_floating_point()):
                raise InputError(f"{path}: {mean} and {covariance} must be floating-point numbers")
            try:
                gaussians[name] = Gaussian(tensors[mean].double(), tensors[covariance].double(), count)
                _ = gaussians[name].factor  # now, not after the features of the other side
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
    if "features" not in gaussians:
        raise InputError(f"{path} has no mu and sigma, it has {', '.join(tensors) or 'none of them'}")
    return gaussians
