"""Clips as samples: lossless files, the contact sheet, npz, and sets to score."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from headmix_vision.evaluation.clip_scores import fvd, judge
from headmix_vision.evaluation.extractors import ClassifierExtractor, FeatureExtractor
from headmix_vision.evaluation.sample_sets import SampleSet, open_samples
from headmix_vision.evaluation.sample_sources import TensorSamples
from headmix_vision.evaluation.scores import Scorer, fid, kid, neighbours, precision_recall
from headmix_vision.sampling.folder import SampleFolder, draw_grid


class MeanFrames(FeatureExtractor):
    """The mean and the last value of each frame."""

    grid_axes = 3
    mode = "L"

    def __init__(self) -> None:
        self.description = {"name": "frames", "sha256": "0"}

    def extract(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        values = samples.float()[:, 0]
        return {"features": torch.cat([values.mean((2, 3)), values[:, :, -1, -1]], 1)}


def clips(count: int, frames: int, channels: int, seed: int = 0) -> np.ndarray:
    """Random clips with still parts, uint8 [N, T, 10, 8, C]."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, frames, 10, 8, channels), dtype=np.uint8)
    pixels[:, 1:, :5] = pixels[:, :1, :5]
    pixels[:, 2:4] = pixels[:, 1:2]
    return pixels


def save(folder: Path, samples: np.ndarray) -> SampleFolder:
    result = SampleFolder(folder)
    for index, pixels in enumerate(samples):
        result.write_sample(index, pixels)
    result.write_npz(len(samples), list(range(len(samples))))
    result.write_grid(draw_grid(samples, [str(i) for i in range(len(samples))], "clips"))
    result.write_metadata({"settings": {}})
    return result


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("frames", [None, 1, 2, 6])
def test_samples_are_read_back_bit_for_bit(channels: int, frames: int | None, tmp_path: Path) -> None:
    samples = clips(3, frames or 1, channels)
    if frames is None:
        samples = samples[:, 0]
    folder = save(tmp_path / "out", samples)
    assert folder.existing() == {0, 1, 2}
    for index, expected in enumerate(samples):
        assert np.array_equal(folder.read_sample(index), expected)
    with np.load(tmp_path / "out" / "samples.npz") as arrays:
        assert np.array_equal(arrays["arr_0"], samples)
    with Image.open(tmp_path / "out" / "images" / "000001.png") as image:
        assert image.format == "PNG" and getattr(image, "n_frames", 1) == (frames or 1)
    with Image.open(tmp_path / "out" / "grid.png") as grid:
        assert grid.mode == "RGB" and getattr(grid, "n_frames", 1) == (frames or 1)


def test_still_clips_keep_their_frames(tmp_path: Path) -> None:
    folder, still = SampleFolder(tmp_path), np.zeros((5, 4, 4, 3), np.uint8)
    folder.write_sample(0, still)
    assert np.array_equal(folder.read_sample(0), still)


@pytest.mark.parametrize("channels", [1, 3])
def test_sets_of_clips_come_in_batches(channels: int, tmp_path: Path) -> None:
    pixels = clips(5, 4, channels)
    save(tmp_path / "out", pixels)
    memory = TensorSamples(torch.from_numpy(pixels).movedim(-1, 1))
    mode = "L" if channels == 1 else "RGB"
    for images in (
        open_samples(str(tmp_path / "out"), mode),
        open_samples(str(tmp_path / "out" / "samples.npz"), mode),
        SampleSet(memory, mode),
    ):
        assert images.size == (4, 10, 8) and len(images) == 5
        batch, rest = images.batches(3)
        assert batch.shape == (3, channels, 4, 10, 8) and rest.shape[0] == 2
        assert np.array_equal(torch.cat([batch, rest]).movedim(1, -1), pixels)
    (cropped,) = open_samples(str(tmp_path / "out"), "RGB", image_size=6).batches(5)
    assert cropped.shape == (5, 3, 4, 6, 6)


def test_clips_are_scored_with_features_of_clips(tmp_path: Path) -> None:
    scorer = Scorer(MeanFrames(), batch_size=4)
    sides = [SampleSet(TensorSamples(torch.from_numpy(clips(40, 4, 1, seed)).movedim(-1, 1)), "L") for seed in (0, 1)]
    assert fid(scorer, sides[0], sides[0])["fid"] == pytest.approx(0, abs=1e-6)
    assert fid(scorer, *sides)["fid"] > 1
    assert json.dumps(sides[0].description["size"]) == "[4, 10, 8]"


def test_pictures_lie_in_rows_below_the_title() -> None:
    images = np.arange(1, 6, dtype=np.uint8)[:, None, None, None].repeat(8, 1).repeat(12, 2) * 20  # [5, 8, 12, 1]
    for options, captions, cell, top in (({}, 0, (32, 48), 8), ({"title": "a\nb"}, 16, (32, 48), 44)):
        given = {"captions": ["x"] * 5 if captions else None, "title": "", **options}
        grid = draw_grid(images, given["captions"], given["title"])  # in three columns
        assert grid.shape == (top + 2 * (cell[0] + captions) + 4 + 8, 3 * cell[1] + 2 * 4 + 2 * 8, 3)
        for number in range(5):
            y, x = top + number // 3 * (cell[0] + captions + 4), 8 + number % 3 * (cell[1] + 4)
            assert (grid[y : y + cell[0], x : x + cell[1]] == 20 * (number + 1)).all()
            assert (grid[y - 1, x : x + cell[1]] != 20 * (number + 1)).all() and (grid[y, x - 1] == 255).all()
    assert draw_grid(images, None, "", columns=5, min_side=12).shape == (8 + 16, 5 * 16 + 12, 3)
    wide = draw_grid(images, None, "a title that is wider than its pictures", columns=1)
    assert wide.shape[1] > 200


def test_captions_stand_below_the_middle_of_their_pictures() -> None:
    grid = draw_grid(np.full((4, 8, 8, 1), 128, np.uint8), ["0"] * 4, "title", columns=2)[..., 0]
    is_cell, is_ink = grid == 128, grid < 100
    rows, columns = (np.flatnonzero(is_cell.sum(axis) > 48).reshape(2, -1) for axis in (1, 0))
    for below, following in zip(rows[:, -1], (rows[1, 0], len(grid)), strict=True):
        for column in columns:
            ink = np.argwhere(is_ink[below + 1 : following, column[0] : column[-1]])
            assert len(ink) > 2 and abs(ink[:, 1].mean() - np.ptp(column) / 2) < 2
    assert is_ink[: rows[0, 0], columns[0, 0] :].any()


def test_refusals(tmp_path: Path) -> None:
    sets = {
        frames: SampleSet(TensorSamples(torch.zeros(3, 1, *([frames] if frames else []), 8, 8, dtype=torch.uint8)), "L")
        for frames in (0, 2, 3)
    }
    scorer = Scorer(ClassifierExtractor(timm.create_model("deit_mhla_digits"), "deit_mhla_digits"))
    with pytest.raises(ValueError, match="deit_mhla_digits takes images, got clips of 2 frames"):
        scorer.statistics(sets[2])
    with pytest.raises(ValueError, match="frames takes clips, got images"):
        Scorer(MeanFrames()).statistics(sets[0])
    for compare in (fid, kid, fvd, precision_recall):
        with pytest.raises(ValueError, match="real samples are 2 frames of 8x8 pixels, fake ones 3 frames of 8x8"):
            compare(scorer, sets[2], sets[3])
    for others in ((sets[3], sets[2]), (sets[2], sets[3])):
        with pytest.raises(ValueError, match="real samples are 2 frames of 8x8 pixels, fake ones 3 frames of 8x8"):
            neighbours(scorer, sets[2], *others)
    for labels, message in (([0] * 4, "4 labels for 3 clips"), ([0, -1, 1], "-1 to 1"), ([0, 40, 1], "0 to 40")):
        with pytest.raises(ValueError, match=message):
            judge(scorer, sets[3], torch.tensor(labels))
    with pytest.raises(ValueError, match="clips are 8x8 pixels, moving digits need at least 16"):
        judge(scorer, sets[3], torch.tensor([0, 39, 1]))
    with pytest.raises(
        ValueError, match="real samples are 2 frames of 8x8 pixels, fake ones 8x8; clips are scored against clips"
    ):
        fid(scorer, sets[2], sets[0])
    folder = save(tmp_path / "out", clips(2, 3, 1))
    folder.write_sample(2, clips(1, 2, 1)[0])
    with pytest.raises(ValueError, match=r"000002\.png is 2 frames of 8x10 pixels, the samples before it are 3 frames"):
        list(open_samples(str(tmp_path / "out"), "L").batches(3))
