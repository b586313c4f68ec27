"""The metrics file: one row per step, appended, and continued where a run continues."""

import os
from pathlib import Path

import pytest

from headmix_vision.errors import InputError
from headmix_vision.training.metrics_csv import MetricsCSV

from .helpers import read_csv


def log(metrics: MetricsCSV, step: int, **values: float) -> None:
    metrics.log_metrics({"epoch": step // 2, **values}, step)
    metrics.save()


def test_rows_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run" / "metrics.csv"
    metrics, whole = MetricsCSV(path), MetricsCSV(tmp_path / "whole.csv")
    rewritten: list[int] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (replace(*paths), rewritten.append(step)))
    for step in range(6):
        log(metrics, step, loss=step / 2)
        if step % 2:
            log(metrics, step, top1=0.25 * step)
            log(metrics, step, loss=7)  # shorter than before
    assert rewritten == [0, 1]  # the new columns
    for row in metrics.rows:
        whole.log_metrics(row, int(row["step"]))
    monkeypatch.undo()
    whole.save()
    assert [{name: float(value) for name, value in row.items() if value} for row in read_csv(path)] == metrics.rows
    assert metrics.rows[3] == {"step": 3, "epoch": 1, "loss": 7, "top1": 0.75}
    assert len(path.read_bytes().splitlines()) == 7


def test_an_earlier_step_and_a_file_that_was_changed_write_everything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    metrics = MetricsCSV(path)
    for step in range(3):
        log(metrics, step, loss=1.0)
    log(metrics, 0, loss=2.0)
    assert [row["loss"] for row in read_csv(path)] == ["2.0", "1.0", "1.0"]
    path.unlink()
    log(metrics, 3, loss=3.0)
    assert [row["loss"] for row in read_csv(path)] == ["2.0", "1.0", "1.0", "3.0"]
    path.write_text("mine\n")
    log(metrics, 4, loss=4.0)
    assert [row["loss"] for row in read_csv(path)] == ["2.0", "1.0", "1.0", "3.0", "4.0"]


def test_continued_file_is_cut_at_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    metrics = MetricsCSV(path)
    for step in range(5):
        log(metrics, step, loss=step)
    with path.open("a") as file:
        file.write("2,5")  # a row cut short
    before = path.read_bytes()
    continued = MetricsCSV(path, resume_step=3)
    continued.finalize("success")
    assert path.read_bytes() == before  # nothing has been logged yet
    log(continued, 3, loss=30)
    assert [row["loss"] for row in read_csv(path)] == ["0", "1", "2", "30"]
    log(continued, 4, loss=40)
    assert [row["loss"] for row in read_csv(path)] == ["0", "1", "2", "30", "40"]
    log(MetricsCSV(path), 0, loss=5)
    assert [row["loss"] for row in read_csv(path)] == ["5"]


@pytest.mark.parametrize("line", ["a,b,c", "1,,2", "1,2,x", "1,2,3,4", "1,2,\udcff"])
def test_damaged_file_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(f"epoch,step,loss\n0,0,1\n{line}\n1,2,3\n".encode(errors="surrogateescape"))
    with pytest.raises(InputError, match="is damaged in line 1" if "\udcff" in line else "is damaged in line 3"):
        MetricsCSV(path, resume_step=9)


@pytest.mark.parametrize(("head", "line"), [("epoch,step,epoch", 1), ("x,step,train/loss", 2)])
def test_a_file_without_usable_epochs_is_refused(head: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"{head}\n0,0,1\n")
    with pytest.raises(InputError, match=f"is damaged in line {line}"):
        MetricsCSV(path, resume_step=9)
