"""A disk that is full ends a run with one line that names the file, and costs nothing that was there."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headmix_vision.runs.directory import metric_names
from headmix_vision.training.checkpoint_io import AtomicCheckpointIO
from headmix_vision.training.metrics_csv import MetricsCSV

from .helpers import run, write_config


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
