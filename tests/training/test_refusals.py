"""Wrong input: one line, exit status 2, nothing done."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from headmix_vision.errors import InputError
from headmix_vision.runs.checkpoints import read_checkpoint

from .helpers import load, run, write_config


def refused(capfd: pytest.CaptureFixture[str], *args: object) -> str:
    capfd.readouterr()
    assert run(*args) == 2
    captured = capfd.readouterr().err
    lines = [line for line in captured.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in captured
    return lines[0]


def test_second_run_in_the_same_directory(
    reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (reference_run / "metrics.csv").read_bytes()
    config = write_config(tmp_path / "tiny.yaml")
    message = refused(capfd, "fit", "-c", config, "--run_dir", reference_run)
    for way_out in ("--ckpt_path last", "--run_dir", "--overwrite true"):
        assert way_out in message
    both = ("--ckpt_path", "last", "--overwrite", "true")
    assert "would delete" in refused(capfd, "fit", "-c", config, "--run_dir", reference_run, *both)
    assert (reference_run / "metrics.csv").read_bytes() == before


def test_overwrite_replaces_the_run_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "tiny.yaml", trainer__max_epochs=1)
    assert run("fit", "-c", config, "--run_dir", run_dir) == 0
    (run_dir / "notes.txt").write_text("mine")
    assert run("fit", "-c", config, "--run_dir", run_dir, "--overwrite", "true", "--seed_everything", 4) == 0
    assert {path.name for path in run_dir.iterdir()} == {
        *("notes.txt", "config.yaml", "metrics.csv", "tensorboard", "checkpoints", "curves.png")
    }
    assert "seed_everything: 4" in (run_dir / "config.yaml").read_text()
    assert "\noverwrite:" not in (run_dir / "config.yaml").read_text()


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_bad_checkpoints(reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = reference_run / "checkpoints" / "last.ckpt"
    trace = tmp_path / "executed"
    files = {name: tmp_path / f"{name}.ckpt" for name in ("truncated", "bomb", "pickle", "foreign", "text")}
    files["truncated"].write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    torch.save({**load(good), "extra": Bomb(trace)}, files["bomb"])
    files["pickle"].write_bytes(pickle.dumps(Bomb(trace)))
    torch.save({"state_dict": {"weight": torch.zeros(1)}}, files["foreign"])
    files["text"].write_text("not a checkpoint")
    expected = {
        "truncated": "truncated",
        "bomb": "objects other than tensors",
        "pickle": "is not a checkpoint",
        "foreign": "not written by this package",
        "text": "is not a checkpoint",
    }
    for name, path in files.items():
        with pytest.raises(ValueError, match=expected[name]):
            read_checkpoint(path)
    config = reference_run / "config.yaml"
    assert "objects other than" in refused(capfd, "validate", "-c", config, "--ckpt_path", files["bomb"])
    assert "truncated" in refused(capfd, "fit", "-c", config, "--ckpt_path", files["truncated"])
    assert not trace.exists()


def test_checkpoint_of_another_model(reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = ("validate", "-c", reference_run / "config.yaml", "--ckpt_path", "last")
    assert "of model vit_tiny_patch16_224, not of" in refused(capfd, *args, "--model.name", "vit_small_patch16_224")
    assert "has 10 classes, the model 12" in refused(capfd, *args, "--model.num_classes", 12)
    assert "another shape" in refused(capfd, *args, "--model.model_args.embed_dim", 48)
    assert "lacks" in refused(capfd, *args, "--model.model_args.depth", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model.name", "vit_tinny_patch16_224"), "did you mean"),
        (("--model.num_classes", "7"), "the model has 7 classes, the data 10: set model.num_classes=10"),
        (("--data.batch_size", "7"), "even data.batch_size"),
        (("--checkpoint_every_n_steps", "0"), "at least 1"),
        (("--ckpt_path", "last"), "no checkpoint at"),
        (("--trainer.precision", "bf16-true"), "float32 weights"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    assert message in refused(capfd, "fit", "-c", config, "--run_dir", tmp_path / "run", *options)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_evaluation_needs_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    assert "--ckpt_path" in refused(capfd, "validate", "-c", config)
    assert "no checkpoint at" in refused(capfd, "predict", "-c", config, "--ckpt_path", "best")


def test_option_groups_check_their_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    assert run("fit", "-c", config, "--model.optimizer.lr", "-1") == 2
    assert "optimizer.lr must be positive" in capfd.readouterr().err


def test_wrong_input_found_by_a_data_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fetch(*args: object) -> None:
        raise InputError("a shard is damaged")

    config = write_config(tmp_path / "tiny.yaml", data__num_workers=1)
    monkeypatch.setattr("torch.utils.data._utils.fetch._MapDatasetFetcher.fetch", fetch)  # workers are forked
    assert refused(capfd, "fit", "-c", config, "--run_dir", tmp_path / "run") == "error: a shard is damaged"


def test_defects_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("not the user's fault")

    config = write_config(tmp_path / "tiny.yaml")
    monkeypatch.setattr("headmix_vision.training.classifier.ImageClassifier.training_step", broken)
    with pytest.raises(ValueError, match="not the user's fault"):
        run("fit", "-c", config, "--run_dir", tmp_path / "run")
