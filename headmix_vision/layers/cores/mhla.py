"""Compute linear attention, and multi-head linear attention over token blocks, which mixes the memories of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from headmix_vision.errors import InputError, check_flags, check_numbers
from headmix_vision.layers.block_mixing import MixingMatrix, mixing_of_first, mixing_of_rows
from headmix_vision.layers.cores.base import CORES, AttentionCore, LayerSpec
from headmix_vision.layers.positions import Rotation, rotate
from headmix_vision.ops import MHLAState, SampleGrids, TokenBlocks, TokenGrid, TokenRanks, mhla_step
from headmix_vision.ops.dispatch import Bound, kept
from headmix_vision.ops.mhla.api import bind_mhla, check_options
from headmix_vision.ops.mhla.recurrent import mhla_rows
from headmix_vision.ops.mhla.torch_impl import apply_feature_map
from headmix_vision.ops.numerics import accumulation_dtype


@CORES.register("linear")
class LinearCore(AttentionCore):
    """Compute linear attention (Katharopoulos et al., 2020): MHLA with all tokens, prefix included, in one block.

    Args:
        spec: sizes of the layer.
        normalizer, feature_map, eps, impl: of :func:`headmix_vision.ops.mhla`.

    Raises:
        InputError: if an option is unknown, or ``eps`` is negative or not finite.
    """

    mixing: MixingMatrix | None

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
        self.mixing = None
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
        key_mask: Tensor | None = None,
        sample_grids: SampleGrids | None = None,
    ) -> Tensor:
        if sample_grids is not None and self.mixing is not None:
            return self._of_samples(q, k, v, grid, rotation, key_mask, sample_grids)
        further: tuple[Tensor | None, ...] = () if self.mixing is None else (self.mixing(),)
        if rotation is not None or key_mask is not None:
            further += _further(rotation, key_mask)
        out: Tensor = self.bind(grid, ranks)(q, k, v, *further)
        return out

    def bind(self, grid: TokenGrid, ranks: TokenRanks | None = None) -> Bound:
        """Return the call of q, k, v and, where there are some, cosines and sines of positions, and the key mask."""
        return bind_linear(grid, ranks, **self.options)

    def _of_samples(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        rotation: Rotation | None,
        key_mask: Tensor | None,
        sample_grids: SampleGrids,
    ) -> Tensor:
        """Put the tokens of each sample into the blocks of its own grid, and attend to equal blocks with a mask."""
        assert self.mixing is not None and key_mask is not None
        block_grid = self.mixing.blocks.block_grid
        blocks, layout = sample_grids.blocks(block_grid, grid.num_prefix_tokens, grid.repeats)
        if rotation is not None:  # of the grid's tokens alone, without prefix tokens and pseudo-tokens
            cos, sin = sample_grids.blocks(block_grid)[1].spread(*rotation)
            rotation = cos, sin
        q, k, v, key_mask = layout.spread(q, k, v, key_mask)
        out = bind_equal_blocks(blocks, **self.options)(q, k, v, self.mixing(), *_further(rotation, key_mask))
        return layout.collect(out)[0]

    def check_rotation(self) -> None:
        """Refuse rotary positions beside the normalizer of the released code, which has no rotated form."""
        if self.options["normalizer"] == "source_block":
            raise InputError("rotary positions need the normalizer 'paper' or None, not 'source_block'.")

    def check_padding(self, sample_grids: SampleGrids | None) -> None:
        """Refuse masks beside the normalizer of the released code, and grids of samples in causal rows of blocks."""
        if self.options["normalizer"] == "source_block":
            raise InputError("a key mask needs the normalizer 'paper' or None, not 'source_block'.")
        if sample_grids is not None and self.causal == "rows":
            raise InputError("causal='rows' needs one grid for all samples of a batch.")

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


@CORES.register("mhla")
class MHLACore(LinearCore):
    """Compute multi-head linear attention (arXiv 2601.07832): linear attention whose block memories are mixed.

    A clip of fewer frames than there are blocks along time has a block for each frame, mixed as the first blocks are.

    Args:
        spec: sizes of the layer, with the blocks along each axis of the grid.
        mixing_init, mixing_trainable, mixing_clip: ``init``, ``trainable`` and ``clip`` of
            :class:`~headmix_vision.layers.MixingMatrix`.
        mixing_per_head: a mixing matrix for each head instead of one for all.
        causal: tokens see themselves and those before them in the order of the blocks, so that no row of blocks along
            the first axis, time in a clip, sees a later one. Prefix tokens see prefix tokens alone. ``"rows"``: tokens
            see their own row of blocks and those before it. Rows keep their length and may be of any number: those
            after the last of ``spec.grid`` are mixed as it is, and see as many rows before them.
        options: ``normalizer``, ``feature_map``, ``eps`` and ``impl`` of :func:`headmix_vision.ops.mhla`.

    Raises:
        InputError: if the blocks do not fit the grid, an option is unknown, ``causal=True`` meets a head mix that makes
            several pseudo-tokens per token, or ``"rows"`` meets rows of unequal length or prefix tokens.
    """

    mixing: MixingMatrix

    def __init__(
        self,
        spec: LayerSpec,
        mixing_init: str = "locality",
        mixing_trainable: bool = True,
        mixing_clip: bool = True,
        mixing_per_head: bool = False,
        causal: bool | str = False,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        check_flags(mixing_trainable=mixing_trainable, mixing_clip=mixing_clip, mixing_per_head=mixing_per_head)
        if causal != "rows" and not isinstance(causal, bool):
            raise InputError(f"causal must be true or false or 'rows', got {causal!r}.")
        if causal is True and spec.grid.repeats > 1:
            raise InputError(
                f"causal=True cannot be joined with a head mix that makes {spec.grid.repeats} pseudo-tokens per token:"
                " those of one token would not see each other."
            )
        self.causal, self.options["causal"] = causal, causal is True
        heads = spec.num_heads if mixing_per_head else None
        blocks = self._check_rows(TokenBlocks(spec.grid, spec.block_grid))
        self.mixing = MixingMatrix(blocks, heads, mixing_init, mixing_trainable, **spec.factory, clip=mixing_clip)

    def bind(self, grid: TokenGrid, ranks: TokenRanks | None = None) -> Bound:
        """Return the call of q, k, v, the mixing and, where there are some, cosines, sines and the key mask."""
        row = self.row_length if self.causal == "rows" else None
        return bind_mhla_core(grid, ranks, self.mixing.blocks.block_grid, row, **self.options)

    @property
    def row_length(self) -> int:
        """Tokens of a row of blocks along the first axis, where all rows have as many."""
        blocks = self.mixing.blocks
        return blocks.grid.shape[0] // blocks.block_grid[0]

    def stream(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        state: tuple[MHLAState, ...] | None = None,
        *,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, tuple[MHLAState, ...]]:
        """Compute the next rows of blocks along the first axis, as ``forward`` of the whole grid does.

        Prefix tokens come with the first of them. The state is that of the op; with rotary positions and a normalizer
        that of the denominators stands beside it. Of ``causal="rows"`` it holds the blocks that the next row can see.
        """
        if not self.causal:
            return super().stream(q, k, v, grid, state, rotation=rotation)
        if self.causal == "rows":
            return stream_rows(q, k, v, grid, state, rotation, self.mixing, self.options)
        blocks = TokenBlocks.of_clip(grid, self.mixing.blocks.block_grid)
        first = 0 if state is None else state[0].num_tokens
        _check_pieces(blocks, first, q.shape[1])
        part = blocks.order(q)[first : first + q.shape[1]] - first
        back, before, after = part.argsort(), iter(state or (None, None)), []

        def attend(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, **options: Any) -> Tensor:
            out, new = mhla_step(q[:, part], k[:, part], v[:, part], mixing, blocks, next(before), **options)
            after.append(new)
            return out[:, back]

        mixing = mixing_of_first(self.mixing(), blocks)
        if rotation is None:
            return attend(q, k, v, mixing, **self._step_options), tuple(after)
        prefix = grid.num_prefix_tokens
        piece = TokenGrid((q.shape[1] - (0 if first else prefix),), 0 if first else prefix)
        return self._rotated(q, k, v, mixing, rotation, attend, blocks, piece), tuple(after)

    @property
    def _step_options(self) -> dict[str, Any]:
        return {name: self.options[name] for name in ("normalizer", "feature_map", "eps")}

    def _rotated(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mixing: Tensor,
        rotation: Rotation,
        attend: Callable[..., Tensor],
        blocks: TokenBlocks,
        grid: TokenGrid,
    ) -> Tensor:
        """Compute the tokens of a piece by a step that is given."""
        step, largest = partial(attend, **PLAIN), blocks.max_block_size
        return separate_mhla(q, k, v, mixing, *rotation, attend=step, largest=largest, grid=grid, options=self.options)

    def flops(self, grid: TokenGrid) -> int:
        """Count linear attention, and the mixing of the memories of all blocks.

        Causal queries read the memory of their own block apart from that of the blocks before, which alone are mixed.
        """
        blocks = self.mixing.blocks.num_blocks
        causal = self.options["causal"]
        pairs, again = (blocks * (blocks - 1) // 2, grid.num_tokens) if causal else (blocks**2, 0)
        return super().flops(grid) + 2 * self.num_heads * (pairs + again) * self._memory

    def set_grid(self, grid: TokenGrid) -> None:
        """Adopt another token grid: blocks change their size, their number stays."""
        self.mixing.set_blocks(self._check_rows(TokenBlocks(grid, self.mixing.blocks.block_grid)))

    def set_block_grid(self, block_grid: tuple[int, ...]) -> None:
        """Cut the token grid into other blocks, resampling the mixing matrix."""
        self.mixing.set_blocks(self._check_rows(TokenBlocks(self.mixing.blocks.grid, block_grid)))

    def _check_rows(self, blocks: TokenBlocks) -> TokenBlocks:
        """Return blocks that ``causal="rows"`` can have; refuse others."""
        if self.causal == "rows" and (blocks.grid.num_prefix_tokens or blocks.grid.shape[0] % blocks.block_grid[0]):
            raise InputError(
                f"causal='rows' needs rows of blocks of equal length, and no prefix tokens: got {blocks.grid} in"
                f" {blocks.block_grid[0]} rows."
            )
        return blocks


def stream_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: TokenGrid,
    state: tuple[MHLAState, ...] | None,
    rotation: Rotation | None,
    matrix: MixingMatrix,
    options: dict[str, Any],
) -> tuple[Tensor, tuple[MHLAState, ...]]:
    """Compute the next rows of blocks along the first axis, whose tokens see their own row and those before it.

    Args:
        q, k, v, grid, state, rotation: as in :meth:`~headmix_vision.layers.AttentionCore.stream`.
        matrix: mixing matrix of a grid whose rows of blocks have one length.
        options: ``normalizer``, ``feature_map`` and ``eps`` are read.

    Returns:
        Outputs, and the state after these rows, which holds the blocks that the next row can see.
    """
    rows, *across = matrix.blocks.block_grid
    of_row, each = math.prod(across), grid.repeats * math.prod(grid.shape[1:])
    length = matrix.blocks.grid.shape[0] // rows
    count = q.shape[1] // (each * length)
    if not count or q.shape[1] != count * each * length:
        raise InputError(f"pieces must be whole rows of blocks, {length} x {each} tokens each: got {q.shape[1]}.")
    grid = replace(grid, shape=(count * length, *grid.shape[1:]))
    blocks = TokenBlocks(grid, (count, *across))
    kept = 0 if state is None else state[0].summaries.shape[2] // of_row
    mixing = per_token(mixing_of_rows(matrix(), of_row, kept + count), grid, options)
    before, after = iter(state or (None, None)), []

    def attend(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, **options: Any) -> Tensor:
        taken = next(before)
        memory = None if taken is None else taken.summaries
        out, summaries = mhla_rows(q, k, v, mixing, blocks, memory, **options)
        seen = summaries[:, :, max(kept + count + 1 - rows, 0) * of_row :]
        after.append(MHLAState(seen.clone(), q.shape[1] + (0 if taken is None else taken.num_tokens)))
        return out

    if rotation is None:
        step = {name: options[name] for name in ("normalizer", "feature_map", "eps")}
        return attend(q, k, v, mixing, **step), tuple(after)
    further: dict[str, Any] = {"largest": blocks.max_block_size, "grid": grid, "options": options}
    out = separate_mhla(q, k, v, mixing, *rotation, attend=partial(attend, **PLAIN), **further)
    return out, tuple(after)


@kept
def bind_linear(grid: TokenGrid, ranks: TokenRanks | None, **options: Any) -> Bound:
    """Put all tokens into one block; prefix tokens into one of their own under context parallelism."""
    one = TokenBlocks.from_grid((grid.num_tokens,), (1,))
    blocks = one if ranks is None else TokenBlocks(grid, (1,) * len(grid.shape))
    bound = bind_blocks(blocks, grid, ranks, lambda mixing: mixing, options)

    def plan(q: Tensor, k: Tensor, v: Tensor, *further: Tensor | None) -> Callable[..., Tensor]:
        size = (blocks.num_blocks,) * 2
        run = bound.plan(q, k, v, q.new_ones(size), *further)
        return lambda q, k, v, *further: run(q, k, v, q.new_ones(size), *further)

    return Bound(plan)


@kept
def bind_equal_blocks(blocks: TokenBlocks, **options: Any) -> Bound:
    """Bind :func:`headmix_vision.ops.mhla` to the blocks of a padded batch, which are mixed as they are."""
    return bind_blocks(blocks, blocks.grid, None, lambda mixing: mixing, options)


def bind_blocks(
    blocks: TokenBlocks,
    grid: TokenGrid,
    ranks: TokenRanks | None,
    fit: Callable[[Tensor], Tensor],
    options: dict[str, Any],
) -> Bound:
    """Bind :func:`headmix_vision.ops.mhla` to blocks.

    The call takes q, k, v, the mixing and, each None where missing, cosines and sines of rotary positions, and the key
    mask.

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

    def plan(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, *further: Tensor | None) -> Callable[..., Tensor]:
        if further:
            return partial(
                separate_mhla, attend=plain, weigh=weigh, largest=blocks.max_block_size, grid=held_grid, options=options
            )
        weighed = weigh(mixing)
        run = op.planned(q, k, v, weighed)
        return run if weighed is mixing else lambda q, k, v, mixing: run(q, k, v, weigh(mixing))

    return Bound(plan)


PLAIN: dict[str, Any] = {"normalizer": None, "feature_map": "identity", "eps": 1e-6}  # products and sums alone


def separate_mhla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    key_mask: Tensor | None = None,
    *,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    largest: int,
    grid: TokenGrid,
    options: dict[str, Any],
    weigh: Callable[[Tensor], Tensor] = lambda mixing: mixing,
) -> Tensor:
    """Compute the numerator and the denominator of :func:`headmix_vision.ops.mhla` apart.

    Rotary positions rotate the features of the numerator alone: rotated features may be negative, and a denominator of
    them could be zero. A key mask sets features and values of padding to zero after the feature map, whose ``eps``
    would add them to both sums again. In types below float32 both sums are rounded before they are divided.

    Args:
        q, k, v, mixing: as in ``mhla``.
        cos, sin: rotary positions of the tokens, or None.
        key_mask: bool [B, N], False for padding, whose outputs are zero; or None.
        attend: ``mhla`` of q, k, v and the mixing, with the options ``PLAIN``.
        largest: tokens in the largest block.
        grid: the tokens.
        options: ``normalizer``, ``feature_map`` and ``eps`` are read.
        weigh: makes the weights of the blocks of ``mixing``.
    """
    normalizer, feature_map, eps = options["normalizer"], options["feature_map"], options["eps"]
    q, k = (apply_feature_map(y.to(accumulation_dtype(y.dtype)), feature_map, eps) for y in (q, k))
    ones, padding = v.new_ones(*v.shape[:3], 1), None
    if key_mask is not None:
        padding = ~key_mask[..., None, None]
        q, k, v, ones = (y.masked_fill(padding, 0) for y in (q, k, v, ones))
    mixing = weigh(mixing)
    if normalizer is not None:  # cancels, and keeps sums within the range of float16
        mixing = mixing / largest

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.type_as(v), k.type_as(v), v, mixing)

    rotation = None if cos is None or sin is None else (cos, sin)
    out = mix(*((q, k, v) if rotation is None else (rotate(q, rotation, grid), rotate(k, rotation, grid), v)))
    if normalizer is None:
        return out
    sums = mix(q, k, ones)
    return out / (sums if padding is None else sums.masked_fill(padding, 1))


def _further(rotation: Rotation | None, key_mask: Tensor | None) -> tuple[Tensor | None, ...]:
    """List the tensors that a call takes after its usual ones."""
    rotated = () if rotation is None else (rotation[0], rotation[1])
    return rotated if key_mask is None else (*(rotated or (None, None)), key_mask)


def per_token(mixing: Tensor, grid: TokenGrid, options: dict[str, Any]) -> Tensor:
    """Weigh the pseudo-tokens of a token as one: neither outputs nor denominators grow with their number."""
    return mixing if options["normalizer"] == "paper" or grid.repeats == 1 else mixing / grid.repeats


def _check_pieces(blocks: TokenBlocks, first: int, count: int) -> None:
    if not count or first + count not in blocks.row_ends:
        row, prefix = math.prod(blocks.grid.shape[1:]), blocks.grid.num_prefix_tokens
        ends = ", ".join(str((end - prefix) // row) for end in blocks.row_ends)
        raise InputError(
            f"pieces of {blocks.grid} must end with its rows of blocks, after {ends} of {blocks.grid.shape[0]} on the"
            f" first axis: {count} tokens after {first} do not."
        )


@kept
def bind_mhla_core(
    grid: TokenGrid, ranks: TokenRanks | None, block_grid: tuple[int, ...], row: int | None, **options: Any
) -> Bound:
    """Cut a grid into blocks, and say how the mixing of ``block_grid`` becomes theirs.

    ``row`` are the tokens of a row of blocks where rows may be of any number; None where the block grid is fixed.
    """
    if row is None:
        blocks = TokenBlocks.of_clip(grid, block_grid)
        return bind_blocks(blocks, grid, ranks, partial(mixing_of_first, blocks=blocks), options)
    count = -(-grid.shape[0] // row)
    if count > 1 and grid.shape[0] % row:
        raise InputError(f"{grid} has no whole rows of blocks: causal='rows' needs a multiple of {row} tokens.")
    blocks = TokenBlocks(grid, (count, *block_grid[1:]))
    fit = partial(mixing_of_rows, row_blocks=math.prod(block_grid[1:]), count=count)
    return bind_blocks(blocks, grid, ranks, fit, options)
