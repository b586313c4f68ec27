"""The table of data sets: its lines, what they allow, and one data set through every reader."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from headmix_vision.cli import cache_latents
from headmix_vision.data import GenerationData
from headmix_vision.data.batches import EvalSamples, SampleKey, TrainSamples, UnreadableImages
from headmix_vision.data.data_module import DataModule
from headmix_vision.data.datasets import DATASETS, dataset_names, find_dataset
from headmix_vision.data.datasets.base import BatchSource, DatasetEntry, Source, SplitRequest, Use
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.datasets.latents import LatentShards
from headmix_vision.data.fitting import center_crop
from headmix_vision.errors import InputError
from headmix_vision.evaluation.sample_sets import open_samples

from .helpers import make_trainer


def attached(data: DataModule, in_channels: int, input_size: tuple[int, ...], num_classes: int) -> DataModule:
    """A data module set up to train a generator of this shape."""
    module, trainer = torch.nn.Module(), make_trainer(max_epochs=1)
    module.net = SimpleNamespace(in_channels=in_channels, input_size=input_size, num_classes=num_classes)
    trainer.strategy._lightning_module = module
    data.trainer = trainer
    data.setup("fit")
    return data


@pytest.mark.parametrize("kind", DATASETS)
def test_every_line_names_a_function_and_can_be_written(kind: str) -> None:
    entry = DATASETS[kind]
    module, _, function = entry.opener.partition(":")
    assert callable(getattr(import_module(module, "headmix_vision.data.datasets"), function))
    for name in entry.names or (kind,):
        for use in entry.uses:
            assert find_dataset(name, use) is entry
            assert name in dataset_names(use).split(", ")


@pytest.mark.parametrize(
    ("name", "use", "message"),
    [
        ("wds/", "generation", "'wds/' is a stream and cannot train a generator, it must be one of digits, canvas"),
        ("tfds/mnist", "scoring", "is a stream and cannot be scored, it must be one of digits"),
        ("fake", "scoring", "'fake' cannot be scored"),
        ("canvas", "caching", "'canvas' cannot be cached, it must be one of digits, folder, torch/NAME"),
        ("latents", "classification", "'latents' cannot train a classifier"),
        ("digits/8", "scoring", "'digits/8' is unknown"),
        ("hfds/", "caching", "'hfds/' is unknown"),
    ],
)
def test_refusals_say_what_is_allowed_instead(name: str, use: Use, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_dataset(name, use)


def test_all_digits_are_those_of_training_and_then_of_validation() -> None:
    parts, everything = [Digits("train"), Digits("validation")], Digits("all")
    assert torch.equal(everything.images, torch.cat([part.images for part in parts]))
    assert everything.targets == [target for part in parts for target in part.targets]


class Clips(BatchSource):
    """Constant clips [C, T, H, W] of two classes, black and white."""

    def __init__(self, request: SplitRequest) -> None:
        self.shape = request.shape
        self.class_names = ["black", "white"]

    def __len__(self) -> int:
        return 8

    def read_batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        targets = torch.tensor([index % 2 for index in indices])
        return targets.float().view(-1, *[1] * len(self.shape)).expand(-1, *self.shape), targets


def test_samples_of_any_number_of_axes_reach_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "clips", DatasetEntry(f"{__name__}:Clips", grid_axes=(3,)))
    data = attached(GenerationData("clips", batch_size=4, val_split=None), 3, (2, 8, 8), 2)
    x, labels = next(iter(data.train_dataloader()))
    assert x.shape == (4, 3, 2, 8, 8) and x.dtype == torch.float32 and labels.dtype == torch.int64
    assert torch.equal(x, (labels.float() * 2 - 1).view(4, 1, 1, 1, 1).expand_as(x))


class Broken(Source):
    """Nothing can be read: what is damaged is no single image."""

    class_names = ("one",)

    def __len__(self) -> int:
        return 4

    def read(self, index: int) -> tuple[Tensor, int]:
        raise InputError("shard-00000.safetensors is truncated")


def test_what_is_wrong_with_the_whole_is_no_unreadable_image() -> None:
    unreadable = UnreadableImages(4, limit=1.0)
    with pytest.raises(InputError, match="is truncated"):
        TrainSamples(Broken(), torch.Tensor.float, 0, unreadable)[SampleKey(0, 0, 0)]
    with pytest.raises(InputError, match="is truncated"):
        EvalSamples(Broken(), torch.Tensor.float, unreadable)[0]
    assert len(unreadable) == 0


@pytest.fixture(params=["RGB", "P", "RGBA"])
def photo(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A root with smooth pictures with noise, more than twice as large as wanted and not square, in modes of files."""
    y, x = np.mgrid[:75, :101]
    waves = [127 + 90 * np.sin(x / 9 + y / 5 * k) for k in (1, 2, 3)]
    pixels = np.stack(waves, -1) + np.random.default_rng(0).normal(0, 9, (75, 101, 3))
    for split in ("train", "val"):
        for name in ("one", "two"):
            path = tmp_path / "photos" / split / name / "photo.png"
            path.parent.mkdir(parents=True)
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            if request.param == "RGBA":
                image.putalpha(Image.fromarray(pixels[..., 0].clip(0, 255).astype(np.uint8)))
            image.convert(request.param).save(path)
    return tmp_path / "photos"


def test_a_photo_is_the_same_in_training_in_latents_and_in_scores(photo: Path, tmp_path: Path) -> None:
    options = {"root": str(photo), "batch_size": 2, "num_workers": 0}
    data = attached(GenerationData("folder", **options), 3, (24, 24), 2)
    trained, _ = next(iter(data.train_dataloader()))
    validated, _ = next(iter(data.val_dataloader()))
    arguments = ("--images", photo / "val", "--vae", "none", "--image-size", 24, "--out", tmp_path / "latents")
    cache_latents.main([str(argument) for argument in (*arguments, "--workers", 0, "--device", "cpu")])
    latent, _ = LatentShards(tmp_path / "latents")[0]
    assert torch.equal(trained[0], latent) and torch.equal(validated[0], latent)
    for images in (open_samples("folder", "RGB", image_size=24, root=str(photo)), open_samples(str(photo), "RGB", 24)):
        scored = next(images.batches(2))
        assert torch.equal(scored[0], ((latent + 1) / 2 * 255).round().to(torch.uint8))
    assert json.loads((tmp_path / "latents" / "latents.json").read_text())["crop"] == "adm_center"


def adm_center_crop(image: Image.Image, size: int) -> np.ndarray:
    """The algorithm of ADM's `image_datasets.py`, written down once more."""
    while min(*image.size) >= 2 * size:
        image = image.resize(tuple(side // 2 for side in image.size), resample=Image.Resampling.BOX)
    scale = size / min(*image.size)
    image = image.resize(tuple(round(side * scale) for side in image.size), resample=Image.Resampling.BICUBIC)
    pixels = np.array(image)
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


@pytest.mark.parametrize("shape", [(75, 101), (101, 75), (33, 90), (48, 16), (24, 24), (16, 96), (17, 11)])
def test_squares_are_adms_and_rectangles_are_filled(shape: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8))
    for size in (8, 24, 33):
        expected = adm_center_crop(image, size)
        assert np.array_equal(np.array(center_crop(image, size)), expected)
        assert np.array_equal(np.array(center_crop(image, (size, size))), expected)
    for height, width in ((12, 30), (30, 12), (16, 24)):
        assert center_crop(image, (height, width)).size == (width, height)
        assert np.array(center_crop(Image.new("L", shape[::-1], 255), (height, width))).min() == 255


def test_the_centre_is_cut_out_along_either_axis() -> None:
    ramp = np.tile(np.arange(40, dtype=np.uint8), (20, 1))
    assert np.array_equal(np.array(center_crop(Image.fromarray(ramp), 20)), ramp[:, 10:30])
    assert np.array_equal(np.array(center_crop(Image.fromarray(ramp.T), 20)), ramp.T[10:30])
    assert np.array_equal(np.array(center_crop(Image.fromarray(ramp), (20, 30))), ramp[:, 5:35])
