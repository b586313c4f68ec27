"""Moving digits: where a digit is, what its class says, and how the data module serves clips and stills."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.datasets.moving_digits import DIRECTIONS, MovingDigits
from headmix_vision.data.generation import GenerationData
from headmix_vision.data.stills import MixedBatchSampler, StillsConfig
from headmix_vision.errors import InputError

from .helpers import make_trainer

STEPS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}


def attach(data: GenerationData, size: tuple[int, ...], num_classes: int = 40, **net: Any) -> GenerationData:
    module, trainer = torch.nn.Module(), make_trainer(max_epochs=1)
    module.net = SimpleNamespace(in_channels=1, input_size=size, num_classes=num_classes, **net)
    trainer.strategy._lightning_module = module
    data.trainer = trainer
    data.setup("fit")
    return data


def test_the_class_is_the_digit_and_the_direction_of_the_first_motion() -> None:
    clips = MovingDigits("train", (64, 32, 48), length=200)
    rows, columns = clips.places(np.arange(200))
    for index in range(200):
        digit, direction = clips.class_names[clips.labels[index]].split()
        down, right = (np.diff(places[index, :4]) for places in (rows, columns))
        step = STEPS[direction]
        assert (np.sign(down) * step[0] >= 0).all() and (np.sign(right) * step[1] >= 0).all()
        assert np.sign([down.sum(), right.sum()]).tolist() == list(step)
        assert 0 <= rows[index].min() <= rows[index].max() <= 16 and columns[index].min() >= 0
        assert clips.labels[index] == int(digit) * 4 + DIRECTIONS.index(direction)
    assert columns.max() == 32  # all of the canvas, and no further
    assert np.abs(np.diff(columns)).max() <= 3.5


def test_a_frame_shows_a_digit_of_its_split_at_its_place() -> None:
    clips = MovingDigits("validation", (3, 32, 32), length=5, channels=3)
    pixels, labels = clips.read_batch([4, 0])
    assert pixels.shape == (2, 3, 3, 32, 32) and pixels.dtype == torch.float32
    rows, columns = clips.places(np.array([4, 0]))
    digits = Digits("validation")
    for clip, label, tops, lefts in zip(pixels, labels, rows, columns, strict=True):
        cut = clip[0, 2, tops[2] : tops[2] + 16, lefts[2] : lefts[2] + 16]
        small = cut[::2, ::2]
        assert torch.equal(cut, small.repeat_interleave(2, 0).repeat_interleave(2, 1))
        (found,) = {
            target for image, target in zip(digits.images, digits.targets, strict=True) if (image == small).all()
        }
        assert found == int(label) // 4 and clip[0, 2].sum() == cut.sum() and torch.equal(clip[0], clip[2])


def test_a_clip_depends_on_seed_split_and_index_alone() -> None:
    whole = MovingDigits("train", (8, 16, 16), length=50)
    assert torch.equal(whole[7][0], MovingDigits("train", (8, 16, 16), length=8).read_batch([3, 7])[0][1])
    others = [MovingDigits("train", (8, 16, 16), seed=1), MovingDigits("validation", (8, 16, 16))]
    assert all(not torch.equal(whole[7][0], other[7][0]) for other in others)
    # longer clips go on, other frame rates show the same motion
    longer, faster = MovingDigits("train", (20, 16, 16)), MovingDigits("train", (16, 16, 16), frame_rate=16)
    assert torch.equal(longer[7][0][:, :8], whole[7][0]) and torch.equal(faster[7][0][:, ::2], whole[7][0])
    request = SplitRequest("moving_digits", "train", (1, 4, 16, 16), "scoring", clip=ClipConfig(frame_stride=2))
    assert torch.equal(open_source(request).read(7)[0], whole[7][0][:, ::2])


def test_the_data_module_draws_clips_at_the_frame_rate_of_the_network() -> None:
    data = attach(GenerationData("moving_digits", batch_size=4, eval_batch_size=3), (5, 16, 16), frame_rate=4.0)
    x, labels = next(iter(loader := data.train_dataloader()))
    keys = next(iter(loader.batch_sampler))
    clips, expected = MovingDigits("train", (5, 16, 16), frame_rate=4).read_batch([key.sample for key in keys])
    assert torch.equal(x, clips * 2 - 1) and torch.equal(labels, expected)
    options = {"num_workers": 0, "clip": ClipConfig(frame_rate=8.0)}
    data = attach(GenerationData("moving_digits", batch_size=4, **options), (5, 16, 16), frame_rate=4.0)
    clips, _ = MovingDigits("train", (5, 16, 16)).read_batch([key.sample for key in keys])
    assert torch.equal(next(iter(data.train_dataloader()))[0], clips * 2 - 1)


def test_batches_of_stills_come_in_even_distances_wherever_training_begins() -> None:
    stills = StillsConfig(share=0.3)
    data = attach(GenerationData("moving_digits", batch_size=4, num_workers=0, stills=stills), (5, 16, 16))
    loader = data.train_dataloader()
    batches = [batch for batch, _ in zip(loader, range(10), strict=False)]
    assert [x.shape[2] for x, _ in batches] == [5, 5, 5, 1, 5, 5, 1, 5, 5, 1]
    sampler = loader.batch_sampler
    assert isinstance(sampler, MixedBatchSampler)
    keys = [key for key, _ in zip(sampler, range(40), strict=False)]
    sampler.clips.first_batch = lambda: 23
    assert [key for key, _ in zip(sampler, range(17), strict=False)] == keys[23:]
    assert sum(batch[0].still for batch in keys) == 12
    used = [key.sample for batch in keys if not batch[0].still for key in batch]
    assert len(used) == len(set(used)) == 28 * 4  # the clips are gone through as without stills
    x, labels = batches[3]
    expected, targets = MovingDigits("train", (1, 16, 16)).read_batch([key.sample for key in keys[3]])
    assert torch.equal(x, expected * 2 - 1) and torch.equal(labels, targets)


def test_stills_of_an_image_data_set() -> None:
    stills = StillsConfig(share=0.5, dataset="digits", split="validation")
    data = GenerationData("moving_digits", batch_size=4, num_workers=0, stills=stills)
    attach(data, (5, 16, 16), num_classes=0)
    loader = data.train_dataloader()
    (_, _), (x, labels) = (batch for batch, _ in zip(loader, range(2), strict=False))
    keys = [key for key, _ in zip(loader.batch_sampler, range(2), strict=False)][1]
    expected = torch.stack([Digits("validation").images[key.sample] for key in keys])
    assert torch.equal(x[:, :, 0, ::2, ::2], expected * 2 - 1) and x.shape == (4, 1, 1, 16, 16)
    alone = [loader.dataset.parts[True][key] for key in keys]  # type: ignore[attr-defined]
    assert torch.equal(x, torch.stack([image for image, _ in alone]))
    assert labels.tolist() == [label for _, label in alone]
    with pytest.raises(InputError, match="the data have 40 classes, the data set of stills has 10"):
        attach(GenerationData("moving_digits", batch_size=4, stills=stills), (5, 16, 16))


def test_refusals() -> None:
    for options, message in (
        ({"grid": (4, 15, 32)}, "moving digits of 15x32 have no room, they need at least 16 pixels"),
        ({"grid": (0, 16, 16)}, "frames must be a whole number of at least 1, got 0"),
        ({"frame_rate": 0}, "frame_rate must be a finite number above 0"),
        ({"channels": 2}, "channels is 2"),
        ({"length": 0}, "length must be a whole number"),
    ):
        with pytest.raises(InputError, match=message):
            MovingDigits("train", **options)
    with pytest.raises(IndexError):
        MovingDigits("train", length=5)[5]
    for dataset, size, message in (
        (
            "moving_digits",
            (16, 16),
            "'moving_digits' holds clips, asked for images of 16x16; images are in digits, can",
        ),
        ("digits", (4, 16, 16), "'digits' holds images, asked for clips of 4x16x16; clips are in fake, latents, vid"),
    ):
        with pytest.raises(InputError, match=message):
            attach(GenerationData(dataset, batch_size=4), size)
    for options, message in (
        ({"dataset": "digits", "clip": ClipConfig(frame_rate=8)}, "clip does not apply to digits: it holds no videos"),
        ({"dataset": "latents", "clip": ClipConfig(frame_rate=8)}, "latents: cache_latents has chosen the frames"),
        ({"stills": StillsConfig(0.5, "nothing")}, "dataset 'nothing' is unknown"),
        ({"hflip": 0.5}, "hflip is 0.5, it must be 0 for moving_digits: mirrored clips move"),
    ):
        with pytest.raises(InputError, match=message):
            GenerationData(**{"dataset": "moving_digits", **options})
    for arguments, message in (
        ((1,), "stills.share is 1, which leaves no clips"),
        ((-1,), "stills.share must be a finite number from 0 to 1"),
        ((0, "digits"), "need a stills.share above 0"),
    ):
        with pytest.raises(InputError, match=message):
            StillsConfig(*arguments)
    with pytest.raises(InputError, match="takes images: it must be 0"):
        attach(GenerationData("digits", batch_size=4, stills=StillsConfig(0.5)), (8, 8), num_classes=10)
    with pytest.raises(InputError, match="the data have 40 classes, the model 10"):
        attach(GenerationData("moving_digits", batch_size=4), (4, 16, 16), num_classes=10)
