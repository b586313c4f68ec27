"""Canvas: what its class depends on, what it does not depend on, and how the data module opens it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from headmix_vision.data import ClassificationData
from headmix_vision.data.augmentation import Augmentation, eval_transform, train_transform
from headmix_vision.data.batches import TrainSamples, UnreadableImages
from headmix_vision.data.datasets import canvas
from headmix_vision.data.datasets.canvas import CELL, RULES, CanvasDigits
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.generation import GenerationData
from headmix_vision.evaluation.sample_sets import open_samples

from .helpers import attach, make_trainer

COUNT = 4000


@pytest.fixture(scope="module", params=RULES)
def boards(request: pytest.FixtureRequest) -> tuple[str, np.ndarray, np.ndarray]:
    """Rule, digits [COUNT, 6, 6] and classes [COUNT]."""
    canvases = CanvasDigits("train", rule=request.param)
    digits, labels = zip(*(canvases.board(index) for index in range(COUNT)), strict=True)
    return request.param, np.stack(digits), np.array(labels)


def test_the_class_is_the_digit_of_the_region_that_the_zero_tells(boards: tuple[str, np.ndarray, np.ndarray]) -> None:
    rule, digits, labels = boards
    for board, label in zip(digits, labels, strict=True):
        ((row, column),) = np.argwhere(board == 0) // 2
        if rule == "opposite":
            row, column = 2 - row, 2 - column
        assert board[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].max() == label + 1


def test_classes_and_places_of_the_zero_are_spread_as_stated(boards: tuple[str, np.ndarray, np.ndarray]) -> None:
    _, digits, labels = boards
    # five standard deviations of a count
    assert np.abs(np.bincount(labels, minlength=9) - COUNT / 9).max() < 5 * (COUNT / 9 * 8 / 9) ** 0.5
    zeros = (digits == 0).reshape(-1, 3, 2, 3, 2).any((2, 4)).reshape(-1, 9).mean(0)
    expected = np.full(9, 0.8 / 9)
    expected[zeros.argmax()] += 0.2
    assert np.abs(zeros - expected).max() < 5 * (0.25 / COUNT) ** 0.5


def test_what_is_on_a_canvas_does_not_tell_its_class_where_it_is_does(
    boards: tuple[str, np.ndarray, np.ndarray],
) -> None:
    _, digits, labels = boards
    one_hot = np.eye(11)[digits + 1]
    bags = one_hot.sum((1, 2))
    assert (bags == bags[0]).all()
    train, test = slice(0, 3000), slice(3000, COUNT)
    places = LogisticRegression(max_iter=200).fit(one_hot.reshape(COUNT, -1)[train], labels[train])
    reached = places.score(one_hot.reshape(COUNT, -1)[test], labels[test])
    home = 0.2 + 0.8 / 9
    assert reached < home + 4 * (home * (1 - home) / 1000) ** 0.5


def test_canvases_depend_on_seed_split_and_index_alone() -> None:
    with pytest.raises(IndexError, match="canvas -1 of 9"):
        CanvasDigits("train", length=9).read_batch([0, -1])
    first, again = CanvasDigits("train", length=9), CanvasDigits("train")
    assert len(first) == 9 and len(again) == 50_000 and len(CanvasDigits("val")) == 5_000
    for index in (3, 0, 8):
        assert torch.equal(first[index][0], again[index][0]) and first[index][1] == again[index][1]
    sources = [CanvasDigits(split, seed=seed) for split in ("train", "val") for seed in (0, 1)]
    images = {source[index][0].numpy().tobytes() for source in sources for index in (0, 1)}
    assert len(images) == 8
    with pytest.raises(IndexError):
        first[9]


@pytest.mark.parametrize(("size", "cells"), [(64, 6), (96, 9), (128, 12)])
def test_the_picture_shows_the_board(size: int, cells: int) -> None:
    canvases = CanvasDigits("validation", size=size)
    image, label = canvases[5]
    board, board_label = canvases.board(5)
    assert board.shape == (cells, cells) and label == board_label
    assert image.shape == (1, size, size) and image.dtype == torch.float32
    source = Digits("validation")
    targets = np.array(source.targets)
    start = (size - cells * CELL) // 2 + 1
    left = image.clone()
    for row in range(cells):
        for column in range(cells):
            y, x = start + row * CELL, start + column * CELL
            digit = image[0, y : y + 8, x : x + 8]
            left[0, y : y + 8, x : x + 8] = 0
            if board[row, column] < 0:
                assert not digit.any()
            else:
                found = (source.images[:, 0] == digit).flatten(1).all(1).numpy()
                assert board[row, column] in targets[found]
    assert not left.any()


def test_data_module_opens_canvases_of_the_models_size() -> None:
    data = ClassificationData("canvas/opposite", batch_size=6, eval_batch_size=4, num_workers=0)
    attach(data, img_size=96, in_chans=3, num_classes=9)
    images, targets = next(iter(data.val_dataloader()))
    expected = [CanvasDigits("validation", 96, rule="opposite", channels=3)[index] for index in range(4)]
    mean, std = (torch.tensor(data._data_config[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(images, (torch.stack([image for image, _ in expected]) - mean) / std)
    assert targets.tolist() == [label for _, label in expected]
    assert data.class_names == [str(digit) for digit in range(1, 10)]
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (6, 3, 96, 96)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_drawn_at_once_are_those_of_single_images_and_transforms(workers: int) -> None:
    data = ClassificationData("canvas", batch_size=6, eval_batch_size=40, num_workers=workers)
    attach(data, img_size=64, num_classes=9)
    images, targets = next(iter(loader := data.train_dataloader()))
    source, config = CanvasDigits("train"), data._data_config
    transform = train_transform(config, data.augmentation)
    single = TrainSamples(source, transform, data.seed, UnreadableImages(len(source), 0))
    expected = [single[key] for key in next(iter(loader.batch_sampler))]
    assert torch.equal(images, torch.stack([image for image, _ in expected]))
    assert targets.tolist() == [target for _, target in expected]

    *_, (images, targets) = data.val_dataloader()
    source, transform = CanvasDigits("validation"), eval_transform(config)
    assert torch.equal(images, torch.stack([transform(source[index][0]) for index in range(4960, 5000)]))
    assert targets.tolist() == [source[index][1] for index in range(4960, 5000)]


def test_augmented_canvases_are_drawn_one_by_one() -> None:
    data = ClassificationData("canvas", batch_size=6, num_workers=0, augmentation=Augmentation(hflip=1.0))
    attach(data, img_size=64, num_classes=9)
    images, _ = next(iter(loader := data.train_dataloader()))
    key = next(iter(loader.batch_sampler))[0]
    expected = eval_transform(data._data_config)(CanvasDigits("train")[key.sample][0])
    assert torch.equal(images[0], expected.flip(-1)) and not torch.equal(images[0], expected)


@pytest.mark.parametrize("options", [{}, {"canvas_size": 128}, {"hflip": 1.0}])
def test_generators_are_fed_the_same_canvases_by_rule_whatever_the_seed(options: dict[str, Any]) -> None:
    data = GenerationData("canvas/opposite", batch_size=6, eval_batch_size=4, num_workers=0, seed=5, **options)
    module, trainer = torch.nn.Module(), make_trainer(max_epochs=1)
    module.net = SimpleNamespace(in_channels=3, input_size=(64, 64), num_classes=9)
    trainer.strategy._lightning_module = module
    data.trainer = trainer
    data.setup("fit")
    images, labels = next(iter(data.val_dataloader()))
    source = CanvasDigits("validation", options.get("canvas_size", 64), rule="opposite", channels=3)
    expected, expected_labels = source.read_batch(range(4))
    assert labels.tolist() == expected_labels.tolist() and images.shape == (4, 3, 64, 64)
    if "canvas_size" not in options:
        torch.testing.assert_close(images, expected * 2 - 1)

    images, labels = next(iter(loader := data.train_dataloader()))
    keys = next(iter(loader.batch_sampler))
    source = CanvasDigits("train", source.size, rule="opposite", channels=3)
    expected, expected_labels = source.read_batch([key.sample for key in keys])
    assert labels.tolist() == expected_labels.tolist() and images.shape == (6, 3, 64, 64)
    if "canvas_size" not in options:
        torch.testing.assert_close(images, (expected.flip(-1) if "hflip" in options else expected) * 2 - 1)


def test_canvases_can_be_scored() -> None:
    images = open_samples("canvas:train[:5]", "L", image_size=96)
    (batch,) = images.batches(5)
    expected = torch.stack([CanvasDigits("train", 96)[index][0] for index in range(5)])
    assert torch.equal(batch, (expected * 255).round().to(torch.uint8))


def test_a_layout_takes_the_memory_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(canvas, "check_memory", lambda needed_bytes, what: asked.append(needed_bytes))
    canvases = CanvasDigits("train", length=9)
    assert asked == [canvases._chosen.nbytes + canvases._labels.nbytes]


def test_refusals() -> None:
    for options, message in (
        ({"rule": "left"}, "rule is 'left', it must be one of same, opposite"),
        ({"size": 59}, "size is 59, a canvas needs at least 60"),
        ({"length": 0}, "length must be a whole number of at least 1, got 0"),
        ({"channels": 2}, "channels is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            CanvasDigits("train", **options)
    with pytest.raises(ValueError, match="'canvas/left' is unknown"):
        ClassificationData("canvas/left")
    with pytest.raises(ValueError, match="a canvas needs at least 60"):
        attach(ClassificationData("canvas", batch_size=2), img_size=8)
