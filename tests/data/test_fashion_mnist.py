"""Fashion-MNIST from its idx files, and the augmentation of whole batches that its recipe uses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from inputs import write_fashion_mnist
from torch.nn.functional import pad

from headmix_vision import console
from headmix_vision.data import ClassificationData
from headmix_vision.data.augmentation import Augmentation
from headmix_vision.data.batch_augmentation import batch_augmentation, uniform_numbers
from headmix_vision.data.batches import TrainSamples, WholeBatches
from headmix_vision.data.datasets import fashion_mnist, open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.errors import InputError

from .helpers import Recorder, attach, make_trainer

TRAIN, TEST = 24, 12
CONFIG = {"mean": (0.0,), "std": (1.0,)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_fashion_mnist(tmp_path, TRAIN, TEST)


def request(root: Path | None, split: str, channels: int = 1) -> SplitRequest:
    return SplitRequest("fashion_mnist", split, (channels, 28, 28), "scoring", root=None if root is None else str(root))


def test_splits_share_no_picture_and_hold_all(folder: Path) -> None:
    numbers = {}
    for split in ("train", "validation", "all", "test"):
        source = open_source(request(folder, split))
        images, targets = source.read_batch(range(len(source)))
        numbers[split] = (images[:, 0, 5, 7] * 255).round().int().tolist()
        assert (images == images[:, :, :1, :1]).all() and images.dtype == torch.float32
        assert targets.tolist() == [number % 10 for number in numbers[split]]
        assert torch.equal(source.read(1)[0], images[1])
    assert numbers["all"] == [*range(TRAIN)] and numbers["test"] == [*range(TEST)]
    assert len(numbers["validation"]) == TRAIN // 12
    assert sorted(numbers["train"] + numbers["validation"]) == numbers["all"]
    assert open_source(request(folder, "test", channels=3)).read(0)[0].shape == (3, 28, 28)


@pytest.mark.parametrize(
    ("train", "val", "shared"), [("train", "validation", 0), ("all", "val", 2), ("train", "train", 22)]
)
def test_validation_on_training_pictures_is_said(folder: Path, capsys, train, val, shared) -> None:
    console._said.clear()
    data = ClassificationData("fashion_mnist", str(folder), train, val, batch_size=4)
    attach(data, img_size=28)
    said = capsys.readouterr()
    note = f"note: {shared} of {shared} validation samples are training samples, too"
    assert (note in said.out + said.err) == bool(shared)


def test_all_pictures_are_trained_on_without_validation(folder: Path) -> None:
    data = ClassificationData("fashion_mnist", str(folder), "all", None, "test", batch_size=4)
    attach(data, img_size=28)
    assert len(data.train_dataloader().dataset) == TRAIN and not data.val_dataloader()
    data.setup("test")
    with pytest.raises(InputError, match=r"there is no validation split: set data.val_split"):
        data.setup("validate")
    untested = ClassificationData("fashion_mnist", str(folder), "all", None, batch_size=4)
    with pytest.raises(InputError, match=r"there is no test split: set data.test_split"):
        attach(untested, "test", img_size=28)


@pytest.mark.skipif(not Path(fashion_mnist.DEBIAN_FOLDER).is_dir(), reason="apt install dataset-fashion-mnist")
def test_the_debian_package_holds_the_official_pictures() -> None:
    sizes = {"train": 55_000, "validation": 5_000, "test": 10_000}
    for split, size in sizes.items():
        assert len(open_source(request(None, split))) == size
    source = open_source(request(None, "test"))
    assert source.class_names[source.read(0)[1]] == "ankle boot"
    assert np.bincount(source.read_batch(range(10_000))[1]).tolist() == [1000] * 10


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train-labels-idx1-ubyte.gz", None, "has neither train-labels-idx1-ubyte nor train-labels-idx1-ubyte.gz"),
        ("train-images-idx3-ubyte.gz", lambda data: data[:-30], "cannot be read: "),
        ("train-images-idx3-ubyte.gz", lambda data: b"no gzip at all", "cannot be read: Not a gzipped file"),
        ("t10k-images-idx3-ubyte", lambda data: data[:-1], "states 9408 numbers, it holds 9407"),
        ("t10k-images-idx3-ubyte", lambda data: data + b"1", "states 9408 numbers, it holds more"),
        ("t10k-images-idx3-ubyte", lambda data: data[:5], "is not an idx file of bytes with 3 axes"),
        ("t10k-images-idx3-ubyte", lambda data: b"\0\0\x0d\3" + data[4:], "is not an idx file of bytes with 3 axes"),
        ("t10k-images-idx3-ubyte", lambda data: data[:4] + b"\xff" * 12 + data[16:], "of memory"),
        ("t10k-labels-idx1-ubyte", lambda data: data[:-1] + b"\x0a", "a label of t10k in .* is 10, there are 10"),
        ("t10k-labels-idx1-ubyte", lambda data: data[:7] + b"\x0b" + data[8:-1], "12x28x28 and 11 pixels and labels"),
    ],
)
def test_missing_and_damaged_files_are_named(folder: Path, name: str, change, message: str) -> None:
    path = folder / name
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=message) as raised:
        open_source(request(folder, "train" if name.startswith("train") else "test"))
    assert "\n" not in str(raised.value)


def test_what_cannot_be_opened_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="split 'tset' does not exist, fashion_mnist has train, validation, all, test"):
        open_source(request(folder, "tset"))
    with pytest.raises(InputError, match="1 or 3 channels, asked for 4"):
        open_source(request(folder, "test", channels=4))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", str(folder / "missing"))
    with pytest.raises(InputError, match="is not installed: apt install dataset-fashion-mnist, or give the folder"):
        open_source(request(None, "test"))


def augmented(images: torch.Tensor, **options: object) -> torch.Tensor:
    transform = batch_augmentation(CONFIG, Augmentation(**options))
    return transform(images, range(len(images)))


def test_a_batch_is_flipped_and_shifted_onto_black() -> None:
    images = torch.rand(400, 2, 6, 8)
    assert torch.equal(augmented(images, hflip=1.0), images.flip(-1))
    moved, places = augmented(images, translate=0.25), set()
    around = pad(images, (2, 2, 2, 2))
    for before, after in zip(around, moved, strict=True):
        found = [(y, x) for y in range(5) for x in range(5) if torch.equal(before[:, y : y + 6, x : x + 8], after)]
        assert len(found) == 1
        places |= {*found}
    assert ({y for y, _ in places}, {x for _, x in places}) == ({1, 2, 3}, {*range(5)})  # up to 1.5 and 2 pixels


def test_a_rectangle_is_erased_after_normalisation() -> None:
    images = torch.ones(2000, 1, 20, 20)
    erased = augmented(images, reprob=0.25, remode="const")[:, 0] == 0
    share = erased.float().mean((1, 2))
    assert abs((share > 0).float().mean() - 0.25) < 0.05  # five standard deviations
    assert abs(share[share > 0].mean() - (0.02 + 1 / 3) / 2) < 0.03
    for one in erased[share > 0]:
        rows, columns = one.any(1), one.any(0)
        assert torch.equal(one, rows[:, None] & columns)


def test_numbers_are_uniform_and_those_of_splitmix64() -> None:
    assert uniform_numbers([1234567], 1)[0, 0] * 2**53 == 6457827717110365317 >> 11  # of Vigna's splitmix64.c
    drawn = uniform_numbers(range(2000), 8)
    assert (drawn >= 0).all() and (drawn < 1).all()
    assert (drawn.mean(0) - 0.5).abs().max() < 5 * (1 / 12 / 2000) ** 0.5
    assert torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max() < 0.12


def batches(workers: int, batch_size: int) -> list[torch.Tensor]:
    augmentation = Augmentation(hflip=0.5, translate=0.2, reprob=0.5, remode="const")
    data = ClassificationData(batch_size=batch_size, num_workers=workers, augmentation=augmentation)
    module = Recorder()
    make_trainer(max_epochs=2, limit_val_batches=0, limit_train_batches=800 // batch_size).fit(module, datamodule=data)
    assert isinstance(data.train_dataloader().dataset, WholeBatches)
    return [images for _, images, _ in module.train_batches]


def test_augmented_batches_depend_on_nothing_but_seed_and_sample() -> None:
    alone, shared, smaller = batches(0, 400), batches(2, 400), batches(0, 200)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    assert torch.equal(alone[0], torch.cat(smaller[:2]))
    assert not torch.equal(alone[0], alone[2])


@pytest.mark.parametrize("more", [{"degrees": 5}, {"remode": "pixel"}, {"scale": (0.5, 1.0)}])
def test_other_augmentation_goes_image_by_image(more: dict[str, object]) -> None:
    data = ClassificationData(augmentation=Augmentation(**{"reprob": 0.5, "remode": "const", **more}))
    attach(data)
    assert isinstance(data.train_dataloader().dataset, TrainSamples)
