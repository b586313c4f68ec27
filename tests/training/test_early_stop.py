"""A run ends when validation stops to improve, however often it is interrupted."""

import signal
from pathlib import Path

import pytest

from headmix_vision.training.callbacks.checkpointing import LastCheckpoint

from .helpers import assert_same_run, read_csv, run, write_config
from .test_resume import interrupt_in

# the averaged weights move too little for a loss that is lower by a half
STOPPING = {"monitor": "val/loss", "patience": 2, "min_delta": 0.5}


def test_a_run_ends_without_a_better_validation_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "tiny.yaml", early_stopping=STOPPING, trainer__max_epochs=9)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "whole") == 0
    assert "stopped: no better val/loss than" in capsys.readouterr().out
    rows = [row for row in read_csv(tmp_path / "whole" / "metrics.csv") if row["val/loss"]]
    assert len(rows) == 3  # the first is the best, two are not better

    run_dir = tmp_path / "run"
    with monkeypatch.context() as context:
        interrupt_in(context, "training_step", 1, 2, signal.SIGTERM)
        assert run("fit", "-c", config, "--run_dir", run_dir) == 143
    with monkeypatch.context() as context:
        interrupt_in(context, "validation_step", 2, 0, signal.SIGTERM)
        assert run("fit", "--run_dir", run_dir, "--ckpt_path", "last") == 143
    with monkeypatch.context() as context:  # when the run has been stopped and not ended
        original = LastCheckpoint.on_train_epoch_end

        def interrupt(self, trainer, module):
            original(self, trainer, module)
            raise KeyboardInterrupt

        context.setattr(LastCheckpoint, "on_train_epoch_end", interrupt)
        assert run("fit", "--run_dir", run_dir, "--ckpt_path", "last") != 0
    assert run("fit", "--run_dir", run_dir, "--ckpt_path", "last") == 0
    assert_same_run(run_dir, tmp_path / "whole")
    more = ("--early_stopping.patience", 3)
    assert run("fit", "--run_dir", run_dir, "--ckpt_path", "last", *more) == 0
    assert len([row for row in read_csv(run_dir / "metrics.csv") if row["val/loss"]]) == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"early_stopping": {"patience": 0}}, "early_stopping.patience must be a whole number of at least 1, got 0"),
        (
            {"early_stopping": {"patience": 1, "monitor": "val/top2"}},
            "early_stopping.monitor must be one of val/loss, val/balanced, val/top1, val/top5, got val/top2",
        ),
        (
            {"early_stopping": {"patience": 1}, "trainer__limit_val_batches": 0},
            "early_stopping.patience needs validation: set data.val_split",
        ),
    ],
)
def test_rules_without_what_they_need_are_refused(
    overrides: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "tiny.yaml", **overrides)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
