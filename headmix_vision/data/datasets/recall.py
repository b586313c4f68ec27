"""Associative recall over image patches: each patch writes to several places at once, and asks for one of them.

A patch shows up to four rods of eight places with a red bead on each, a green glyph of 4 x 4 dots, and one blue bead.
The red beads are its attributes: from then on each of these places stands for the glyph of this patch, whatever it
stood for before. The blue bead asks for one place that has been named: the answer is the glyph of the latest patch,
this one included, with a red bead there. Patches are read in raster order, and every patch is a question.

Places are named with very unequal frequency (the n-th favourite of a rod as 1 / n², favourites drawn for each image):
one place of a rod changes its glyph with most patches, others keep theirs for long. A memory can neither keep
everything nor forget everything at one rate.

Its targets are answers of patches, not classes, so `DATASETS` lacks it; `experiments/recall/run.py` reads it.
"""

from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headmix_vision.checks import check_counts
from headmix_vision.data.datasets.base import canonical_split
from headmix_vision.data.seeding import derive_seed

LENGTHS = {"train": 1_000_000, "validation": 512}
PATCH = 8
PLACES = 8
MAX_ATTRIBUTES = 4
GLYPH = 4
ATTRIBUTE, ANSWER, QUESTION = range(3)  # red, green, blue


class Record(NamedTuple):
    """The beads and dots of an image of N patches, in raster order.

    Args:
        places: red beads, int64 [N, attributes].
        glyphs: dots, bool [N, 16].
        asked: blue beads, attribute and place, int64 [N, 2].
        sources: the patch whose glyph answers, int64 [N], at most the patch itself.
    """

    places: NDArray[np.int64]
    glyphs: NDArray[np.bool_]
    asked: NDArray[np.int64]
    sources: NDArray[np.int64]


class PatchRecall(Dataset[tuple[Tensor, Tensor]]):
    """The images of one split; each depends on (seed, split, index) alone and is drawn when it is read.

    Args:
        split: `train` or `validation`, or a synonym.
        attributes: rods of a patch, 1 to 4: how many places it writes to.
        grid: Patches along each side; an image has 8 * grid pixels.
        seed: Seed of all images.
        length: Number of images; a million for training and 512 for validation when None.

    Raises:
        InputError: An unknown split, another number of attributes, no patches or no images.
    """

    def __init__(
        self, split: str, attributes: int = 4, grid: int = 8, seed: int = 0, length: int | None = None
    ) -> None:
        self.split = canonical_split(split)
        check_counts(1, MAX_ATTRIBUTES, attributes=attributes)
        check_counts(1, grid=grid)
        if length is not None:
            check_counts(1, length=length)
        self.attributes, self.grid, self.seed = attributes, grid, seed
        self.length = length or LENGTHS[self.split]
        frequencies = 1 / np.arange(1, PLACES + 1) ** 2
        self._cumulative = np.cumsum(frequencies / frequencies.sum())[:-1]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Image, float32 [3, 8 * grid, 8 * grid] of zeros and ones, and answers, float32 [grid², 16]."""
        record = self.record(index)
        patches = np.arange(self.grid**2)
        pixels = np.zeros((self.grid**2, 3, PATCH, PATCH), np.float32)
        pixels[patches[:, None], ATTRIBUTE, np.arange(self.attributes), record.places] = 1
        pixels[patches, QUESTION, record.asked[:, 0], record.asked[:, 1]] = 1
        dots = record.glyphs.reshape(-1, GLYPH, GLYPH).repeat(PATCH // GLYPH, axis=2)  # as wide as the rods
        pixels[:, ANSWER, MAX_ATTRIBUTES:] = dots
        image = rearrange(pixels, "(rows columns) c h w -> c (rows h) (columns w)", rows=self.grid)
        answers = record.glyphs[record.sources].astype(np.float32)
        return torch.from_numpy(image), torch.from_numpy(answers)

    def record(self, index: int) -> Record:
        """The beads and dots of an image as numbers."""
        if not 0 <= index < self.length:
            raise IndexError(f"image {index} of {self.length}")
        generator = np.random.default_rng(derive_seed(self.seed, list(LENGTHS).index(self.split), index))
        patches, rods = self.grid**2, np.arange(self.attributes)
        favourites = generator.random((self.attributes, PLACES)).argsort(axis=1)
        places = favourites[rods, np.searchsorted(self._cumulative, generator.random((patches, self.attributes)))]
        glyphs = generator.random((patches, GLYPH**2)) < 0.5

        named = np.zeros((patches, self.attributes, PLACES), bool)
        named[np.arange(patches)[:, None], rods, places] = True
        writers = np.where(named, np.arange(patches)[:, None, None], -1)
        latest = np.maximum.accumulate(writers).reshape(patches, -1)  # [patches, attributes * places], -1 for none yet
        asked = np.where(latest >= 0, generator.random(latest.shape), -1).argmax(axis=1)
        sources = latest[np.arange(patches), asked]
        return Record(places, glyphs, np.stack(np.divmod(asked, PLACES), axis=1), sources)
