"""A disk that is full, or a folder that is gone, ends a run with one line, and costs nothing that was there."""

import errno
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headmix_vision.runs.directory import metric_names
from headmix_vision.training.checkpoint_io import AtomicCheckpointIO
from headmix_vision.training.classifier import ImageClassifier
from headmix_vision.training.metrics_csv import MetricsCSV

from .helpers import load, run, write_config


@contextmanager
def limit(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_checkpoint(tmp_path: Path) -> None:
    path, saved = tmp_path / "last.ckpt", []
    AtomicCheckpointIO(lambda: saved.append(1)).save_checkpoint({"weights": torch.zeros(9)}, path)
    before = path.read_bytes()
    with limit(30_000), pytest.raises(OSError) as caught:
        AtomicCheckpointIO(lambda: saved.append(2)).save_checkpoint({"weights": torch.zeros(99_999)}, path)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == before and saved == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_other_errors_of_saving_stay(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"hook": lambda: 0}, tmp_path / "last.ckpt")


def test_metrics(tmp_path: Path) -> None:
    metrics = MetricsCSV(tmp_path / "metrics.csv")
    with limit(1000), pytest.raises(OSError) as caught:
        for step in range(500):
            metrics.log_metrics({"epoch": 0, "loss": 0.5}, step)
            metrics.save()
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "metrics.csv"))
    rows = MetricsCSV(tmp_path / "metrics.csv", resume_step=1000).rows
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) > 90


def test_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit = ("fit", "-c", write_config(tmp_path / "tiny.yaml"), "--run_dir", tmp_path / "run", "--ckpt_path", "auto")
    with limit(30_000):
        assert run(*fit) == 2
    captured = capfd.readouterr().err
    assert f"error: File too large: {tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}" in captured
    assert "Traceback" not in captured
    assert "train/loss" in metric_names(tmp_path / "run")
    assert run(*fit) == 0  # its first epoch had no checkpoint: from the start
    assert run(*fit) == 0  # goes on
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint.unlink()
    assert run(*fit) == 2
    assert "it has no last.ckpt" in capfd.readouterr().err


@pytest.mark.parametrize("place", ["beside", "here", "nowhere"])
def test_a_run_directory_that_disappears_ends_the_run_and_keeps_the_weights(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config, run_dir = write_config(tmp_path / "tiny.yaml"), tmp_path / "runs" / "run"
    step = ImageClassifier.training_step

    def removing(self: ImageClassifier, batch: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) == (1, 3):
            shutil.rmtree(run_dir if place == "beside" else run_dir.parent)
            if place == "nowhere":
                monkeypatch.setattr("headmix_vision.training.checkpoint_io._other_places", lambda run: [config])
        return step(self, batch, batch_idx)

    with monkeypatch.context() as context:
        context.setattr(ImageClassifier, "training_step", removing)
        context.setattr("headmix_vision.training.callbacks.checkpointing._LOOK_EVERY_S", 0)
        assert run("fit", "-c", config, "--run_dir", run_dir) == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"the run directory {run_dir} has disappeared; the weights of step 5 are " in errors[0]
    assert not run_dir.exists()
    if place == "nowhere":
        assert errors[0].endswith(f"of step 5 are lost: Not a directory: {config}")
        return
    kept = (run_dir.parent if place == "beside" else tmp_path / "here") / "run-step-5.ckpt"
    assert errors[0].endswith(f"--ckpt-path {kept if place == 'beside' else kept.name}")
    assert run("fit", "-c", config, "--run_dir", tmp_path / "new", "--ckpt_path", kept) == 0
    assert load(tmp_path / "new" / "checkpoints" / "last.ckpt")["global_step"] == 6


def test_a_run_directory_that_cannot_be_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    write = Path.open

    def refuse(path: Path, mode: str = "r", **kwargs: Any) -> Any:
        if "metrics" in path.name and "w" in mode:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return write(path, mode, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)  # tests may run as a user whom no mode stops
    monkeypatch.setattr("headmix_vision.training.callbacks.checkpointing._LOOK_EVERY_S", 0)
    assert run("fit", "-c", write_config(tmp_path / "tiny.yaml"), "--run_dir", run_dir) == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: Read-only file system: {run_dir}")
    assert load(tmp_path / "run-step-1.ckpt")["global_step"] == 1
