"""The Fréchet distance while training: what it is compared with, who draws, and what is refused before training."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from headmix_vision.errors import InputError
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.frechet import frechet_distance, write_statistics
from headmix_vision.evaluation.sample_sets import SampleSet, open_samples
from headmix_vision.evaluation.sample_sources import TensorSamples
from headmix_vision.evaluation.scores import Scorer, fid
from headmix_vision.processes import Processes
from headmix_vision.sampling.folder import draw_grid
from headmix_vision.training.callbacks import curves
from headmix_vision.training.callbacks.curves import GENERATOR_PANELS, draw_curves
from headmix_vision.training.callbacks.non_finite import NonFiniteError
from headmix_vision.training.callbacks.samples import ImageSampler, SampleFid, SampleGrids
from headmix_vision.training.generator import ImageGenerator
from headmix_vision.training.options import FidConfig, SampleGridConfig

REAL = "digits[:40]"


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained classifier, which is an extractor like any other."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("features") / "classifier.safetensors"
    network = timm.create_model("deit_linear_digits", depth=1)
    header = {"model_name": "deit_linear_digits", "model_args": '{"depth": 1}'}
    save_file(network.state_dict(), path, metadata=header)
    return str(path)


def generator(**arguments: Any) -> ImageGenerator:
    torch.manual_seed(1)
    small = {"depth": 1, "embed_dim": 16, "num_heads": 2, **arguments}
    module = ImageGenerator("dit_linear_digits", input_size=small.pop("input_size", None), model_args=small)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # the output layer is zero at first
    return module


def another_generator() -> ImageGenerator:
    module = generator()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def process(rank: int = 0, world_size: int = 1) -> Any:
    """A trainer, as far as the callback looks at it."""
    return SimpleNamespace(
        world_size=world_size,
        global_rank=rank,
        is_global_zero=rank == 0,
        fast_dev_run=False,
        current_epoch=0,
        global_step=1,
        loggers=[],
        lightning_module=None,
        precision_plugin=SimpleNamespace(forward_context=nullcontext),
    )


def callback(features: str, **options: Any) -> SampleFid:
    settings = {"every_n_epochs": 1, "real": REAL, "features": features, "num": 25, "steps": 1, "batch_size": 10}
    config = FidConfig(**{**settings, **options})
    return SampleFid(config, ImageSampler(None), None, None, seed=0)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    values: list[float] = []
    monkeypatch.setattr(ImageGenerator, "log_now", lambda self, metrics, step: values.append(metrics["val/fid"]))
    return values


def test_each_sample_is_drawn_once_by_processes_with_equally_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[Any]] = []
    monkeypatch.setattr(ImageSampler, "draw", lambda self, trainer, module, plan, indices: indices)
    monkeypatch.setattr(Processes, "in_turn", lambda self, share, rounds: drawn.append([*share]) or iter(()))
    for count, world_size in ((90, 2), (70, 3), (30, 1)):
        drawn.clear()
        for rank in range(world_size):
            ImageSampler(None).draw_shared(process(rank, world_size), generator(), None, count, 10, list)
        assert {len(share) for share in drawn} == {-(-count // 10 // world_size)}
        by_turns = [indices for turn in zip(*drawn, strict=True) for indices in turn if indices is not None]
        assert [index for indices in by_turns for index in indices] == [*range(count)]


@pytest.mark.parametrize("is_averaged", [False, True])
def test_score_is_that_of_the_samples_of_the_average_if_there_is_one(
    is_averaged: bool, features: str, logged: list[float]
) -> None:
    module, average, score = generator(), another_generator(), callback(features, num=30)
    score.average = SimpleNamespace(average=average) if is_averaged else None
    score.on_fit_start(process(), module)
    score.on_train_epoch_end(process(), module)
    drawn = average if is_averaged else module
    pixels = [
        score.sampler.draw(process(), drawn, score._plan(drawn), range(start, start + 10)) for start in (0, 10, 20)
    ]
    fake = SampleSet(TensorSamples(torch.from_numpy(np.concatenate(pixels)).permute(0, 3, 1, 2)), "L")
    scorer = Scorer(open_extractor(features), 10)
    assert logged[0] == pytest.approx(fid(scorer, open_samples(REAL, "L"), fake)["fid"], rel=1e-9)


def test_sample_grids_say_which_weights_they_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, average, shown = generator(), another_generator(), {}

    def draw(images: np.ndarray, captions: Any, title: str, columns: int) -> np.ndarray:
        shown[title.split(", ")[1]] = images
        return draw_grid(images, captions, title, columns)

    monkeypatch.setattr("headmix_vision.training.callbacks.samples.draw_grid", draw)
    config, sampler = SampleGridConfig(every_n_steps=1, classes=[3, 7], rows=1, steps=1), ImageSampler(None)
    grids = SampleGrids(tmp_path, config, sampler, SimpleNamespace(average=average), seed=0)
    grids.on_train_batch_end(process(), module, None, None, 0)
    plan = grids._plan(module.net)
    for title, kind, weights in (("weights being trained", "raw", module), ("EMA", "ema", average)):
        assert np.array_equal(shown[title], sampler.draw(process(), weights, plan, range(2)))
        assert (tmp_path / f"step_00000001_{kind}.png").is_file()
    assert not np.array_equal(*shown.values())


def test_real_side_is_whatever_evaluate_reads(features: str, tmp_path: Path) -> None:
    scorer = Scorer(open_extractor(features))
    images = open_samples(REAL, "L")
    statistics = scorer.statistics(images)
    gaussian = statistics.gaussians["features"]
    pixels = np.concatenate([batch.numpy() for batch in images.batches(40)])[:, 0]
    moments = {"mu": gaussian.mean.numpy(), "sigma": gaussian.covariance.numpy()}
    np.savez(tmp_path / "images.npz", arr_0=pixels)
    np.savez(tmp_path / "moments.npz", **moments)
    np.savez(tmp_path / "both.npz", arr_0=pixels[:3], **moments)
    write_statistics(tmp_path / "statistics.safetensors", statistics)
    (tmp_path / "folder").mkdir()
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "folder" / f"{index:02d}.png")
    for name in ("images.npz", "moments.npz", "both.npz", "statistics.safetensors", "folder"):
        score = callback(features, real=str(tmp_path / name))
        score.on_fit_start(process(), generator())
        assert score._real is not None
        assert frechet_distance(score._real, gaussian) < 1e-12, name


def test_real_images_take_the_size_of_the_run(features: str) -> None:
    score = callback(features, real="canvas[:4]")
    score.on_fit_start(process(), generator(input_size=96))
    expected = Scorer(open_extractor(features)).statistics(open_samples("canvas[:4]", "L", 96)).gaussians["features"]
    assert score._real is not None
    torch.testing.assert_close(score._real.mean, expected.mean)


def test_what_does_not_fit_is_refused_before_training(features: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "narrow.npz", mu=np.zeros(7), sigma=np.eye(7))
    statistics = Scorer(open_extractor(features)).statistics(open_samples(REAL, "L"))
    write_statistics(tmp_path / "small.safetensors", statistics)
    for options, arguments, message in (
        ({"real": "/nowhere"}, {}, "is neither a file, nor a folder"),
        ({"real": str(tmp_path / "narrow.npz")}, {}, "is of 7 features"),
        ({"real": str(tmp_path / "small.safetensors")}, {"input_size": 16}, "is of 8x8 pixels, the model makes 16x16"),
        ({}, {"input_size": [8, 16]}, "is of 8x8 pixels, the model makes 16x8"),
        ({"steps": 1001}, {}, "fid.steps must be at most 1000"),
        ({"scheduler": "ddim"}, {}, "does not fit"),
        ({"guidance": 2.0}, {"class_dropout": 0.0}, "needs a model with a null class"),
        ({}, {"in_channels": 4}, "fid needs model.vae"),
        ({"features": "nothing"}, {}, "must be inception, digits, lite0:PATH, or the path"),
    ):
        with pytest.raises(InputError, match=message):
            callback(**{"features": features, **options}).on_fit_start(process(), generator(**arguments))
    callback(features, steps=1000).on_fit_start(process(), generator())


def test_clips_are_refused_before_training(features: str) -> None:
    module = ImageGenerator("dit_video_linear_digits", model_args={"depth": 1, "embed_dim": 16, "num_heads": 2})
    with pytest.raises(InputError, match=r"must be null for a model of clips.* headmix evaluate fvd"):
        callback(features).on_fit_start(process(), module)


def test_one_autoencoder_serves_all_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    autoencoder = SimpleNamespace(module=SimpleNamespace(config={}, spatial_compression_ratio=8))
    monkeypatch.setattr(
        "headmix_vision.training.callbacks.samples.load_autoencoder",
        lambda source, fetch: (loaded.append(source), autoencoder)[1],
    )
    sampler = ImageSampler("some/vae")
    for _ in range(2):
        sampler.open()
    assert loaded == ["some/vae"]
    assert sampler.image_shape(generator(input_size=4)) == (3, 32, 32)
    autoencoder.module.config["out_channels"] = 1
    clips = SimpleNamespace(net=SimpleNamespace(in_channels=2, input_size=(4, 8, 12)))
    assert sampler.image_shape(clips) == (1, 64, 96)  # type: ignore[arg-type]
    assert ImageSampler(None).image_shape(clips) == (2, 8, 12)  # type: ignore[arg-type]


def test_samples_that_are_not_finite_stop_the_run() -> None:
    module = generator()
    module.net.x_embedder.proj.weight.data.fill_(float("nan"))
    plan = callback("")._plan(module)
    with pytest.raises(NonFiniteError, match=r"sample 4 became infinite .* \(drawn after step 1 of training\)"):
        ImageSampler(None).draw(process(), module, plan, [4, 5])


def test_curves_show_what_was_logged(tmp_path: Path) -> None:
    rows = [{"step": 1.0, "epoch": 0.0, "train/loss": 1.0, "val/loss": 2.0, "lr": 0.1}]
    draw_curves(tmp_path / "without.svg", rows, GENERATOR_PANELS)
    draw_curves(tmp_path / "with.svg", [{**rows[0], "val/fid": 3.0}], GENERATOR_PANELS)
    panels = [(tmp_path / f"{name}.svg").read_text().count('<g id="axes_') for name in ("without", "with")]
    assert panels == [2, 3]
    closing = [{"step": 3.0, "epoch": 0.0, "train/loss": 1.0}, {"step": 7.0, "epoch": 1.0, "train/loss": 1.0}]
    assert curves._epochs([1, 3, 5, 7], closing).tolist() == [0.5, 1.0, 1.5, 2.0]
