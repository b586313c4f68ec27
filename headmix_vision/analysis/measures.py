"""Numbers that sum up weights and matrices; all are computed in float64."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

# Rounding N weights of a row to float32 moves singular values by some 6e-8 times the largest and the root of the stable
# rank: what lies below depends on the rounding of the network, what lies above does not. float64 resolves it well.
RANK_TOLERANCE = 1e-6


def relative_distance(matrix: Tensor, start: Tensor) -> float:
    """Compute the Frobenius norm of `matrix - start` over the norm of `start`, two tensors of one shape."""
    start = start.double()
    return float((matrix.double() - start).norm() / start.norm())


def effective_rank(matrix: Tensor) -> float:
    """Compute the effective rank of a matrix [rows, columns] (Roy and Vetterli, 2007).

    It is the exponential of the entropy of the singular values, divided by their sum: r for r equal ones.
    """
    return float(effective_count(torch.linalg.svdvals(matrix.double())))


def effective_count(weights: Tensor) -> Tensor:
    """Compute on how many entries weights spread: float64 [...] of weights [..., entries].

    It is the exponential of the entropy of their absolute values, divided by their sum: n for n equal ones and zeros
    beside them, 1 where all are zero.
    """
    return torch.special.entr(normalize(weights.double(), p=1, dim=-1).abs()).sum(-1).exp()


def cosines(vectors: Tensor) -> Tensor:
    """Compute the cosine of the angle between each two vectors: float64 [..., n, n] of [..., n, length]."""
    unit = normalize(vectors.double(), dim=-1)
    return unit @ unit.mT


def mean_cosine(vectors: Tensor) -> float | None:
    """Compute the mean cosine between different vectors of [..., n, length]; None where there is only one."""
    count = vectors.shape[-2]
    if count == 1:
        return None
    between = ~torch.eye(count, dtype=torch.bool)
    return float(cosines(vectors)[..., between].mean())


def numerical_rank(singular_values: Tensor) -> Tensor:
    """Count the singular values [..., n], largest first, above `RANK_TOLERANCE` times the largest: int64 [...]."""
    return (singular_values > RANK_TOLERANCE * singular_values[..., :1]).sum(-1)


def stable_rank(singular_values: Tensor) -> Tensor:
    """Compute the squared Frobenius norm over the squared spectral norm: float64 [...]; 0 of a matrix of zeros."""
    squares = singular_values.double().square()
    return (squares / squares[..., :1]).nan_to_num().sum(-1)


def mean_distance(weights: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Compute how far rows look: the mean over rows of the distance to columns, weighted by absolute weights.

    Args:
        weights: [..., R, N].
        rows, columns: float64 [R, axes] and [N, axes], their places.

    Returns:
        float64 [...], in the unit of the places.
    """
    shares = normalize(weights.double(), p=1, dim=-1).abs()
    return (shares * torch.cdist(rows, columns)).sum(-1).mean(-1)
