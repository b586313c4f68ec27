"""Counting pairs by a sum that is not symmetric: the task CPM-3 of the paper of interleaved head attention.

"Count permutation match 3" (arXiv 2602.21371, section 4.3): of N whole numbers x_1 ... x_N below a modulus M, each
position i asks for the number of ordered pairs of positions that close a sum with it,

    count_i = |{(j, l) in [N]^2 : x_i + G x_j + x_l = 0 mod M}|,

j = l and either equal to i allowed. With G = 1 mod M the two places of a pair could be exchanged, with G = 0 the first
would not matter; the paper asks for G > 2M, which excludes neither.

Numbers are drawn evenly and stand on a square grid in raster order, one for each pixel, in one of two encodings: a
value is one channel, x / (M - 1), as in the paper; a symbol is one of M channels, 1 in channel x and 0 elsewhere.

Its targets are counts of positions, not classes, so `DATASETS` lacks it; `experiments/counting/run.py` reads it.

B images, N numbers of an image, M modulus.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from headmix_vision.checks import check_choice, check_counts
from headmix_vision.data.datasets.base import canonical_split
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError

LENGTHS = {"train": 10_000_000, "validation": 4096}
ENCODINGS = ("value", "symbol")
_WORDS = 4  # of 64 bits, which Philox draws at a time


class PairCounting(Dataset[tuple[Tensor, Tensor]]):
    """The images of one split; each depends on (seed, split, index) alone and is drawn when it is read.

    Args:
        split: `train` or `validation`, or a synonym.
        grid: Numbers along each side; N is its square.
        modulus: M, at least 3.
        coefficient: G, which must be neither 0 nor 1 modulo M.
        encoding: `value` for one channel, `symbol` for M.
        seed: Seed of all images.
        length: Number of images; ten million for training and 4096 for validation when None.

    Raises:
        InputError: An unknown split or encoding, a number out of range, or a coefficient for which the order of a pair
            does not matter.
    """

    def __init__(
        self,
        split: str,
        grid: int = 4,
        modulus: int = 5,
        coefficient: int = 12,
        encoding: str = "value",
        seed: int = 0,
        length: int | None = None,
    ) -> None:
        self.split = canonical_split(split)
        check_counts(1, grid=grid)
        check_counts(3, modulus=modulus)
        check_counts(2, coefficient=coefficient)
        if coefficient % modulus < 2:
            raise InputError(
                f"coefficient must be neither 0 nor 1 modulo {modulus}, where the order of a pair does not matter, "
                f"got {coefficient}."
            )
        check_choice("encoding", encoding, ENCODINGS)
        if length is not None:
            check_counts(1, length=length)
        self.grid, self.modulus, self.coefficient, self.encoding, self.seed = grid, modulus, coefficient, encoding, seed
        self.length = length or LENGTHS[self.split]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Image, float32 [C, grid, grid], and counts, int64 [grid²]."""
        images, counts = self.encode(torch.from_numpy(self.numbers(index, 1)))
        return images[0], counts[0]

    def numbers(self, first: int, count: int) -> np.ndarray:
        """The numbers of images ``first`` to ``first + count - 1``: int64 [count, N]."""
        if not 0 <= first <= first + count <= self.length:
            raise IndexError(f"images {first} to {first + count - 1} of {self.length}")
        steps = -(-(self.grid**2) // _WORDS)
        generator = np.random.Philox(key=derive_seed(self.seed, list(LENGTHS).index(self.split)))
        words = generator.advance(first * steps).random_raw(count * steps * _WORDS).reshape(count, -1)
        return (words[:, : self.grid**2] % self.modulus).astype(np.int64)

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Images float32 [B, C, grid, grid] and counts int64 [B, N] of numbers [B, N], on their device."""
        numbers = numbers.long()
        counts = count_pairs(numbers, self.modulus, self.coefficient)
        if self.encoding == "value":
            pixels = numbers[:, None].float() / (self.modulus - 1)
        else:
            pixels = F.one_hot(numbers, self.modulus).transpose(1, 2).float()
        return pixels.unflatten(2, (self.grid, self.grid)), counts


def count_pairs(numbers: Tensor, modulus: int, coefficient: int) -> Tensor:
    """Count the ordered pairs that close a sum with each number: int64 [B, N] -> int64 [B, N].

    The counts depend on how often each value occurs, not on where: with n_v the number of places whose number is v,
    count_i is the sum of n_a n_b over b = -(x_i + G a) mod M.
    """
    occurrences = F.one_hot(numbers, modulus).sum(1)  # [B, M]
    values = torch.arange(modulus, device=numbers.device)
    partners = (-values[:, None] - coefficient * values) % modulus  # [x, a] -> b
    by_value = (occurrences[:, None] * occurrences[:, partners]).sum(2)  # [B, M]
    return by_value.gather(1, numbers)
