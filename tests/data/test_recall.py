"""Patch recall: what its answers are, what its images show, what they depend on."""

import numpy as np
import pytest
import torch

from headmix_vision.data.datasets.recall import PATCH, PLACES, PatchRecall


@pytest.mark.parametrize(("attributes", "grid"), [(1, 3), (2, 8), (4, 5)])
def test_answers_read_off_the_pixels_patch_by_patch(attributes: int, grid: int) -> None:
    """A memory of red places, filled and asked from the picture alone."""
    images = PatchRecall("train", attributes, grid)
    for index in range(20):
        image, answers = images[index]
        assert image.shape == (3, grid * PATCH, grid * PATCH) and answers.shape == (grid**2, 16)
        assert image.dtype == answers.dtype == torch.float32 and set(image.unique().tolist()) == {0.0, 1.0}
        memory = {}
        for patch in range(grid**2):
            y, x = PATCH * (patch // grid), PATCH * (patch % grid)
            red, green, blue = image[:, y : y + PATCH, x : x + PATCH]
            beads = [tuple(bead) for bead in red.nonzero().tolist()]
            assert [row for row, _ in beads] == list(range(attributes))
            assert not green[:4].any() and torch.equal(green[4:, ::2], green[4:, 1::2])
            memory |= dict.fromkeys(beads, green[4:, ::2].flatten())
            (question,) = blue.nonzero().tolist()
            assert torch.equal(answers[patch], memory[tuple(question)])


def test_records_tell_what_is_on_the_images() -> None:
    images = PatchRecall("validation")
    record = images.record(3)
    assert (record.sources <= np.arange(64)).all() and (record.sources >= 0).all()
    answered = record.places[record.sources][np.arange(64), record.asked[:, 0]]
    np.testing.assert_array_equal(answered, record.asked[:, 1])
    np.testing.assert_array_equal(record.glyphs[record.sources], images[3][1].bool().numpy())


def test_places_are_named_with_unequal_frequency_and_asked_evenly() -> None:
    records = [PatchRecall("train", 2).record(index) for index in range(500)]
    counts = np.array([np.sort(np.bincount(r.places[:, 0], minlength=PLACES))[::-1] / 64 for r in records]).mean(0)
    expected = 1 / np.arange(1, PLACES + 1) ** 2
    assert abs(counts[0] - expected[0] / expected.sum()) < 0.02
    ages = np.concatenate([np.arange(64) - r.sources for r in records])
    assert (ages == 0).mean() < 0.35 and (ages >= 8).mean() > 0.25
    # the last patch of an image asks for any place that has been named
    asked = [np.count_nonzero(r.places[:, r.asked[-1, 0]] == r.asked[-1, 1]) for r in records]
    named = [r.places[:, rod] for r in records for rod in (0, 1)]
    per_place = np.mean([64 / len(np.unique(places)) for places in named])
    assert abs(np.mean(asked) - per_place) < 5 * np.std(asked) / 500**0.5


def test_images_depend_on_seed_split_and_index_alone() -> None:
    first, again = PatchRecall("train", length=9), PatchRecall("training")
    assert len(first) == 9 and len(again) == 1_000_000 and len(PatchRecall("val")) == 512
    for index in (3, 0, 8):
        assert all(torch.equal(x, y) for x, y in zip(first[index], again[index], strict=True))
    sources = [PatchRecall(split, seed=seed) for split in ("train", "val") for seed in (0, 1)]
    assert len({source[index][0].numpy().tobytes() for source in sources for index in (0, 1)}) == 8
    with pytest.raises(IndexError):
        first[9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "split 'test' does not exist"),
        ({"split": "train", "attributes": 5}, "attributes must be a whole number from 1 to 4, got 5"),
        ({"split": "train", "grid": 0}, "grid must be a whole number of at least 1, got 0"),
        ({"split": "train", "length": 0}, "length must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatchRecall(**arguments)
