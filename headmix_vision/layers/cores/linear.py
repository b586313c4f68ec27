"""Compute linear attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from headmix_vision.errors import InputError, check_numbers
from headmix_vision.layers.cores.base import CORES, AttentionCore
from headmix_vision.layers.positions import Rotation, rotate
from headmix_vision.layers.spec import LayerSpec
from headmix_vision.ops import TokenBlocks, TokenGrid, TokenRanks
from headmix_vision.ops.dispatch import Bound, kept
from headmix_vision.ops.mhla.api import bind_mhla, check_options
from headmix_vision.ops.mhla.settings import apply_feature_map
from headmix_vision.ops.runtime import accumulation_dtype


@CORES.register("linear")
class LinearCore(AttentionCore):
    """Compute linear attention (Katharopoulos et al., 2020): MHLA with all tokens, prefix included, in one block.

    Args:
        spec: sizes of the layer.
        normalizer, feature_map, eps, impl: of :func:`headmix_vision.ops.mhla`.

    Raises:
        InputError: if an option is unknown, or ``eps`` is negative or not finite.
    """

    def __init__(
        self,
        spec: LayerSpec,
        normalizer: str | None = "paper",
        feature_map: str = "relu",
        eps: float = 1e-6,
        impl: str = "auto",
    ) -> None:
        super().__init__(spec)
        check_options(normalizer, feature_map, impl)
        check_numbers(0, eps=eps)
        self.options: dict[str, Any] = {
            "normalizer": normalizer,
            "feature_map": feature_map,
            "eps": eps,
            "impl": impl,
        }

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        *,
        rotation: Rotation | None = None,
        ranks: TokenRanks | None = None,
    ) -> Tensor:
        rotated = () if rotation is None else (rotation[0], rotation[1])
        out: Tensor = self.bind(grid, ranks)(q, k, v, *rotated)
        return out

    def bind(self, grid: TokenGrid, ranks: TokenRanks | None = None) -> Bound:
        """Return the call of q, k, v and, where positions are rotary, cosines and sines."""
        return bind_linear(grid, ranks, **self.options)

    def check_rotation(self) -> None:
        """Refuse rotary positions beside the normalizer of the released code, which has no rotated form."""
        if self.options["normalizer"] == "source_block":
            raise InputError("rotary positions need the normalizer 'paper' or None, not 'source_block'.")

    def check_ranks(self) -> None:
        """Refuse causal attention, and the normalizer of the released code, which takes queries of all blocks."""
        if self.options.get("causal"):
            raise InputError("causal attention needs all tokens on one rank.")
        if self.options["normalizer"] == "source_block":
            raise InputError("tokens on several ranks need the normalizer 'paper' or None, not 'source_block'.")

    def flops(self, grid: TokenGrid) -> int:
        """Count each token's part of the memory and its query of it, with their normaliser."""
        return 4 * self.num_heads * grid.num_tokens * self._memory

    @property
    def _memory(self) -> int:
        """Numbers in the memory of a head: D x D, and D of the normaliser."""
        return self.head_dim * (self.head_dim + (self.options["normalizer"] is not None))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


@kept
def bind_linear(grid: TokenGrid, ranks: TokenRanks | None, **options: Any) -> Bound:
    """Put all tokens into one block; prefix tokens into one of their own under context parallelism."""
    one = TokenBlocks.from_grid((grid.num_tokens,), (1,))
    blocks = one if ranks is None else TokenBlocks(grid, (1,) * len(grid.shape))
    bound = bind_blocks(blocks, grid, ranks, lambda mixing: mixing, options)

    def plan(q: Tensor, k: Tensor, v: Tensor, *rotation: Tensor) -> Callable[..., Tensor]:
        size = (blocks.num_blocks,) * 2
        run = bound.plan(q, k, v, q.new_ones(size), *rotation)
        return lambda q, k, v, *rotation: run(q, k, v, q.new_ones(size), *rotation)

    return Bound(plan)


def bind_blocks(
    blocks: TokenBlocks,
    grid: TokenGrid,
    ranks: TokenRanks | None,
    fit: Callable[[Tensor], Tensor],
    options: dict[str, Any],
) -> Bound:
    """Bind :func:`headmix_vision.ops.mhla` to blocks; the call takes q, k, v, the mixing, and rotary positions if any.

    Args:
        blocks: of all tokens.
        grid: the tokens that rotary positions are of.
        ranks: this rank under context parallelism, or None.
        fit: makes the weights of these blocks of those that the call gets.
        options: of the op.
    """
    held = blocks if ranks is None else blocks.of_rank(ranks)
    held_grid = grid if ranks is None else ranks.local(grid)
    op, plain = (bind_mhla(held, **given) for given in (options, options | PLAIN))

    def weigh(mixing: Tensor) -> Tensor:
        return per_token(fit(mixing), grid, options)

    def plan(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, *rotation: Tensor) -> Callable[..., Tensor]:
        if rotation:
            return partial(
                rotated_mhla, attend=plain, weigh=weigh, largest=blocks.max_block_size, grid=held_grid, options=options
            )
        weighed = weigh(mixing)
        run = op.planned(q, k, v, weighed)
        return run if weighed is mixing else lambda q, k, v, mixing: run(q, k, v, weigh(mixing))

    return Bound(plan)


PLAIN: dict[str, Any] = {"normalizer": None, "feature_map": "identity", "eps": 1e-6}  # products and sums alone


def rotated_mhla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    largest: int,
    grid: TokenGrid,
    options: dict[str, Any],
    weigh: Callable[[Tensor], Tensor] = lambda mixing: mixing,
) -> Tensor:
    """Compute :func:`headmix_vision.ops.mhla` with features rotated in the numerator, not in the denominator.

    Rotated features may be negative: a denominator of them could be zero. In types below float32 both sums are rounded
    before they are divided.

    Args:
        q, k, v, mixing: as in ``mhla``.
        cos, sin: rotary positions of the tokens.
        attend: ``mhla`` of q, k, v and the mixing, with the options ``PLAIN``.
        largest: tokens in the largest block.
        grid: the tokens.
        options: ``normalizer``, ``feature_map`` and ``eps`` are read.
        weigh: makes the weights of the blocks of ``mixing``.
    """
    normalizer, feature_map, eps = options["normalizer"], options["feature_map"], options["eps"]
    q, k = (apply_feature_map(y.to(accumulation_dtype(y.dtype)), feature_map, eps) for y in (q, k))
    mixing = weigh(mixing)
    if normalizer is not None:  # cancels, and keeps sums within the range of float16
        mixing = mixing / largest

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.type_as(v), k.type_as(v), v, mixing)

    out = mix(rotate(q, (cos, sin), grid), rotate(k, (cos, sin), grid), v)
    return out if normalizer is None else out / mix(q, k, v.new_ones(*v.shape[:3], 1))


def per_token(mixing: Tensor, grid: TokenGrid, options: dict[str, Any]) -> Tensor:
    """Weigh the pseudo-tokens of a token as one: neither outputs nor denominators grow with their number."""
    return mixing if options["normalizer"] == "paper" or grid.repeats == 1 else mixing / grid.repeats
