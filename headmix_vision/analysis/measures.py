"""Numbers that sum up weights and matrices; all are computed in float64."""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def relative_distance(matrix: Tensor, start: Tensor) -> float:
    """Computes the Frobenius norm of the difference of two tensors of one shape over that of the second."""
    start = start.double()
    return float((matrix.double() - start).norm() / start.norm())


def effective_rank(matrix: Tensor) -> float:
    """Computes the effective rank of a matrix [rows, columns] (Roy and Vetterli, 2007).

    It is the exponential of the entropy of the singular values, divided by their sum: r for r equal ones.
    """
    return float(effective_count(torch.linalg.svdvals(matrix.double())))


def effective_count(weights: Tensor) -> Tensor:
    """Computes on how many entries weights spread: float64 [...] of weights [..., entries].

    It is the exponential of the entropy of their absolute values, divided by their sum: n for n equal ones and zeros
    beside them, 1 where all are zero.
    """
    return torch.special.entr(normalize(weights.double(), p=1, dim=-1).abs()).sum(-1).exp()


def cosines(vectors: Tensor) -> Tensor:
    """Computes the cosine of the angle between each two vectors: float64 [..., n, n] of [..., n, length]."""
    unit = normalize(vectors.double(), dim=-1)
    return unit @ unit.mT


def mean_cosine(vectors: Tensor) -> float | None:
    """Computes the mean cosine between different vectors of [..., n, length]; None where there is only one."""
    count = vectors.shape[-2]
    if count == 1:
        return None
    between = ~torch.eye(count, dtype=torch.bool)
    return float(cosines(vectors)[..., between].mean())
