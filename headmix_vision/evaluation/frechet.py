"""Moments of features, their files, and the Fréchet distance of two Gaussians, in float64.

Shapes: B images of a batch, N images in all, D features. A file holds mean and covariance and what they were made of:
the safetensors `mu` and `sigma` and, for Inception features, `mu_s` and `sigma_s` of the spatial features (the names of
ADM's reference files), all float64, and a JSON description in the header.
"""

import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.evaluation.sample_sources import npz_array, npz_arrays
from headmix_vision.files.reading import check_fields, check_memory, parse_json
from headmix_vision.files.tensors import open_tensors, write_tensors

_FEATURE_SETS = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}
_HEADER = "headmix_vision_statistics"
_IMAGES = {"count": int, "size": list | None}
_EXTRACTOR = {"name": str, "sha256": str}
# Of the largest value: what a covariance that was stored as float16 may differ from one.
_ASYMMETRY, _NEGATIVE = 1e-5, 1e-3


@dataclass(frozen=True)
class Gaussian:
    """Mean and unbiased covariance of a set of features.

    Args:
        mean: float64 [D].
        covariance: float64 [D, D], symmetric.
        count: Number of images behind it; None where a file does not tell.

    Raises:
        InputError: Shapes that do not belong together, values that are not finite, or a covariance that is not
            symmetric.
    """

    mean: Tensor
    covariance: Tensor
    count: int | None = None

    def __post_init__(self) -> None:
        if self.mean.ndim != 1 or len(self.mean) < 1 or self.covariance.shape != (len(self.mean), len(self.mean)):
            raise InputError(
                f"mean {list(self.mean.shape)} and covariance {list(self.covariance.shape)} do not belong together:"
                " they must be [D] and [D, D]"
            )
        if not (self.mean.isfinite().all() and self.covariance.isfinite().all()):
            raise InputError("mean or covariance holds values that are not finite")
        largest = self.covariance.abs().max().item()
        if not torch.allclose(self.covariance, self.covariance.T, rtol=0, atol=_ASYMMETRY * largest):
            raise InputError("the covariance is not symmetric")

    @staticmethod
    def of_features(features: Tensor) -> "Gaussian":
        """Return the Gaussian of features [N, D], with the checks of `Moments`.

        If N is at most D, the centred features are its factor, and no eigenvalues of [D, D] are computed.
        """
        moments = Moments()
        moments.update(features)
        gaussian = moments.gaussian()
        if len(features) <= len(gaussian.mean):
            vars(gaussian)["factor"] = (features.double().cpu() - gaussian.mean).T / (len(features) - 1) ** 0.5
        return gaussian

    @cached_property
    def factor(self) -> Tensor:
        """F, float64 [D, R], with F F^T = covariance of rank R; eigenvalues that are rounding errors are left out.

        Raises:
            InputError: The covariance has negative eigenvalues.
        """
        values, vectors = torch.linalg.eigh((self.covariance + self.covariance.T) / 2)
        if values[0] < -_NEGATIVE * values.abs().max():
            raise InputError(f"not a covariance matrix: its smallest eigenvalue is {values[0].item():.3g}, below 0")
        tolerance = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
        keep = values > tolerance
        return vectors[:, keep] * values[keep].sqrt()


class Moments:
    """Accumulator of mean and covariance of features that come in batches.

    Each batch is centred on its own mean before it is added, and the means are merged by the formula of Chan, Golub
    and LeVeque (1979), so that a mean far from zero costs no digits. Sums are float64.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.scatter = torch.empty(0)

    def update(self, features: Tensor) -> None:
        """Add a batch of features [B, D], of any float dtype and on any device.

        Raises:
            InputError: Not of the shape [B, D] with the D of earlier batches, or not finite.
        """
        if features.ndim != 2 or (self.count and features.shape[1] != len(self.mean)):
            raise InputError(f"features are {list(features.shape)}, they must be [B, {len(self.mean) or 'D'}]")
        if not features.isfinite().all():
            raise InputError("features are not finite")
        if len(features) == 0:
            return
        features = features.double()
        batch = Moments()
        batch_mean = features.mean(0)
        centred = features - batch_mean
        batch.count, batch.mean, batch.scatter = len(features), batch_mean.cpu(), (centred.T @ centred).cpu()
        self.merge(batch)

    def merge(self, other: "Moments") -> None:
        """Merge another accumulator into this one."""
        if self.count == 0 or other.count == 0:
            if other.count:
                self.count, self.mean, self.scatter = other.count, other.mean, other.scatter
            return
        total = self.count + other.count
        shift = other.mean - self.mean
        self.scatter = self.scatter + other.scatter + torch.outer(shift, shift) * (self.count * other.count / total)
        self.mean = self.mean + shift * (other.count / total)
        self.count = total

    def gaussian(self) -> Gaussian:
        """Return the Gaussian with these moments.

        Raises:
            InputError: Fewer than two images.
        """
        if self.count < 2:
            raise InputError(f"{self.count} images have no covariance, at least 2 are needed")
        return Gaussian(self.mean.clone(), self.scatter / (self.count - 1), self.count)


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """Compute |mean_a - mean_b|^2 + tr(C_a) + tr(C_b) - 2 tr((C_a C_b)^(1/2)), Dowson and Landau (1982), equation 4.

    With C = F F^T from the eigenvalues of each covariance, the last trace is the sum of the singular values of
    F_a^T F_b. These are the square roots of the eigenvalues of C_a C_b, without taking the root of a number that
    should be zero: rounding errors stay at 1e-16 of the largest value instead of 1e-8, covariances of few images,
    which are singular, included.

    Args:
        a: One Gaussian.
        b: The other, of as many features.

    Returns:
        The squared distance, at least 0.

    Raises:
        InputError: Different numbers of features, or a covariance with negative eigenvalues.
    """
    if len(a.mean) != len(b.mean):
        raise InputError(f"the two sides have {len(a.mean)} and {len(b.mean)} features")
    for side in (a, b):
        if side.count is not None and side.count <= len(side.mean):
            warnings.warn(
                f"{side.count} images for {len(side.mean)} features: the covariance is singular and the distance"
                " depends strongly on the number of images",
                stacklevel=2,
            )
    root_trace = torch.linalg.svdvals(a.factor.T @ b.factor).sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * root_trace
    return max(0.0, distance.item())


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
        InputError: Damaged, without mu and sigma, or with values that are not moments: not finite, a covariance that is
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
