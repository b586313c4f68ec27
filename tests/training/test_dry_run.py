"""`--dry-run`: everything is opened, one batch goes through, and nothing is written."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from headmix_vision.training.callbacks.dry_run import DryRun

from .gen_helpers import run as run_gen
from .gen_helpers import write_config as write_gen_config
from .helpers import run, write_config


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_dry_run_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    end, places = DryRun._end, []

    def noting(self: DryRun, trainer: Trainer, *rest: Any) -> None:
        places.append(trainer.callbacks.index(self))  # type: ignore[attr-defined]
        end(self, trainer, *rest)

    monkeypatch.setattr(DryRun, "_end", noting)
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "tiny.yaml")
    assert run("fit", "-c", "tiny.yaml", "--dry-run") == 0
    assert places == [0], "it ends before other callbacks act"
    out = capfd.readouterr().out
    assert [path.name for path in tmp_path.rglob("*")] == ["tiny.yaml"]
    for line in (
        "dry run, nothing was written",
        "data, training: 1437 samples, 6 batches",
        "data, validation: 360 samples, 2 batches",
        "training: 2 epochs, 6 steps, 6 to do",
        "run directory runs/tiny, new",
        "first batch: [8, 1, 8, 8] and [8], loss ",
    ):
        assert line in out
    assert run("fit", "-c", "tiny.yaml", "--dry-run", "--data.root", "x", "--data.dataset", "folder") == 2


def test_dry_run_of_resuming_and_evaluation(
    reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(reference_run)
    more = ("--trainer.max_epochs", 3, "--dry-run")
    assert run("fit", "--run_dir", reference_run, "--ckpt_path", "last", *more) == 0
    out = capfd.readouterr().out
    assert "3 epochs, 9 steps, 3 to do" in out and f"{reference_run / 'checkpoints/last.ckpt'} at step 6" in out
    assert run("fit", "--run_dir", reference_run, "--ckpt_path", "last", "--dry-run") == 0
    assert "2 epochs, 6 steps, 0 to do" in capfd.readouterr().out
    assert run("fit", "-c", reference_run / "config.yaml", "--overwrite", "true", "--dry-run") == 0
    assert "whose run would be replaced" in capfd.readouterr().out
    assert run("fit", "-c", reference_run / "config.yaml", "--dry-run") == 2
    assert "already holds a run" in capfd.readouterr().err
    for command in ("validate", "test"):
        assert run(command, "--run_dir", reference_run, "--dry-run") == 0
        out = capfd.readouterr().out
        assert "first batch: [16, 1, 8, 8] and [16]" in out and "checkpoints/best.ckpt" in out
    assert contents(reference_run) == before


def test_dry_run_of_a_generator(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_gen_config(tmp_path / "tiny.yaml", samples__every_n_steps=1)
    assert run_gen("fit", "-c", config, "--run_dir", tmp_path / "run", "--dry-run") == 0
    assert "first batch: " in capfd.readouterr().out
    assert not (tmp_path / "run").exists()
