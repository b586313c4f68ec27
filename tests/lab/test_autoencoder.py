"""A small autoencoder of frames: trained, interrupted, gone on with, opened by the cache of latents."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headmix_lab import autoencoder
from headmix_vision.cli import cache_latents
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.files.pictures import write_png

SMALL = shlex.split("--size 16 --width 16 --channels 4 --steps 4 --batch 4 --frames 2 --every 2 --workers 0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of one colour each, which gets lighter."""
    folder, draw = tmp_path_factory.mktemp("clips"), np.random.default_rng(0)
    for split, count in (("train", 8), ("validation", 2)):
        for number in range(count):
            pixels = np.zeros((4, 16, 16, 3), np.uint8) + draw.integers(0, 200, 3, dtype=np.uint8)
            pixels += 10 * np.arange(4, dtype=np.uint8)[:, None, None, None]
            write_png(folder / split / "one" / f"{number}.png", pixels)
    return folder


def test_an_interrupted_training_goes_on_to_the_same_autoencoder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    given = {name: [*map(str, ["--root", root, "--run-dir", tmp_path / name]), *SMALL] for name in ("whole", "part")}
    monkeypatch.setattr(autoencoder, "open_extractor", lambda name, device: Colours())
    autoencoder.main([*given["whole"], "--features", "colours"])
    assert "step 2 of 4: absolute error 0." in capsys.readouterr().err
    step = autoencoder.AutoencoderTraining.training_step

    def stop(module, batch, index):
        if module.global_step == 3:
            raise KeyboardInterrupt
        return step(module, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(autoencoder.AutoencoderTraining, "training_step", stop)
        with pytest.raises(SystemExit):
            autoencoder.main(given["part"])
    assert not (tmp_path / "part/vae").exists()
    autoencoder.main(given["part"])
    shutil.rmtree(tmp_path / "part/vae")  # as where the scores failed
    autoencoder.main(given["part"])
    weights = [load_file(tmp_path / name / "vae/diffusion_pytorch_model.safetensors") for name in given]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    scores = json.loads((tmp_path / "whole/scores.json").read_text())
    assert scores["frames"] == 4 and 5 < scores["psnr_db"] < 60
    assert scores["scaled_fid"] < 1e-5 < min(scores[f"{name}_fid"] for name in ("reconstruction", "halves"))
    with pytest.raises(SystemExit, match="2"):
        autoencoder.main(given["part"])
    assert "holds a finished autoencoder; choose another --run-dir" in capsys.readouterr().err

    options = ["--dataset", "videos", "--root", root, "--vae", tmp_path / "whole/vae", "--frames", 2, "--stride", 1]
    options += ["--split", "validation", "--image-size", 16, "--workers", 0, "--out", tmp_path / "latents"]
    cache_latents.main([*map(str, options)])
    request = SplitRequest("latents", "train", (4, 2, 4, 4), "generation", root=str(tmp_path / "latents"))
    found = torch.stack([open_source(request).read(index)[0] for index in range(2)]).transpose(0, 1).flatten(1)
    assert found.shape == (4, 64), "channels, and the places of two clips"
    assert found.mean(1).abs().max() < 0.3 and (found.std(1) - 1).abs().max() < 0.3


class Colours:
    """Extractor of the mean colour."""

    mode, device = "RGB", torch.device("cpu")

    def __call__(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"features": pixels.double().mean((2, 3))}


def test_time_ends_the_training(root: Path, tmp_path: Path, capsys) -> None:
    arguments = [*map(str, ["--root", root, "--run-dir", tmp_path / "run"]), *SMALL, "--steps", "100000"]
    autoencoder.main([*arguments, "--minutes", "0.02"])
    weights = load_file(tmp_path / "run/vae/diffusion_pytorch_model.safetensors")
    assert "psnr_db" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run/vae")
    autoencoder.main([*arguments, "--minutes", "0.02"])
    again = load_file(tmp_path / "run/vae/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights), "its time was over"


def test_features_are_opened_before_training(root: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        autoencoder.main(
            [*map(str, ["--root", root, "--run-dir", tmp_path / "run"]), *SMALL, "--features", "lite0:nowhere"]
        )
    assert "nowhere" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_numbers_out_of_range(root: Path, tmp_path: Path, capsys) -> None:
    for option, value, message in (
        ("--size", "18", "--size is 18, it must be a multiple of 4"),
        ("--width", "24", "--width is 24, it must be a multiple of 16"),
        ("--kl", "-1", "--kl must be a finite number above 0"),
        ("--steps", "0", "--steps must be a whole number of at least 1"),
        ("--root", "nowhere", "root 'nowhere' does not exist"),
    ):
        with pytest.raises(SystemExit, match="2"):
            autoencoder.main([*map(str, ["--root", root, "--run-dir", tmp_path / "run", *SMALL, option, value])])
        assert message in capsys.readouterr().err
        assert not (tmp_path / "run/last.ckpt").exists()
