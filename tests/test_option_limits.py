"""Sizes and counts that options ask for: refused in one line before the work begins."""

import math
import os
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from inputs import photo, write_mixed, write_tar

from headmix_lab.emoji import STYLES, read_package
from headmix_vision.cli.cache_latents import main as cache_latents
from headmix_vision.cli.index_shards import main as index_shards
from headmix_vision.data import ClassificationData
from headmix_vision.data.augmentation import Augmentation
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.derived import InMemory
from headmix_vision.data.datasets.folders import open_class_folders
from headmix_vision.data.fitting import center_crop
from headmix_vision.data.stills import StillsConfig
from headmix_vision.errors import InputError
from headmix_vision.evaluation.sample_sets import open_samples
from headmix_vision.evaluation.scores import kid
from headmix_vision.files import reading
from headmix_vision.runs.checkpoints import trainer_of
from headmix_vision.runs.directory import is_run, metric_names
from headmix_vision.train_cls import main as train_cls
from headmix_vision.training.options import (
    EarlyStoppingConfig,
    FidConfig,
    LossConfig,
    MixupConfig,
    OptimizerConfig,
    SampleGridConfig,
    ScheduleConfig,
)
from headmix_vision.training.parser import load_yaml


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has a megabyte left."""
    monkeypatch.setattr(reading, "_SMALL_BYTES", 0)
    monkeypatch.setattr(reading, "memory_left", lambda: 1_000_000)


def refused(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None], *args: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([*map(str, args)])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_workers_beyond_the_cores_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mixed(tmp_path / "images", 2)
    with pytest.raises(InputError, match=r"data\.num_workers is 100000, it must be at most"):
        ClassificationData(num_workers=100_000)
    assert "workers is 100000, it must be at most" in refused(
        capsys, cache_latents, "--images", tmp_path / "images", "--vae", "none", "--image-size", 8,
        "--out", tmp_path / "cache", "--workers", 100_000,
    )  # fmt: skip
    write_tar(tmp_path / "a.tar", [("a.png", b"")])
    assert "workers is 100000" in refused(capsys, index_shards, tmp_path, "--workers", 100_000)
    options = ("fit", "-c", "digits", "--run_dir", tmp_path / "run")
    said = refused(capsys, train_cls, *options, "--trainer.devices", 100_000, "--trainer.accelerator", "cpu")
    assert "trainer.devices is 100000, it must be at most" in said
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_caches_beyond_the_disk_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mixed(tmp_path / "images", 4)
    call = ("--images", tmp_path / "images", "--vae", "none", "--image-size", 8, "--out", tmp_path / "cache")
    monkeypatch.setattr(reading.shutil, "disk_usage", lambda place: reading.shutil._ntuple_diskusage(9, 9, 4 * 192 - 1))
    said = refused(capsys, cache_latents, *call, "--workers", 0)
    assert "a cache of 4 images needs 7.68e-07 GB, the disk of" in said and not (tmp_path / "cache").exists()
    monkeypatch.setattr(reading.shutil, "disk_usage", lambda place: reading.shutil._ntuple_diskusage(9, 9, 4 * 192))
    cache_latents([*map(str, call), "--workers", "0"])
    monkeypatch.setattr(reading.shutil, "disk_usage", lambda place: reading.shutil._ntuple_diskusage(9, 9, 0))
    cache_latents([*map(str, call), "--workers", "0"])  # which is there already


@pytest.mark.usefixtures("little_memory")
def test_samples_and_batches_beyond_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mixed(tmp_path / "images" / "a", 4)
    images = open_samples(str(tmp_path / "images"), "RGB")
    assert len(next(images.batches(3))) == 3
    monkeypatch.setattr(reading, "memory_left", lambda: 4 * 16 * 32 * 32 - 1)
    with pytest.raises(InputError, match="a batch of 4 of 32x32 pixels needs"):
        next(images.batches(10**15))
    with pytest.raises(InputError, match=f"an image of {10**9} pixels needs"):
        open_samples(str(tmp_path / "images"), "RGB", 10**9)
    with pytest.raises(InputError, match=r"a picture of 1000x1 pixels, as 64x64, needs"):
        center_crop(photo(size=(1, 1000)), 64)
    with pytest.raises(InputError, match=r"a sample of canvas with 1x3000x3000 numbers needs"):
        open_source(SplitRequest("canvas", "train", (1, 3000, 3000), "scoring"))
    source = open_class_folders(tmp_path / "images", SplitRequest("folder", "train", (3,), "classification"))
    monkeypatch.setattr(reading, "memory_left", lambda: 2 * 4 * 3 * 32 * 32 - 1)
    with pytest.raises(InputError, match=r"in_memory: 4 pictures of 32x32 pixels needs"):
        InMemory(source)


def test_subsets_without_end_are_refused(tmp_path: Path) -> None:
    images, scorer = open_samples(str(write_mixed(tmp_path / "images", 2)), "RGB"), None  # which is not called
    with pytest.raises(InputError, match="kid subsets must be a whole number from 1 to 100000, got 1000000000"):
        kid(scorer, images, images, subsets=10**9)  # type: ignore[arg-type]


def test_samples_of_training_without_end_are_refused() -> None:
    with pytest.raises(InputError, match=r"fid\.num must be a whole number from 2 to 1000000, got 1000000000"):
        FidConfig(num=10**9)
    with pytest.raises(InputError, match=r"samples\.rows must be a whole number from 1 to 1000, got 1000000000"):
        SampleGridConfig(rows=10**9)


def test_a_package_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("package/package.json")
        member.size = 1 << 20
        with (tmp_path / "zeros").open("wb+") as file:
            file.truncate(member.size)
            archive.addfile(member, file)
    monkeypatch.setattr("headmix_lab.emoji.MAX_PACKAGE_BYTES", 1 << 19)
    with pytest.raises(InputError, match=r"a\.tgz cannot be read \(it unpacks to more than"):
        read_package(tmp_path / "a.tgz", STYLES)


def test_configs_that_grow_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    lines += [f"{n}: &{n} [{', '.join([f'*{b}'] * 9)}]" for b, n in zip("abcdefgh", "bcdefghi", strict=True)]
    config = tmp_path / "run" / "config.yaml"
    config.parent.mkdir()
    config.write_text("\n".join(lines))
    assert "aliases written out: more than 100000 values" in refused(capsys, train_cls, "fit", "-c", config)
    assert "more than 100000 values" in refused(capsys, train_cls, "validate", "--run_dir", config.parent)
    deep = "{a: " + "[" * 5000
    assert "nested too deeply" in refused(capsys, train_cls, "fit", "-c", "digits", "--model.model_args", deep)
    assert load_yaml("{a: &a 1e-3, b: *a}") == {"a": 0.001, "b": 0.001}


@pytest.mark.parametrize("name", ["config.yaml", "metrics.csv", ".lock"])
def test_a_run_folder_of_pipes_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "checkpoints").mkdir()
    calls: list[Callable[[], Any]] = [lambda: is_run(tmp_path), lambda: metric_names(tmp_path)]
    for call in calls:
        if name == "metrics.csv":
            with pytest.raises(InputError, match=r"metrics.csv is a named pipe"):
                call()
        else:
            assert not call()
    assert trainer_of(tmp_path / "checkpoints" / "last.ckpt") is None


def test_a_shard_that_is_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "a.tar")
    assert "a.tar is a named pipe" in refused(capsys, index_shards, tmp_path, "--workers", 0)


@pytest.mark.parametrize(
    ("group", "option", "allowed", "refused"),
    [
        (OptimizerConfig, "lr", (1e-9,), (0.0, math.inf)),
        (OptimizerConfig, "weight_decay", (0.0,), (-1e-9, math.nan)),
        (OptimizerConfig, "layer_decay", (None, 1.0), (0.0, 1.001)),
        (ScheduleConfig, "warmup_epochs", (0.0,), (-1.0,)),
        (ScheduleConfig, "warmup_lr", (0.0,), (-1.0,)),
        (ScheduleConfig, "min_lr", (0.0,), (-1.0, math.nan)),
        (LossConfig, "smoothing", (0.0,), (-0.1, 1.0)),
        (MixupConfig, "mixup_alpha", (0.0, 1e-6, 1e6), (9e-7, -1.0)),
        (MixupConfig, "cutmix_alpha", (0.0, 1e-6, 1e6), (1.1e6,)),
        (MixupConfig, "prob", (0.0, 1.0), (-0.1, 1.1)),
        (MixupConfig, "switch_prob", (0.0, 1.0), (-0.1, 1.1)),
        (SampleGridConfig, "guidance", (0.0,), (-0.1,)),
        (FidConfig, "guidance", (0.0,), (-0.1,)),
        (EarlyStoppingConfig, "min_delta", (0.0,), (-0.1,)),
        (partial(StillsConfig, dataset="digits"), "share", (0.1, 0.999), (-0.1, 1.0)),
        (Augmentation, "hflip", (0.0, 1.0), (-0.1, 1.1)),
        (Augmentation, "reprob", (0.0, 1.0), (1.1,)),
        (Augmentation, "scale", ((0.5, 1.0),), ((0.0, 1.0), (0.5, 1.1), (0.6, 0.5))),
        (Augmentation, "recount", (1,), (0,)),
        (Augmentation, "degrees", (0.0,), (-1.0,)),
    ],
)
def test_numbers_of_options_have_bounds(
    group: Any, option: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    def make(value: Any) -> None:
        made = group(**{option: value})
        if isinstance(made, Augmentation):
            made.check()

    for value in allowed:
        make(value)
    for value in refused:
        with pytest.raises(InputError, match=option):
            make(value)
