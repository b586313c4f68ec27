"""Counting of pairs: what the counts are, what the images show, what they depend on."""

import itertools

import numpy as np
import pytest
import torch

from headmix_vision.data.datasets.counting import PairCounting, count_pairs


@pytest.mark.parametrize(("grid", "modulus", "coefficient"), [(1, 3, 2), (2, 5, 12), (3, 4, 11)])
@pytest.mark.parametrize("encoding", ["value", "symbol"])
def test_counts_are_those_of_the_definition(grid: int, modulus: int, coefficient: int, encoding: str) -> None:
    images = PairCounting("train", grid, modulus, coefficient, encoding)
    for index in range(10):
        image, counts = images[index]
        if encoding == "value":
            assert image.shape == (1, grid, grid)
            numbers = (image * (modulus - 1)).flatten()
        else:
            assert image.shape == (modulus, grid, grid) and torch.equal(image.sum(0), torch.ones(grid, grid))
            numbers = image.argmax(0).flatten()
        assert image.dtype == torch.float32 and counts.dtype == torch.int64
        x = [round(number) for number in numbers.tolist()]
        pairs = list(itertools.product(x, repeat=2))
        expected = [sum((i + coefficient * first + second) % modulus == 0 for first, second in pairs) for i in x]
        assert counts.tolist() == expected


def test_counts_follow_their_numbers_wherever_these_stand() -> None:
    numbers = torch.from_numpy(PairCounting("train").numbers(0, 50))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    counts = count_pairs(numbers, 5, 12)
    assert torch.equal(count_pairs(numbers[:, order], 5, 12), counts[:, order])
    assert not torch.equal(count_pairs(numbers, 5, 11), counts), "the order of a pair matters"


def test_images_depend_on_seed_split_and_index_alone() -> None:
    images = PairCounting("train", 3)
    together = images.numbers(5, 20)
    for index in (19, 0, 7):
        np.testing.assert_array_equal(images.numbers(5 + index, 1)[0], together[index])
    np.testing.assert_array_equal(PairCounting("training", 3, length=25).numbers(5, 20), together)
    others = [PairCounting(split, 3, seed=seed).numbers(5, 20) for split in ("train", "val") for seed in (0, 1)]
    assert len({numbers.tobytes() for numbers in others}) == 4
    assert len(images) == 10_000_000 and len(PairCounting("val")) == 4096


def test_numbers_are_drawn_evenly() -> None:
    counts = np.bincount(PairCounting("train").numbers(0, 5000).flatten(), minlength=5)
    assert len(counts) == 5 and (abs(counts - 16_000) < 5 * 16_000**0.5).all()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (9, 2), (10, 1)])
def test_images_beyond_the_last_are_refused(first: int, count: int) -> None:
    with pytest.raises(IndexError, match="of 10"):
        PairCounting("train", length=10).numbers(first, count)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "test"}, "'test' does not exist"),
        ({"grid": 0}, "grid must be a whole number of at least 1, got 0"),
        ({"modulus": 2}, "modulus must be a whole number of at least 3, got 2"),
        ({"coefficient": 1.5}, "coefficient must be a whole number of at least 2, got 1.5"),
        ({"coefficient": 11}, "coefficient must be neither 0 nor 1 modulo 5"),
        ({"coefficient": 15}, "order of a pair does not matter, got 15"),
        ({"encoding": "colour"}, "encoding must be one of"),
        ({"length": 0}, "length must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PairCounting(**{"split": "train", **wrong})
