"""Canvas: what its class depends on, what it does not depend on, and how the data module opens it."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from headmix_vision.data import ClassificationData
from headmix_vision.data.canvas import CanvasDigits
from headmix_vision.data.sources import Digits

from .helpers import attach


def boards(count: int, **options: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits [count, rows, columns] and classes [count]."""
    canvases = CanvasDigits("train", **options)
    digits, labels = zip(*(canvases.board(index) for index in range(count)), strict=True)
    return np.stack(digits), np.array(labels)


def halves(digits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Left and right half, each [count, pairs]."""
    left, right = np.split(digits, 2, axis=2)
    return left.reshape(len(left), -1), right.reshape(len(right), -1)


@pytest.mark.parametrize(
    ("size", "cell", "grid"), [(64, 10, (6, 6)), (64, 8, (8, 8)), (96, 10, (9, 8)), (128, 10, (12, 12))]
)
def test_the_class_is_the_digit_with_the_same_places_in_both_halves(
    size: int, cell: int, grid: tuple[int, int]
) -> None:
    digits, labels = boards(50, size=size, cell=cell)
    assert digits.shape == (50, *grid)
    for left, right, label in zip(*halves(digits), labels, strict=True):
        assert np.array_equal(np.sort(left), np.sort(right))
        for digit in range(10):
            same, opposite = left == digit, right == digit
            assert same.any()
            assert np.array_equal(same, opposite) if digit == label else not (same & opposite).any()


def test_classes_are_equally_frequent() -> None:
    _, labels = boards(4000)
    # standard deviation of a class's count: 19
    assert np.abs(np.bincount(labels, minlength=10) - 400).max() < 5 * 19


def features_of(digits: np.ndarray) -> dict[str, np.ndarray]:
    one_hot = np.eye(10)[digits]
    left, right = (half.reshape(len(digits), -1) for half in np.split(one_hot, 2, axis=2))
    left_bag, right_bag = (half.sum((1, 2)) for half in np.split(one_hot, 2, axis=2))
    bags = np.concatenate([left_bag, right_bag], 1)
    products = np.einsum("ni,nj->nij", left_bag, right_bag).reshape(len(digits), -1)
    return {"bag": bags, "bags multiplied": products, "left": left, "right": right, "places": np.hstack([left, right])}


def test_neither_bags_nor_single_places_tell_the_class_but_pairs_do() -> None:
    digits, labels = boards(4000)
    train, test = slice(0, 3000), slice(3000, 4000)
    chance = 0.1 + 4 * (0.1 * 0.9 / 1000) ** 0.5
    for name, features in features_of(digits).items():
        model = LogisticRegression(C=0.1, max_iter=100).fit(features[train], labels[train])
        assert model.score(features[test], labels[test]) < chance, name
    left, right = halves(digits)
    pairs = (np.eye(10)[left] * np.eye(10)[right]).sum(1)
    assert np.array_equal(pairs.argmax(1), labels)


def test_canvases_depend_on_seed_split_and_index_alone() -> None:
    first, again = CanvasDigits("train", length=9), CanvasDigits("train")
    assert len(first) == 9 and len(again) == 50_000 and len(CanvasDigits("val")) == 5_000
    for index in (3, 0, 8):
        assert torch.equal(first[index][0], again[index][0]) and first[index][1] == again[index][1]
    images = [
        CanvasDigits(split, seed=seed)[index][0] for split in ("train", "val") for seed in (0, 1) for index in (0, 1)
    ]
    assert len({image.numpy().tobytes() for image in images}) == len(images)
    with pytest.raises(IndexError):
        first[9]


@pytest.mark.parametrize("cell", [8, 10])
def test_the_picture_shows_the_board(cell: int) -> None:
    canvases = CanvasDigits("validation", cell=cell)
    image, label = canvases[5]
    board, board_label = canvases.board(5)
    assert image.shape == (1, 64, 64) and image.dtype == torch.float32 and label == board_label
    source = Digits("validation")
    rows, columns = board.shape
    start = (64 - rows * cell) // 2
    for row in range(rows):
        for column in range(columns):
            top, left = start + row * cell, start + column * cell
            inside = image[0, top : top + cell, left : left + cell]
            windows = inside.unfold(0, 8, 1).unfold(1, 8, 1).reshape(-1, 8, 8)
            found = (windows[:, None] == source.images[:, 0]).flatten(2).all(2).any(0)
            assert board[row, column] in np.array(source.targets)[found.numpy()]


def test_data_module_opens_canvases_of_the_models_size() -> None:
    data = ClassificationData("canvas/12", batch_size=6, eval_batch_size=4, num_workers=0)
    attach(data, img_size=96, in_chans=3)
    images, targets = next(iter(data.val_dataloader()))
    expected = [CanvasDigits("validation", 96, cell=12, channels=3)[index] for index in range(4)]
    mean, std = (torch.tensor(data._data_config[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(images, (torch.stack([image for image, _ in expected]) - mean) / std)
    assert targets.tolist() == [label for _, label in expected]
    assert data.class_names == [str(digit) for digit in range(10)]
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (6, 3, 96, 96)


def test_refusals() -> None:
    for options, message in (
        ({"cell": 7}, "cell is 7"),
        ({"size": 40}, "has 16 cells of 10, it needs 20"),
        ({"length": 0}, "length is 0"),
        ({"channels": 2}, "channels is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            CanvasDigits("train", **options)
    with pytest.raises(ValueError, match="'canvas/large' is unknown"):
        ClassificationData("canvas/large")
    with pytest.raises(ValueError, match="has 0 cells"):
        attach(ClassificationData("canvas", batch_size=2), img_size=8)
