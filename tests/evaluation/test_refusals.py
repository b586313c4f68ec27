"""Wrong input: one line that names it, exit status 2, nothing written."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from .helpers import digit_pixels, refused, run, write_digits


def save_npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_bad_images(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(fake: object, *args: object) -> str:
        out = tmp_path / "out.json"
        common = ("--real", folders[0], "--features", classifier, "--out", out)
        line = refused(capsys, "fid", *common, "--fake", fake, *args)
        assert not out.exists()
        return line

    pixels = digit_pixels(range(6))
    assert "1 images, at least 2" in message(write_digits(tmp_path / "one", [0]))
    (tmp_path / "empty").mkdir()
    assert "0 images, at least 2" in message(tmp_path / "empty")
    assert "arr_0 is float64" in message(save_npz(tmp_path / "float.npz", arr_0=pixels / 255))
    assert "arr_0 is uint8 [8, 8]" in message(save_npz(tmp_path / "flat.npz", arr_0=pixels[0]))
    assert "has no mu and sigma" in message(save_npz(tmp_path / "labels.npz", labels=np.arange(3)))
    assert "1 images" in message(save_npz(tmp_path / "single.npz", arr_0=pixels[:1, ..., None]))
    assert "neither a file, nor a folder, nor a data set" in message(tmp_path / "absent")

    truncated = save_npz(tmp_path / "truncated.npz", arr_0=pixels)
    truncated.write_bytes(truncated.read_bytes()[:300])
    assert "truncated, damaged or no npz file" in message(truncated)

    corrupt = write_digits(tmp_path / "corrupt", range(6))
    file = corrupt / "0003.png"
    file.write_bytes(file.read_bytes()[:-30])
    assert f"{file} cannot be read" in message(corrupt)

    deep = write_digits(tmp_path / "deep", range(6))
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(deep / "0002.png")
    assert f"{deep / '0002.png'} cannot be read (ValueError: it is of mode I;16, images have 8 bits)" in message(deep)

    mixed = write_digits(tmp_path / "mixed", range(6))
    Image.new("L", (9, 8)).save(mixed / "0004.png")
    assert f"{mixed / '0004.png'} is 9x8 pixels, the images before it are 8x8" in message(mixed)

    larger = save_npz(tmp_path / "larger.npz", arr_0=np.zeros((4, 16, 16, 3), np.uint8))
    assert "real images are 8x8 pixels, fake ones 16x16" in message(larger)
    assert "--image-size is 0" in message(larger, "--image-size", 0)
    assert "batch size is 0" in message(larger, "--batch-size", 0)


def test_bad_options(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = ("--real", folders[0], "--fake", folders[1])
    common = (*sides, "--features", classifier)
    assert "subset size is 81" in refused(capsys, "kid", *common, "--subset-size", 81)
    assert "splits is 81" in refused(capsys, "is", *common, "--splits", 81)
    assert "neighbours is 80" in refused(capsys, "prc", *common, "--neighbours", 80)
    assert "must be inception, digits, or the path" in refused(capsys, "fid", *sides, "--features", "resnet")
    assert "no checkpoint at" in refused(capsys, "fid", *sides, "--features", tmp_path)

    def labelled(labels: np.ndarray) -> str:
        path = save_npz(tmp_path / "labelled.npz", arr_0=digit_pixels(range(4)), labels=labels)
        return refused(capsys, "accuracy", "--fake", path, "--features", classifier)

    assert "3 labels for 4 images" in labelled(np.zeros(3, int))
    assert "labels are 0 to 10, the classifier knows 0 to 9" in labelled(np.array([0, 1, 2, 10]))
    assert "labels is float64 [4], it must be integers" in labelled(np.zeros(4))
    unlabelled = save_npz(tmp_path / "unlabelled.npz", arr_0=digit_pixels(range(4)))
    for fake, message in ((unlabelled, "has no labels or arr_1"), (folders[0], "accuracy needs an .npz file")):
        assert message in refused(capsys, "accuracy", "--fake", fake, "--features", classifier)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(classifier.read_bytes()[:1000])
    assert "truncated or no safetensors" in refused(capsys, "fid", *sides, "--features", damaged)


def test_an_existing_result_is_kept(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text("mine")
    arguments = ("--real", folders[0], "--features", classifier, "--out", out)
    assert "already exists" in refused(capsys, "fid", *arguments, "--fake", folders[1])
    assert "must end in .safetensors" in refused(capsys, "stats", *arguments)
    assert out.read_text() == "mine"


def test_statistics_that_do_not_belong(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statistics, other = tmp_path / "statistics.safetensors", tmp_path / "other.safetensors"
    assert run("stats", "--real", folders[0], "--features", classifier, "--out", statistics) == 0
    torch.manual_seed(1)
    header = {"model_name": "deit_mhla_digits", "model_args": "{}"}
    save_file(timm.create_model("deit_mhla_digits").state_dict(), other, metadata=header)

    def message(metric: str, real: Path, features: Path = classifier) -> str:
        return refused(capsys, metric, "--real", real, "--fake", folders[1], "--features", features)

    assert "was made with deit_mhla_digits" in message("fid", statistics, other)
    assert "enough for fid alone" in message("kid", statistics)
    assert "is no statistics file" in message("fid", classifier)
    moments = {name: value.numpy() for name, value in load_file(statistics).items()}
    assert "has no mu and sigma, it has mu" in message("fid", save_npz(tmp_path / "a.npz", mu=moments["mu"]))
    smaller = save_npz(tmp_path / "b.npz", mu=moments["mu"][:63], sigma=moments["sigma"][:63, :63])
    assert "is of 63 features, deit_mhla_digits makes 64" in message("fid", smaller)
    torn = save_npz(tmp_path / "c.npz", mu=moments["mu"][:63], sigma=moments["sigma"])
    assert "do not belong together" in message("fid", torn)
    integer = save_npz(tmp_path / "d.npz", mu=moments["mu"].astype(int), sigma=moments["sigma"])
    assert "mu is int64" in message("fid", integer)
    with_nan = save_npz(tmp_path / "e.npz", mu=moments["mu"] * np.nan, sigma=moments["sigma"])
    assert "not finite" in message("fid", with_nan)
