"""An interrupted run, resumed, ends exactly like an uninterrupted one."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headmix_vision.training.callbacks.checkpointing import LastCheckpoint
from headmix_vision.training.classifier import ImageClassifier
from headmix_vision.training.signals import InterruptRequest

from .helpers import assert_same_run, load, read_csv, run, write_config


def interrupt_in(
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    epoch: int,
    batch: int | None,
    signum: signal.Signals,
    module: type[ImageClassifier] = ImageClassifier,
) -> None:
    """Make the process send itself a signal inside a hook of the module, once."""
    original: Callable[..., Any] = getattr(module, hook)
    fired = []

    def patched(self: ImageClassifier, *args: Any, **kwargs: Any) -> Any:
        here = self.current_epoch == epoch and (batch is None or args[1] == batch) and not self.trainer.sanity_checking
        if here and not fired:
            fired.append(True)
            os.kill(os.getpid(), signum)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(module, hook, patched)


@pytest.mark.parametrize(
    ("hook", "epoch", "batch", "step"),
    [
        pytest.param("training_step", 0, 1, 1, id="middle-of-epoch"),
        pytest.param("training_step", 1, 2, 5, id="middle-of-accumulation"),
        pytest.param("training_step", 0, 5, 3, id="last-batch-of-epoch"),
        pytest.param("validation_step", 0, 0, 3, id="validation"),
        pytest.param("on_validation_epoch_end", 0, None, 3, id="end-of-validation"),
        pytest.param("training_step", 1, 5, 6, id="last-batch-of-run"),
    ],
)
def test_interrupted_run_continues_bit_for_bit(
    hook: str,
    epoch: int,
    batch: int | None,
    step: int,
    reference_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    run_dir = tmp_path / "run"
    with monkeypatch.context() as context:
        interrupt_in(context, hook, epoch, batch, signal.SIGINT)
        assert run("fit", "-c", config, "--run_dir", run_dir) == 130
    assert f"fit --run-dir {run_dir} --ckpt-path last" in capfd.readouterr().err
    assert load(run_dir / "checkpoints" / "last.ckpt")["global_step"] == step
    assert run("fit", "--run-dir", run_dir, "--ckpt-path", "last") == 0
    assert_same_run(run_dir, reference_run)
    rates = [row["train/images_per_s"] for row in read_csv(run_dir / "metrics.csv", without="")]
    assert all(float(rate) > 1 for rate in rates if rate)  # the clock starts where an epoch goes on


VARIANTS: dict[str, dict[str, Any]] = {
    "max-steps": {"trainer__max_epochs": -1, "trainer__max_steps": 5},
    "validation-within-epoch": {"trainer__val_check_interval": 2},
    "validation-every-other-epoch": {"trainer__check_val_every_n_epoch": 2},
    "no-validation": {"trainer__limit_val_batches": 0},
}


@pytest.mark.parametrize(("epoch", "batch"), [(0, 1), pytest.param(0, 5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_ways_to_count_and_validate(
    variant: str, epoch: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path / "tiny.yaml", **VARIANTS[variant])
    assert run("fit", "-c", config, "--run_dir", tmp_path / "whole") == 0
    run_dir = tmp_path / "run"
    with monkeypatch.context() as context:
        interrupt_in(context, "training_step", epoch, batch, signal.SIGTERM)
        assert run("fit", "-c", config, "--run_dir", run_dir) == 143
    assert run("fit", "-c", run_dir / "config.yaml", "--ckpt_path", "last") == 0
    assert_same_run(run_dir, tmp_path / "whole")


@pytest.mark.parametrize("batch", [0, 1])
def test_an_epoch_does_not_go_on_with_batches_of_another_size(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config, run_dir = write_config(tmp_path / "tiny.yaml", trainer__accumulate_grad_batches=1), tmp_path / "run"
    with monkeypatch.context() as context:
        interrupt_in(context, "training_step", 0, batch, signal.SIGTERM)
        assert run("fit", "-c", config, "--run_dir", run_dir) == 143
    assert run("fit", "-c", run_dir / "config.yaml", "--ckpt_path", "last", "--data.batch_size", 4) == 2
    assert "it would lose its place in the data" in capfd.readouterr().err


def test_crash_continues_from_the_last_periodic_checkpoint(
    reference_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path / "tiny.yaml", checkpoint_every_n_steps=2)
    run_dir = tmp_path / "run"
    original = ImageClassifier.training_step

    def crash(self: ImageClassifier, batch: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) == (1, 5):
            raise RuntimeError
        return original(self, batch, batch_idx)

    with monkeypatch.context() as context:
        context.setattr(ImageClassifier, "training_step", crash)
        with pytest.raises(RuntimeError):
            run("fit", "-c", config, "--run_dir", run_dir)
    assert load(run_dir / "checkpoints" / "last.ckpt")["global_step"] == 4
    assert run("fit", "-c", run_dir / "config.yaml", "--ckpt_path", "last") == 0
    assert_same_run(run_dir, reference_run)


def test_the_last_step_of_an_epoch_without_validation_is_saved_when_it_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third step is the last one of an epoch, from which Lightning would not go on."""
    steps, save = [], LastCheckpoint.save
    monkeypatch.setattr(
        LastCheckpoint, "save", lambda self, trainer: [steps.append(trainer.global_step), save(self, trainer)]
    )
    options = {"trainer__limit_val_batches": 0, "trainer__max_epochs": 4, "data__val_split": None}
    config = write_config(tmp_path / "tiny.yaml", checkpoint_every_n_steps=6, **options)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    assert steps == [3, 6, 12]


def test_a_run_without_validation_that_crashed_in_its_second_epoch_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path / "tiny.yaml", data__val_split=None)
    original = ImageClassifier.training_step

    def crash(self: ImageClassifier, batch: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) == (1, 5):
            raise RuntimeError
        return original(self, batch, batch_idx)

    fit = ("fit", "-c", config, "--ckpt_path", "auto", "--run_dir")
    with monkeypatch.context() as context:
        context.setattr(ImageClassifier, "training_step", crash)
        with pytest.raises(RuntimeError):
            run(*fit, tmp_path / "run")
    assert run(*fit, tmp_path / "run") == 0
    assert run(*fit, tmp_path / "whole") == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def saved_epochs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns what becomes a list of the epochs in which `last.ckpt` is written."""
    epochs, save = [], LastCheckpoint.save

    def recorded(self: LastCheckpoint, trainer: Any) -> None:
        epochs.append(trainer.current_epoch)
        save(self, trainer)

    monkeypatch.setattr(LastCheckpoint, "save", recorded)
    return epochs


@pytest.mark.parametrize(
    ("age_s", "options", "saved", "steps"),
    [
        (60, {"trainer__max_epochs": 5}, [0, 1, 1, 3, 3, 4], 15),
        (60, {"trainer__max_epochs": -1, "trainer__max_steps": 11}, [0, 1, 1, 3], 11),
        (0, {"trainer__max_epochs": 3}, [0, 1, 1, 2], 9),
    ],
    ids=["epochs", "steps", "old"],
)
def test_epochs_without_validation_are_saved_when_the_checkpoint_is_old(
    age_s: float, options: dict[str, Any], saved: list[int], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation is in the second epoch; the first and the last one are saved in any case."""
    epochs, init = saved_epochs(monkeypatch), LastCheckpoint.__init__
    monkeypatch.setattr(LastCheckpoint, "__init__", lambda self, *args: init(self, *args, min_interval_s=age_s))
    config = write_config(tmp_path / "tiny.yaml", trainer__check_val_every_n_epoch=2, **options)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    assert epochs == saved
    assert load(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == steps


@pytest.mark.parametrize(
    ("hook", "epoch", "batch", "saved"),
    [("training_step", 0, 5, [0]), ("on_validation_epoch_end", 1, None, [0, 1, 1])],
    ids=["without-validation", "after-validation"],
)
def test_an_interrupt_saves_an_epoch_that_is_not_saved(
    hook: str, epoch: int, batch: int | None, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second epoch has a validation, before and after which it is saved anyway."""
    epochs = saved_epochs(monkeypatch)
    config = write_config(tmp_path / "tiny.yaml", trainer__check_val_every_n_epoch=2)
    interrupt_in(monkeypatch, hook, epoch, batch, signal.SIGTERM)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 143
    assert epochs == saved


def test_moved_run_continues_from_its_best_checkpoint(reference_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "moved"
    shutil.copytree(reference_run, run_dir)
    more = ("--trainer.max_epochs", 3, "--model.optimizer.lr", 1e-12)
    assert run("fit", "-c", run_dir / "config.yaml", "--run_dir", run_dir, "--ckpt_path", "best", *more) == 0
    rows = read_csv(run_dir / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(9))
    best = load(run_dir / "checkpoints" / "best.ckpt")["headmix_vision"]["top1"]
    assert best == pytest.approx(max(float(row["val/top1"]) for row in rows if row["val/top1"]))


def test_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    request = InterruptRequest()
    request.install()
    with pytest.raises(SystemExit) as end:
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == 143
    assert capfd.readouterr().err.strip() == "interrupted by SIGTERM"
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    with pytest.raises(SystemExit):  # the process would have ended before
        os.kill(os.getpid(), signal.SIGINT)
    assert exits == [130]
    exits.clear()
    request.deferred = True
    os.kill(os.getpid(), signal.SIGINT)
    assert (request.signum, exits) == (signal.SIGINT, [])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    os.kill(os.getpid(), signal.SIGINT)  # as torchrun passes it on
    assert exits == []
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    os.kill(os.getpid(), signal.SIGINT)
    assert exits == [130]


def test_other_training_data_need_an_option(
    reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(reference_run, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    more = ("fit", "--run_dir", run_dir, "--ckpt_path", "last", "--trainer.max_epochs", 3, "--data.train_split", "all")
    assert run(*more) == 2
    assert "changed since the checkpoint: number of samples 1437 -> 1797; restore them" in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    assert run("fit", "-c", run_dir / "config.yaml", "--run_dir", tmp_path / "new", "--data_changed") == 2
    assert "--data-changed applies only to a run that goes on" in capfd.readouterr().err
    assert run(*more, "--data-changed") == 0
    assert "note: the training data have changed" in capfd.readouterr().err
    known = load(run_dir / "checkpoints" / "last.ckpt")["ClassificationData"]["training"]
    assert known["number of samples"] == 1797


@pytest.mark.parametrize("stored", ["checkpoint", "config", "nowhere"])
def test_edited_options_are_listed_when_a_run_goes_on(
    stored: str, reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(reference_run, tmp_path / "run")
    path = run_dir / "checkpoints" / "last.ckpt"
    config = write_config(
        tmp_path / "edited.yaml",
        seed_everything=4,
        model__optimizer={"lr": 2e-3, "args": {"betas": [0.9, 0.98]}},
        model__schedule={"warmup_epochs": 0.5, "sched": "wsd"},
        model__loss={"smoothing": 0.2},
        ema__decay=0.8,
        data__num_workers=0,
    )
    if stored != "checkpoint":  # of an earlier version
        checkpoint = load(path)
        del checkpoint["options"], checkpoint["ClassificationData"]["training"], checkpoint["values_sha256"]
        torch.save(checkpoint, path)
    if stored == "nowhere":
        (run_dir / "config.yaml").unlink()
    capfd.readouterr()
    options = ("-c", config, "--run_dir", run_dir, "--trainer.log_every_n_steps", 7, "--dry_run")
    assert run("fit", *options, "--ckpt_path", "last") == 0
    lines = [line.strip() for line in capfd.readouterr().err.splitlines() if " -> " in line]
    assert lines == (stored != "nowhere") * [
        "seed_everything 3 -> 4",
        "model.loss.smoothing 0.1 -> 0.2",
        "model.optimizer.lr 0.001 -> 0.002",
        "model.optimizer.args.betas unset -> [0.9, 0.98]",
        "model.schedule.sched cosine -> wsd",
        "ema.decay 0.9 -> 0.8",
    ]
