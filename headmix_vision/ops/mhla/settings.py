"""Name the normalizers and feature maps of MHLA, and hold all settings of a call in one value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.ops.token_blocks import TokenBlocks
from headmix_vision.ops.token_grid import TokenGrid

FEATURE_MAPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    # eps keeps the features, and so the normaliser, above zero.
    "relu": lambda x, eps: torch.where(x < 0, 0.0, x).add_(
        eps
    ),  # the slope of clamp at zero depends on torch's release
    "elu1": lambda x, eps: F.elu(x) + (1 + eps),
    "identity": lambda x, eps: x,
}


def apply_feature_map(x: Tensor, name: str, eps: float) -> Tensor:
    """Map features elementwise: ``relu(x) + eps``, ``elu(x) + 1 + eps`` or ``x``."""
    return FEATURE_MAPS[name](x, eps)


NORMALIZERS = ("paper", "source_block", None)
REGIMES = ("pairwise", "summary")
_MANTISSA = 2.0**53


class Settings(NamedTuple):
    """The settings of an MHLA call: all that it takes beside tensors; see :func:`headmix_vision.ops.mhla`.

    ``regime`` names the algorithm of the kernels, and ``fallback`` says whether another form may take their place where
    one does not compile; other implementations read neither.
    """

    blocks: TokenBlocks
    normalizer: str | None = "paper"
    feature_map: str = "relu"
    eps: float = 1e-6
    regime: str = "summary"
    causal: bool = False
    fallback: bool = False

    def pack(self) -> list[int]:
        """Write the settings as integers: torch.library passes these, symbolic sizes of a grid included."""
        grid, (mantissa, exponent) = self.blocks.grid, math.frexp(self.eps)
        choices = (
            NORMALIZERS.index(self.normalizer),
            tuple(FEATURE_MAPS).index(self.feature_map),
            REGIMES.index(self.regime),
            int(self.causal),
            int(self.fallback),
        )
        sizes = (grid.num_prefix_tokens, grid.repeats, *grid.shape, *self.blocks.block_grid)
        return [*choices, int(mantissa * _MANTISSA), exponent, *sizes]


def unpack(packed: Sequence[int]) -> Settings:
    """Read what :meth:`Settings.pack` wrote."""
    normalizer, feature_map, regime, causal, fallback, mantissa, exponent, num_prefix_tokens, repeats, *axes = packed
    shape, block_grid = tuple(axes[: len(axes) // 2]), tuple(axes[len(axes) // 2 :])
    return Settings(
        TokenBlocks(TokenGrid(shape, num_prefix_tokens, repeats), block_grid),
        NORMALIZERS[normalizer],
        tuple(FEATURE_MAPS)[feature_map],
        math.ldexp(mantissa / _MANTISSA, exponent),
        REGIMES[regime],
        bool(causal),
        bool(fallback),
    )


def needs_output(packed: Sequence[int]) -> bool:
    """Return whether the backward pass of packed settings reads the output, without reading the rest."""
    return REGIMES[packed[2]] == "pairwise" or bool(packed[3])


@lru_cache(maxsize=256)
def _cached(packed: tuple[int, ...]) -> Settings:
    return unpack(packed)


def unpack_cached(packed: Sequence[int]) -> Settings:
    """Read packed settings without symbolic sizes, once for all calls with the same integers."""
    return _cached(tuple(packed))
