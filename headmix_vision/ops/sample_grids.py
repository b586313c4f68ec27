"""Place the tokens of a padded batch, in which each sample has a token grid of its own.

B batch, N tokens of a sample and its padding, A axes, P places of a layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.errors import InputError, check_counts
from headmix_vision.ops.dispatch import as_axes, check_tensors
from headmix_vision.ops.token_blocks import TokenBlocks, gather
from headmix_vision.ops.token_grid import TokenGrid


class Layout(NamedTuple):
    """Places for the tokens of a padded batch in other sequences, as index tables of the flattened batch.

    Attributes:
        places: int64 [R * P], the token at each place of R sequences, 0 where there is none.
        absent: bool [R * P, 1], places without a token.
        back: int64 [B * N], the place of each token, 0 for padding.
        padding: bool [B * N, 1], tokens that are padding.
        samples: B.
        sequences: R.
    """

    places: Tensor
    absent: Tensor
    back: Tensor
    padding: Tensor
    samples: int
    sequences: int

    @classmethod
    def of(
        cls, place: Tensor, valid: Tensor, count: int, num_prefix_tokens: int, repeats: int, sequences: int
    ) -> Layout:
        """Build the tables.

        Args:
            place: int64 [B, N], the place of each token among ``count`` in its sequence.
            valid: bool [B, N], False for padding.
            count: places of a sequence.
            num_prefix_tokens: tokens in front of the others of each sample, which then come before all places.
            repeats: pseudo-tokens of a token, one after the other in its place.
            sequences: R, as many as samples, or 1 for all.
        """
        samples, prefix = len(place), num_prefix_tokens
        sample = torch.arange(samples, device=place.device)[:, None]
        of_sequence = prefix * samples // sequences
        if prefix:
            first = torch.arange(prefix, device=place.device) + (sample * prefix if sequences == 1 else 0)
            place = torch.cat([first.expand(samples, -1), place + of_sequence], 1)
            valid = F.pad(valid, (prefix, 0), value=True)
        if repeats > 1:
            each = torch.arange(repeats, device=place.device)
            place, valid = (place[..., None] * repeats + each).flatten(1), valid.repeat_interleave(repeats, 1)
        length = repeats * (of_sequence + count)
        place, valid = (place if sequences == 1 else place + sample * length).flatten(), valid.flatten()
        places = place.new_full((sequences * length + 1,), -1)  # the last is for padding
        places = places.scatter(0, place.where(valid, len(places) - 1), torch.arange(len(place), device=place.device))
        absent = places[:-1, None] < 0
        return cls(places[:-1].clamp(min=0), absent, place.where(valid, 0), ~valid[:, None], samples, sequences)

    def spread(self, *tensors: Tensor) -> list[Tensor]:
        """Move tokens [B, N, ...] to their places [R, P, ...]; places without a token are zero."""
        return _moved(tensors, self.sequences, self.places, self.absent, self.back, self.padding)

    def collect(self, *tensors: Tensor) -> list[Tensor]:
        """Move places [R, P, ...] back to tokens [B, N, ...], zero for padding."""
        return _moved(tensors, self.samples, self.back, self.padding, self.places, self.absent)


def _moved(tensors: Sequence[Tensor], rows: int, *tables: Tensor) -> list[Tensor]:
    moved = gather([x.reshape(x.shape[0] * x.shape[1], -1) for x in tensors], 0, *tables)
    return [y.view(rows, -1, *x.shape[2:]) for x, y in zip(tensors, moved, strict=True)]


@dataclass(frozen=True, eq=False)
class SampleGrids:
    """The token grids of the samples of a padded batch, with the place of each token on the grid of its sample.

    Build it with :meth:`of` or :meth:`of_coordinates`, once for a batch: layers share its index tables. Prefix tokens
    are not part of it.

    Attributes:
        shapes: tokens along each axis, for each sample.
        coordinates: int64 [B, N, A], the place of each token on its grid.
        valid: bool [B, N], True for tokens of the sample, False for padding.
        sizes: int64 [B, A], ``shapes`` on the device of the tokens.
        is_raster: whether the tokens of each sample are known to lie in raster order, before its padding.
    """

    shapes: tuple[tuple[int, ...], ...]
    coordinates: Tensor
    valid: Tensor
    sizes: Tensor
    is_raster: bool
    _layouts: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        shapes: Sequence[tuple[int, ...]],
        num_tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> SampleGrids:
        """Describe samples whose tokens lie in raster order, followed by padding.

        Args:
            shapes: tokens along each axis, one to three axes, for each sample.
            num_tokens: N; by default the tokens of the largest sample.
            device: of the tokens.

        Raises:
            InputError: if there is no sample, a grid is not one of positive whole numbers, the numbers of axes differ,
                or a sample has more than N tokens.
        """
        shapes = tuple(TokenGrid(as_axes("a token grid", shape)).shape for shape in shapes)
        if len({len(shape) for shape in shapes}) != 1:
            raise InputError(f"a batch needs at least one sample, with the same number of axes for all, got {shapes}.")
        largest = max(map(math.prod, shapes))
        num_tokens = largest if num_tokens is None else num_tokens
        check_counts(largest, num_tokens=num_tokens)
        sizes = torch.tensor(shapes)
        strides = torch.tensor([[math.prod(shape[axis + 1 :]) for axis in range(len(shape))] for shape in shapes])
        token = torch.arange(num_tokens)
        coordinates = token[:, None] // strides[:, None] % sizes[:, None]
        valid = token < sizes.prod(1, keepdim=True)
        return cls(shapes, coordinates.to(device), valid.to(device), sizes.to(device), True)

    @classmethod
    def of_coordinates(cls, coordinates: Tensor, valid: Tensor | None = None) -> SampleGrids:
        """Describe samples by the coordinates of their tokens, as timm's NaFlex loaders do.

        Reading the sizes of the grids waits for the device once.

        Args:
            coordinates: integers [B, N, A], the place of each token along the axes, (y, x) for images.
            valid: bool [B, N], False for padding; None for no padding. The grid of a sample ends with its last token
                along each axis.

        Raises:
            InputError: if shapes or types do not fit, a sample is all padding, a coordinate is negative, or two tokens
                of a sample have one place.
        """
        check_tensors(coordinates=coordinates)
        if coordinates.ndim != 3 or not 1 <= coordinates.shape[2] <= 3 or coordinates.is_floating_point():
            raise InputError(
                "coordinates must be integers [B, N, A] with one to three axes, got"
                f" {coordinates.dtype} of shape {tuple(coordinates.shape)}."
            )
        if valid is None:
            valid = torch.ones(coordinates.shape[:2], dtype=torch.bool, device=coordinates.device)
        check_tensors(valid=valid)
        if valid.shape != coordinates.shape[:2] or 0 in valid.shape:
            raise InputError(
                f"valid must be [B, N] = {tuple(coordinates.shape[:2])} with a sample and a token, got shape"
                f" {tuple(valid.shape)}."
            )
        coordinates, valid = coordinates.long(), valid.bool()
        sizes = coordinates.where(valid[..., None], -1).amax(1) + 1
        places = _raveled(coordinates, sizes).where(valid, torch.iinfo(torch.long).max)
        ranked = places.sort(1).values
        repeated = ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] < torch.iinfo(torch.long).max)).any()
        facts = (coordinates.where(valid[..., None], 0).amin() < 0, repeated, (places == ranked).all())
        *flat, negative, repeated, in_order = torch.cat([sizes.flatten(), torch.stack(facts).long()]).tolist()
        axes = coordinates.shape[2]
        shapes = tuple(tuple(flat[start : start + axes]) for start in range(0, len(flat), axes))
        empty = [sample for sample, shape in enumerate(shapes) if 0 in shape]
        if negative:
            raise InputError("coordinates must be at least 0.")
        if empty:
            raise InputError(f"sample {empty[0]} of the batch has no token: valid is False everywhere. Leave it out.")
        if repeated:
            raise InputError("two tokens of a sample have the same coordinates. Mark padding in valid.")
        return cls(shapes, coordinates, valid, sizes, bool(in_order))

    def take(self, kept: Tensor) -> SampleGrids:
        """Describe a choice of tokens, int64 [B, n], such as those that patch dropout keeps, in any order."""
        coordinates = self.coordinates.gather(1, kept[..., None].expand(-1, -1, self.coordinates.shape[2]))
        return SampleGrids(self.shapes, coordinates, self.valid.gather(1, kept), self.sizes, False)

    @property
    def num_tokens(self) -> int:
        """N, prefix tokens left out."""
        return self.valid.shape[1]

    def mask(self, num_prefix_tokens: int = 0) -> Tensor:
        """Return which tokens are real, prefix tokens included: bool [B, prefix + N]."""
        return F.pad(self.valid, (num_prefix_tokens, 0), value=True) if num_prefix_tokens else self.valid

    def sheet(self, gaps: tuple[int, ...], num_prefix_tokens: int = 0, repeats: int = 1) -> tuple[TokenGrid, Layout]:
        """Put all samples on one grid, each in a place of its own, so that convolutions do not join them.

        A clip shares its time axis with all others: the sheet has as many frames as the longest.

        Args:
            gaps: tokens that neighbours on the sheet are apart at least, along each axis.
            num_prefix_tokens, repeats: of the tokens of a sample.
        """

        def make() -> tuple[TokenGrid, Layout]:
            corners, extents = _shelves(self.shapes, gaps)
            place = _raveled(
                self.coordinates + self.sizes.new_tensor(corners)[:, None], self.sizes.new_tensor([extents])
            )
            layout = Layout.of(place, self.valid, math.prod(extents), num_prefix_tokens, repeats, 1)
            return TokenGrid(extents, num_prefix_tokens * len(self.shapes), repeats), layout

        return self._kept(("sheet", gaps), num_prefix_tokens, repeats, make)

    def blocks(
        self, block_grid: tuple[int, ...], num_prefix_tokens: int = 0, repeats: int = 1
    ) -> tuple[TokenBlocks, Layout]:
        """Cut each grid into blocks as :class:`TokenBlocks` does, and put them into a sequence of equal blocks.

        An axis of fewer tokens than blocks has a block for each token and leaves the others empty.

        Raises:
            InputError: if the axes do not match.
        """
        if len(block_grid) != len(self.shapes[0]):
            raise InputError(f"grid {self.shapes[0]} and block_grid {block_grid} must have the same number of axes.")

        def make() -> tuple[TokenBlocks, Layout]:
            counts = self.sizes.new_tensor([block_grid])
            sizes = self.sizes.maximum(counts)
            block = self.coordinates * counts[:, None] // sizes[:, None]
            start = (block * sizes[:, None] + counts[:, None] - 1) // counts[:, None]
            longest = (sizes + counts - 1) // counts
            length = max(math.prod(-(-g // b) for g, b in zip(shape, block_grid, strict=True)) for shape in self.shapes)
            place = _raveled(block, counts) * length + _raveled(self.coordinates - start, longest)
            count = math.prod(block_grid)
            blocks = TokenBlocks(TokenGrid((count * length,), num_prefix_tokens, repeats), (count,))
            samples = len(self.shapes)
            return blocks, Layout.of(place, self.valid, count * length, num_prefix_tokens, repeats, samples)

        return self._kept(("blocks", block_grid), num_prefix_tokens, repeats, make)

    def scan(self, order: str, num_prefix_tokens: int = 0, repeats: int = 1) -> Layout | None:
        """Sort the tokens of each sample as a scan reads them, with padding anywhere; None where they lie so.

        Args:
            order: ``"row_major"`` or ``"column_major"``, as in :class:`TokenScan`.
            num_prefix_tokens, repeats: of the tokens.
        """
        if order == "row_major" and self.is_raster:
            return None

        def make() -> Layout:
            axes = list(range(len(self.shapes[0])))[:: 1 if order == "row_major" else -1]
            key = _raveled(self.coordinates[..., axes], self.sizes[:, axes])
            rank = key.argsort(1).argsort(1)
            return Layout.of(rank, self.valid, self.num_tokens, num_prefix_tokens, repeats, len(self.shapes))

        return self._kept(("scan", order), num_prefix_tokens, repeats, make)

    def _kept(self, kind: tuple[Any, ...], prefix: int, repeats: int, make: Callable[[], Any]) -> Any:
        """Build a layout when it is first asked for; autograd may save its tables, under inference mode too."""
        if torch.compiler.is_compiling():
            return make()
        key = (*kind, prefix, repeats)
        if key not in self._layouts:
            with torch.inference_mode(False):
                self._layouts[key] = make()
        return self._layouts[key]


def _raveled(coordinates: Tensor, sizes: Tensor) -> Tensor:
    """Number places on grids of these sizes, [B or 1, A], in raster order: [B, N, A] -> [B, N]."""
    place = coordinates[..., 0]
    for axis in range(1, coordinates.shape[-1]):
        place = place * sizes[:, axis, None] + coordinates[..., axis]
    return place


def _shelves(shapes: Sequence[tuple[int, ...]], gaps: tuple[int, ...]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Place grids on shelves of a sheet, the highest first: the corner of each, and the extents of the sheet."""
    axes, (row_gap, gap) = len(gaps), (0, *gaps)[-2:]
    sizes = [(1, *shape)[-2:] for shape in shapes]
    if axes == 1:
        width = sum(w + gap for _, w in sizes)
    else:
        area = sum((h + row_gap) * (w + gap) for h, w in sizes)
        width = max(math.isqrt(area), *(w for _, w in sizes))
    corners, top, left, height = {}, 0, 0, 0
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number][0]):
        h, w = sizes[number]
        if left + w > width:
            top, left, height = top + height + row_gap, 0, 0
        corners[number] = (0, top, left)[-axes:]
        left, height = left + w + gap, max(height, h)
    frames = max(shape[0] for shape in shapes)
    return [corners[number] for number in range(len(sizes))], (frames, top + height, width)[-axes:]
