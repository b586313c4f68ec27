"""The data module on embedded and fake images."""

import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp

from headmix_vision.data import Augmentation, ClassificationData
from headmix_vision.data.augmentation import train_transform
from headmix_vision.data.batches import SampleKey, WholeBatches
from headmix_vision.data.datasets.base import to_picture
from headmix_vision.data.datasets.canvas import CanvasDigits
from headmix_vision.data.datasets.derived import hold_out
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.seeding import derive_seed, seeded
from headmix_vision.errors import InputError
from headmix_vision.files import reading

from .helpers import Recorder, attach, make_trainer


def test_digits_are_the_official_values() -> None:
    images, targets = load_digits(return_X_y=True)
    source = Digits("train")
    for i, original in enumerate(source.indices[:50]):
        image, target = source.read(i)
        assert image.shape == (1, 8, 8) and image.dtype == torch.float32
        assert np.array_equal(image.numpy().ravel() * 16, images[original])
        assert target == targets[original]


def test_digits_split_is_fixed_disjoint_and_stratified() -> None:
    train, val = Digits("train"), Digits("validation")
    assert (len(train), len(val)) == (1437, 360)
    assert sorted([*train.indices, *val.indices]) == list(range(1797))
    shares = [np.bincount(source.targets, minlength=10) / len(source) for source in (train, val)]
    assert np.abs(shares[0] - shares[1]).max() < 2e-3
    assert val.indices[:5].tolist() == [21, 24, 28, 34, 35]
    with pytest.raises(ValueError, match="'test' does not exist"):
        Digits("test")


def test_memory_is_needed_for_a_batch_of_its_split_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 4 * 360 * 64
    monkeypatch.setattr(reading, "_SMALL_BYTES", 0)
    monkeypatch.setattr(reading, "memory_left", lambda: left)
    attach(ClassificationData(batch_size=64, eval_batch_size=1_000_000))
    left -= 1
    with pytest.raises(ValueError, match="a batch of 360 samples of the validation split needs"):
        attach(ClassificationData(batch_size=64, eval_batch_size=1_000_000))


def test_digits_batches() -> None:
    data = ClassificationData(batch_size=100, eval_batch_size=128)
    module = attach(data)
    assert data.num_classes == 10
    assert data.class_names == [str(i) for i in range(10)]
    images, targets = next(iter(data.train_dataloader()))
    assert images.shape == (100, 1, 8, 8) and images.dtype == torch.float32
    assert targets.shape == (100,) and targets.dtype == torch.int64
    batches = list(data.val_dataloader())
    assert [len(targets) for _, targets in batches] == [128, 128, 104]
    values = (batches[0][0] * data._data_config["std"][0] + data._data_config["mean"][0]) * 16
    assert torch.allclose(values, values.round(), atol=1e-4)
    assert module.net.num_classes == 10


def test_digits_follow_the_model() -> None:
    data = ClassificationData(batch_size=10)
    attach(data, img_size=16, in_chans=3)
    images, _ = next(iter(data.val_dataloader()))
    assert images.shape == (10, 3, 16, 16)
    pixels = torch.stack([data._splits["val"].read(i)[0][:1] for i in range(10)])
    expected = torch.nn.functional.interpolate(pixels, size=16, mode="bilinear")
    mean, std = (torch.tensor(data._data_config[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(images, (expected - mean) / std)


def test_default_augmentation_leaves_digits_alone() -> None:
    data = ClassificationData(batch_size=10)
    attach(data)
    samples = data.train_dataloader().dataset
    assert isinstance(samples, WholeBatches)
    config = data._data_config
    expected = (samples.source.read(5)[0] - config["mean"][0]) / config["std"][0]
    assert torch.equal(samples.__getitems__([SampleKey(5, 0, 0)])[0][0], expected)


AUGMENTATION = Augmentation(scale=(0.5, 1.0), hflip=0.5, color_jitter=0.3, reprob=0.5, degrees=15, translate=0.1)


def augmented(workers: int, epochs: int = 1, **options: int) -> list[torch.Tensor]:
    data = ClassificationData(batch_size=400, num_workers=workers, augmentation=AUGMENTATION, **options)
    module = Recorder()
    make_trainer(max_epochs=epochs, limit_val_batches=0).fit(module, datamodule=data)
    return [images for _, images, _ in module.train_batches]


def test_pixels_do_not_depend_on_workers() -> None:
    alone, shared = augmented(0, epochs=2), augmented(2, epochs=2)
    assert len(alone) == 6
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_augmentation_differs_by_epoch_repeat_and_seed() -> None:
    data = ClassificationData(batch_size=10, augmentation=AUGMENTATION)
    attach(data)
    samples = data.train_dataloader().dataset
    keys = [SampleKey(3, 0, 0), SampleKey(3, 1, 0), SampleKey(3, 0, 1), SampleKey(3, 0, 0)]
    images = [samples[key][0] for key in keys]
    assert torch.equal(images[0], images[3])
    assert not torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])
    samples.seed = 1
    assert not torch.equal(samples[keys[0]][0], images[0])


def test_reading_data_leaves_the_random_state_of_training_alone() -> None:
    data = ClassificationData(batch_size=10, augmentation=AUGMENTATION)
    attach(data)
    samples = data.train_dataloader().dataset
    state = torch.get_rng_state()
    samples[SampleKey(3, 0, 0)]
    assert torch.equal(torch.get_rng_state(), state)


GEOMETRY = {"scale": (0.5, 1.0), "hflip": 0.5}


@pytest.mark.parametrize("options", [{}, GEOMETRY, {**GEOMETRY, "degrees": 15}, {**GEOMETRY, "reprob": 0.9}])
@pytest.mark.parametrize(("dataset", "channels"), [("digits", 1), ("fake", 3)])
def test_batches_hold_the_samples_that_timms_transform_makes_one_by_one(
    dataset: str, channels: int, options: dict[str, Any]
) -> None:
    data = ClassificationData(dataset, batch_size=10, num_workers=0, augmentation=Augmentation(**options), seed=3)
    attach(data, img_size=8, in_chans=channels)
    samples = data.train_dataloader().dataset
    keys = [SampleKey(index, 1, index % 2) for index in (5, 2, 5, 9)]
    before = [to_picture(samples.source.read(key.sample)[0]).tobytes() for key in keys]
    images, targets = samples.__getitems__(keys)
    assert images.dtype == torch.float32 and images.is_contiguous() and targets.dtype == torch.int64
    for key, image, target in zip(keys, images, targets, strict=True):
        (one,), (one_target,) = samples.__getitems__([key])
        assert torch.equal(image, one) and target == one_target
    assert [to_picture(samples.source.read(key.sample)[0]).tobytes() for key in keys] == before
    if "degrees" in options:
        return
    config, augmentation = data._data_config, data.augmentation
    transform = create_transform(
        config["input_size"], is_training=True, scale=augmentation.scale, ratio=augmentation.ratio,
        interpolation=config["interpolation"], hflip=augmentation.hflip, color_jitter=None, mean=config["mean"],
        std=config["std"], re_prob=augmentation.reprob, re_mode=augmentation.remode,
    )  # fmt: skip
    for key, image in zip(keys, images, strict=True):
        with seeded(derive_seed(3, key.epoch, key.sample, key.repeat)):
            assert torch.equal(transform(samples.source.read(key.sample)[0]), image)


@pytest.mark.slow
def test_spawned_workers_read_the_same() -> None:
    data = ClassificationData(batch_size=700, augmentation=AUGMENTATION)
    attach(data)
    loader = data.train_dataloader()
    spawned = torch.utils.data.DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        collate_fn=loader.collate_fn,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    for (images, _), (expected, _) in zip(spawned, loader, strict=True):
        assert torch.equal(images, expected)


def test_ranks_share_training_and_validation() -> None:
    whole = ClassificationData(batch_size=64, augmentation=AUGMENTATION)
    attach(whole)
    halves = []
    for rank in range(2):
        data = ClassificationData(batch_size=32, augmentation=AUGMENTATION)
        attach(data, rank=rank, world_size=2)
        halves.append(data)
    images, targets = next(iter(whole.train_dataloader()))
    for rank, data in enumerate(halves):
        part, part_targets = next(iter(data.train_dataloader()))
        assert torch.equal(part, images[rank::2]) and torch.equal(part_targets, targets[rank::2])
    assert sum(len(targets) for data in halves for _, targets in data.val_dataloader()) == 360


def test_fake_images_have_the_models_shape_and_take_every_augmentation() -> None:
    augmentation = Augmentation(
        scale=(0.08, 1.0),
        ratio=(0.75, 1.33),
        interpolation="random",
        auto_augment="rand-m9-mstd0.5-inc1",
        color_jitter=0.4,
        hflip=0.5,
        reprob=0.25,
    )
    data = ClassificationData(dataset="fake", batch_size=4, num_workers=0, augmentation=augmentation)
    attach(data, img_size=32, in_chans=3, num_classes=7)
    assert data.num_classes == 7
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 32, 32)
    first, second = (next(iter(data.val_dataloader())) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert first[1].tolist() == [0, 1, 2, 3]


def test_policies_may_keep_no_bits() -> None:
    config = {"input_size": (3, 16, 16), "interpolation": "bilinear", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    train_transform(config, Augmentation(auto_augment="rand-m9-mstd0.5-inc1"))
    posterized = AugmentOp("PosterizeIncreasing", prob=1.0, magnitude=10)(Image.new("RGB", (16, 16), "white"))
    assert posterized.getextrema() == ((0, 0),) * 3


def test_repeats_reach_the_batches() -> None:
    data = ClassificationData(batch_size=12, augmentation=Augmentation(repeats=3, degrees=20))
    attach(data)
    images, targets = next(iter(data.train_dataloader()))
    assert len(data.train_dataloader()) == 1437 // 12
    assert targets.view(4, 3).unique(dim=1).shape[1] <= 3 and (targets.view(4, 3)[:, :1] == targets.view(4, 3)).all()
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize(("dataset", "size"), [("digits", 8), ("canvas", 64)])
def test_held_out_images_are_validated_on_and_not_trained_on(dataset: str, size: int) -> None:
    data = ClassificationData(dataset, holdout_every=5)
    attach(data, img_size=size, num_classes=10 if dataset == "digits" else 9)
    train, val = data._splits["train"], data._splits["val"]
    whole = Digits("train") if dataset == "digits" else CanvasDigits("train", size)
    assert (len(train), len(val)) == (len(whole) - len(val), -(-len(whole) // 5))
    assert [val.name(1), train.name(0), train.name(4)] == [whole.name(5), whole.name(1), whole.name(6)]
    image, target = val.read(1)
    assert torch.equal(image, whole.read(5)[0]) and target == whole.read(5)[1]
    assert isinstance(data.val_dataloader().dataset, WholeBatches)
    images, _ = next(iter(data.val_dataloader()))
    assert torch.equal(images[1], data.eval_transform()(image))

    data = ClassificationData(dataset, holdout_every=5)
    attach(data, stage="test", img_size=size, num_classes=10 if dataset == "digits" else 9)
    assert data._splits["test"].name(0) == type(whole)("validation").name(0)


def test_one_sample_may_be_held_out_and_some_must_be_left() -> None:
    source = Digits("validation")
    assert [len(hold_out(source, 360, held=held)) for held in (True, False)] == [1, 359]
    with pytest.raises(InputError, match="holdout_every=361 is more than the 360 images"):
        hold_out(source, 361, held=True)
    with pytest.raises(InputError, match="holdout_every=1 leaves nothing of 360 images to train on"):
        hold_out(source, 1, held=False)


def test_evaluation_stages_run_without_training_data() -> None:
    module, data = Recorder(), ClassificationData(batch_size=200, test_split="train")
    trainer = make_trainer()
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.test(module, datamodule=data, verbose=False)
    sizes = [len(targets) for _, targets in module.eval_batches]
    assert sizes == [200, 160, *[200] * 7, 37]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "digit"}, "dataset 'digit' is unknown, it must be one of digits, canvas"),
        ({"dataset": "torch/"}, "dataset 'torch/' is unknown"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"eval_batch_size": -1}, "eval_batch_size must be a whole number of at least 1, got -1"),
        ({"num_workers": -1}, "num_workers must be a whole number of at least 0, got -1"),
        ({"max_unreadable": 1.5}, "max_unreadable must be a finite number from 0 to 1, got 1.5"),
        ({"crop_pct": 0.0}, "crop_pct must be above 0, got 0.0"),
        ({"interpolation": "cubic"}, "interpolation must be one of bilinear, bicubic, nearest"),
        ({"augmentation": Augmentation(hflip=2)}, "augmentation.hflip must be a finite number from 0 to 1, got 2"),
        ({"augmentation": Augmentation(scale=(1.0, 0.5))}, r"augmentation.scale must be \(low, high\)"),
        ({"augmentation": Augmentation(scale=(0.5, 1.5))}, "augmentation.scale must be at most 1, got"),
        ({"crop_pct": 1.5}, "crop_pct must be a finite number from 0 to 1, got 1.5"),
        ({"background": "clear"}, "background is 'clear', it must be a colour"),
        ({"augmentation": Augmentation(repeats=0)}, "augmentation.repeats must be a whole number of at least 1, got 0"),
        ({"augmentation": Augmentation(remode="noise")}, "augmentation.remode must be one of"),
        ({"augmentation": Augmentation(interpolation="cubic")}, "augmentation.interpolation must be one of"),
        ({"dataset": "wds/", "augmentation": Augmentation(repeats=2)}, "must be 1 for dataset 'wds/'"),
        ({"holdout_every": 1}, "holdout_every must be a whole number of at least 2, got 1"),
        ({"dataset": "wds/", "holdout_every": 5}, "holdout_every is 5, it must be null for dataset 'wds/'"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ClassificationData(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "stage", "message"),
    [
        ({"batch_size": 2000}, "fit", "has 1437 images, fewer than one global batch of 2000"),
        ({"val_split": "dev"}, "validate", "split 'dev' does not exist"),
        ({"augmentation": Augmentation(auto_augment="rand-m9")}, "fit", "auto_augment needs decoded images"),
        ({"interpolation": "lanczos"}, "fit", "must be one of bilinear, bicubic, nearest"),
        (
            {"augmentation": Augmentation(interpolation="lanczos")},
            "fit",
            r"augmentation.interpolation \(digits\) must be",
        ),
        ({"val_split": None}, "validate", "there is no validation split: set data.val_split"),
        ({"background": "black"}, "fit", "dataset 'digits' has no transparent pixels, got background 'black'"),
        (
            {"dataset": "fake", "augmentation": Augmentation(auto_augment="rnd-m9")},
            "fit",
            "auto_augment must be a policy of timm",
        ),
        ({"dataset": "folder"}, "fit", "dataset 'folder' needs root"),
        ({"dataset": "folder", "root": "/no/where"}, "fit", "root '/no/where' does not exist"),
        ({"dataset": "torch/cifar10", "root": "/no/where"}, "fit", "root '/no/where' does not exist"),
        ({}, "predict", "predict_path is not given"),
        ({"predict_path": "/no/where.png"}, "predict", "'/no/where.png' is neither a file nor a folder"),
    ],
)
def test_wrong_set_up(options: dict, stage: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        attach(ClassificationData(**options), stage)
    assert "\n" not in str(error.value)


def test_labels_of_a_batch_are_those_of_classes() -> None:
    data, images = ClassificationData(), torch.zeros(2, 1, 8, 8)
    attach(data)
    for labels, message in (
        ([0, 9], ""),
        ([0, 10], "labels 0 to 10 in the data, there are 10 classes"),
        ([-1, 9], "-1"),
    ):
        batch = (images, torch.tensor(labels))
        with pytest.raises(InputError, match=message) if message else nullcontext():
            assert data.transfer_batch_to_device(batch, torch.device("cpu"), 0)[1].tolist() == labels


def test_model_with_another_number_of_channels() -> None:
    with pytest.raises(ValueError, match="takes 4 input channels, images have 1 or 3"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attach(ClassificationData(), in_chans=4)


def test_lightning_must_not_add_its_own_distributed_sampler() -> None:
    with pytest.raises(ValueError, match="use_distributed_sampler to false"):
        attach(ClassificationData(), world_size=2, use_distributed_sampler=True)


def test_options_reach_the_command_line() -> None:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ClassificationData, "data")
    config = parser.parse_args(["--data.augmentation.scale=[0.5,1]", "--data.augmentation.hflip=0.5"])
    data = parser.instantiate(config).data
    assert data.augmentation == Augmentation(scale=(0.5, 1.0), hflip=0.5)
    help_text = parser.format_help()
    assert "Largest share of unreadable images" in help_text
    assert "Probability of erasing a random rectangle" in help_text
