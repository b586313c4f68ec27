"""What an epoch of training and a validation see: each image once, in another order, drawn anew, never flipped."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from headmix_vision.data import Augmentation, GenerationData
from headmix_vision.data.augmentation import train_transform
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.data.data_module import DataModule
from headmix_vision.data.datasets.base import Transform
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.generation import ImageToRange
from headmix_vision.data.latent_cache import write_cache
from headmix_vision.data.seeding import seeded

from .helpers import make_trainer, write_image


def attach(data: DataModule, shape: tuple[int, ...] = (1, 8, 8), batches_trained: int = 0) -> DataModule:
    """Set a data module up to train a generator of this input, at this position of the run."""
    module, trainer = torch.nn.Module(), make_trainer(max_epochs=9)
    module.net = SimpleNamespace(in_channels=shape[0], input_size=shape[1:], num_classes=10)
    trainer.strategy._lightning_module = module
    trainer.fit_loop.epoch_loop.batch_progress.total.processed = batches_trained
    data.trainer = trainer
    data.setup("fit")
    return data


def rows(images: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def test_an_epoch_of_a_generator_holds_each_image_once_in_an_order_of_its_own() -> None:
    source = Digits("validation")
    known = {image: index for index, image in enumerate(rows(source.images * 2 - 1))}
    assert len(known) == len(source)  # no two digits are equal
    orders = []
    for epoch in (0, 1):
        data = GenerationData(train_split="validation", val_split=None, batch_size=120, seed=5)
        batches = list(attach(data, batches_trained=3 * epoch).train_dataloader())
        order = [known[image] for images, _ in batches for image in rows(images)]
        assert sorted(order) == list(range(len(source)))
        assert torch.cat([labels for _, labels in batches]).tolist() == [int(source.targets[i]) for i in order]
        orders.append(order)
    moved = sum(a != b for a, b in zip(*orders, strict=True))
    assert moved > 340 and orders[0] != sorted(orders[0])


def latents(folder: Path) -> Path:
    """A cache of moments, of the validation digits."""
    from diffusers import AutoencoderKL

    from headmix_vision.models.autoencoders import load_autoencoder

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    sizes = {"block_out_channels": (4,), "layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 1}
    AutoencoderKL(**blocks, **sizes).save_pretrained(folder / "vae")
    vae = load_autoencoder(str(folder / "vae"))
    write_cache(
        Digits("validation", 3),
        vae,
        CacheRequest(vae="none", out=folder / "latents", image_size=8, workers=0),
        "digits",
    )
    return folder / "latents"


def test_latents_are_drawn_anew_in_every_epoch_and_for_every_image(tmp_path: Path) -> None:
    cache, drawn = latents(tmp_path), []
    for epoch in (0, 0, 1):
        data = GenerationData("latents", str(cache), val_split=None, batch_size=360, num_workers=0)
        loader = attach(data, batches_trained=epoch).train_dataloader()
        (keys,) = loader.batch_sampler
        ((images, _),) = loader
        order = torch.tensor([key.sample for key in keys]).argsort()
        drawn.append(images[order])
    assert torch.equal(drawn[0], drawn[1])
    noise = drawn[2] - drawn[0]
    assert noise.flatten(1).any(1).all()
    # what is added to one image is not what is added to the next
    correlation = torch.corrcoef(noise.flatten(1)[:50]) - torch.eye(50)
    assert correlation.abs().max() < 0.8


def test_validation_of_a_generator_is_never_flipped(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_image(tmp_path / split / "one" / "0.png", seed=0, size=(8, 8))
    for dataset, shape, split in (("digits", (1, 8, 8), "validation"), ("folder", (3, 8, 8), "val")):
        root = str(tmp_path) if dataset == "folder" else None
        options = {"root": root, "val_split": split, "batch_size": 1, "num_workers": 0}
        first = {}
        for hflip in (0.0, 1.0):
            data = attach(GenerationData(dataset, hflip=hflip, **options), shape)
            first[hflip] = [next(iter(loader))[0] for loader in (data.train_dataloader(), data.val_dataloader())]
        (train, val), (flipped_train, flipped_val) = first[0.0], first[1.0]
        assert torch.equal(flipped_train, train.flip(-1)) and not torch.equal(flipped_train, train)
        assert torch.equal(flipped_val, val) and not torch.equal(val, val.flip(-1))


def test_tensors_are_enlarged_in_hard_pixels_and_reduced_with_antialiasing() -> None:
    """The stripes of a picture of four times the size become an even grey."""
    stripes = torch.zeros(1, 32, 32)
    stripes[..., 1::4] = stripes[..., 2::4] = 1.0
    assert ImageToRange((8, 8))(stripes)[..., 1:-1].abs().max() < 0.01
    board = torch.eye(4)[None]
    assert torch.equal(ImageToRange((8, 8))(board), board.repeat_interleave(2, 1).repeat_interleave(2, 2) * 2 - 1)


def test_images_are_flipped_as_often_as_is_asked_for() -> None:
    ramp = torch.linspace(0, 1, 4).expand(1, 4, 4)
    for hflip, flips in ((0.0, {False}), (0.5, {False, True}), (1.0, {True})):
        pictures = [ImageToRange((4, 4), hflip)(ramp) for _ in range(30)]
        assert {torch.equal(picture, ramp.flip(-1) * 2 - 1) for picture in pictures} == flips


def places(transform: Transform, count: int = 60) -> Tensor:
    """Where a bright pixel in the middle of a black image comes to lie: [count, 2] rows and columns."""
    image = torch.zeros(1, 33, 33)
    image[0, 16, 16] = 1
    found = []
    for seed in range(count):
        with seeded(seed):
            found.append(transform(image)[0].flatten().argmax())
    return torch.stack([torch.stack([place // 33, place % 33]) for place in found]) - 16


def test_images_are_shifted_along_both_axes_both_ways_and_no_further() -> None:
    config = {"input_size": (1, 33, 33), "interpolation": "bilinear", "mean": (0.0,), "std": (1.0,)}
    moved = places(train_transform(config, Augmentation(translate=0.2)))
    for axis in (0, 1):
        assert moved[:, axis].min() < -3 and moved[:, axis].max() > 3
    assert moved.abs().max() <= 7  # a fifth of 33 pixels
    assert not places(train_transform(config, Augmentation()), 3).any()
