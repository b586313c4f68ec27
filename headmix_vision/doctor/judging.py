"""Judge the results of an op by float64 results of the same inputs.

A result is judged by its error relative to the float64 result, within a fixed limit for each type. The limits are
those that thousands of cases of every op kept, and a wrong tile exceeds them by far. Where terms cancel, as in a
gradient that is zero by mathematics, the result is too small a measure: there the error is relative to what rounding
each step of the float64 computation does to it. Numbers that the type or the kernels take for zero count as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# Limits of the relative error in the Frobenius norm.
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 5e-5}
# Largest relative rounding of one product: kernels compute float16 in TF32, and leave out terms of float32 products.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
# Absolute error of an entry that is always right: the step of float16 near 0, and decays below exp(-50).
NEGLIGIBLE = {torch.bfloat16: 1e-15, torch.float16: 2.0**-24, torch.float32: 1e-15}
_SAMPLES = 8  # of rounding errors: one number may be right by chance
_FACTOR = 4  # between the rounding errors of a kernel and of the samples
_LIMIT_SHARES = torch.tensor([1, 2], dtype=torch.float64)  # of the norm, and of the largest entry

Results = Callable[[], Sequence[Tensor]]


class Error(NamedTuple):
    """The error of an output or a gradient.

    Attributes:
        name: the result, as ``out`` or ``dq``.
        error: relative error: in the Frobenius norm, or half of that of the largest entry, whichever is larger.
        budget: largest error that is right.
    """

    name: str
    error: float
    budget: float

    @property
    def bad(self) -> bool:
        """Whether the error exceeds its budget or is NaN."""
        return not self.error <= self.budget

    def __str__(self) -> str:
        return f"{self.name} {self.error:.1e}{f' > {self.budget:.0e}' if self.bad else ''}"


def judge(
    names: Sequence[str], found: Sequence[Tensor], expected: Results, dtype: torch.dtype, device: torch.device
) -> list[Error]:
    """Compare results with float64 results.

    Args:
        names: name of each result.
        found: results of the op.
        expected: computes the float64 results; called again, under rounding, only where a result exceeds its limit.
        dtype: type of the inputs of the op.
        device: device of all tensors.
    """
    limit, exact = LIMITS[dtype], expected()
    limits = limit * _LIMIT_SHARES
    for name, x, reference in zip(names, found, exact, strict=True):
        assert x.shape == reference.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(reference.shape)}"
    distances = [_sizes(_difference(x, reference)) for x, reference in zip(found, exact, strict=True)]
    scales = [_sizes(x).maximum(NEGLIGIBLE[dtype] * _sizes(torch.ones_like(x)) / limits) for x in exact]
    shares = [_share(d, s) for d, s in zip(distances, scales, strict=True)]
    if any(not share <= limit for share in shares):
        rounding = _rounding_errors(expected, exact, ROUNDING[dtype], device)
        scales = [s.maximum(_FACTOR * noise / limits) for s, noise in zip(scales, rounding, strict=True)]
        shares = [_share(d, s) for d, s in zip(distances, scales, strict=True)]
    return [Error(name, share, limit) for name, share in zip(names, shares, strict=True)]


def _difference(x: Tensor, reference: Tensor) -> Tensor:
    """Subtract the float64 result; infinity is right where it exceeds the largest number of the type."""
    beyond = x.isinf() & (x.sign() == reference.sign()) & (reference.abs() > torch.finfo(x.dtype).max)
    return torch.where(beyond, 0.0, x.double() - reference)


def _sizes(x: Tensor) -> Tensor:
    """Return the Frobenius norm and the largest absolute entry: float64 [2]."""
    return torch.stack([x.norm(), x.abs().max()]).cpu()


def _share(distance: Tensor, scale: Tensor) -> float:
    shares = distance / scale / _LIMIT_SHARES
    return shares.where(distance != 0, 0.0).max().item()  # NaN where a distance is


def _rounding_errors(expected: Results, exact: Sequence[Tensor], unit: float, device: torch.device) -> list[Tensor]:
    """Return the root mean square of the sizes of errors that samples of rounding make."""
    squares = [torch.zeros(2, dtype=torch.float64) for _ in exact]
    for sample in range(_SAMPLES):
        with _Rounding(unit, torch.Generator(device).manual_seed(sample)):
            rounded = expected()
        for total, x, reference in zip(squares, rounded, exact, strict=True):
            total += _sizes(x - reference) ** 2
    return [(total / _SAMPLES).sqrt() for total in squares]


class _Rounding(TorchDispatchMode):
    """Perturb every float64 result of PyTorch by a random share of at most ``unit``, as low precision does."""

    def __init__(self, unit: float, generator: torch.Generator) -> None:
        super().__init__()
        self.unit, self.generator = unit, generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return result
        return tree_map(self._round, result)

    def _round(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float64:
            return x
        noise = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=self.generator)
        return x * (1 + self.unit * (2 * noise - 1))
