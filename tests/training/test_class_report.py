"""Accuracy of each class and the confusion matrix after a validation or test."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from headmix_vision.training.callbacks.classifier_results import class_rows, format_rows, write_report

from .helpers import read_csv, run


def test_rows_of_a_matrix() -> None:
    matrix = np.array([[5, 0, 1], [2, 1, 4], [0, 0, 0]])
    rows = class_rows(matrix, ["cat", "dog", "eel"])
    assert [tuple(row) for row in rows] == [
        ("cat", 6, 5, "eel", 1),
        ("dog", 7, 1, "eel", 4),
        ("eel", 0, 0, None, 0),
    ]
    assert format_rows(rows).splitlines() == [
        "class  images    top-1  most often taken for",
        "cat         6  83.33 %  eel (1)",
        "dog         7  14.29 %  eel (4)",
    ]


def test_only_the_worst_of_many_classes_are_printed() -> None:
    matrix = np.diag(np.arange(1, 31))
    matrix[20, 3] = 40
    _, first, *_, last = format_rows(class_rows(matrix, [f"class {i}" for i in range(30)])).splitlines()
    assert first.split() == ["class", "20", "61", "34.43", "%", "class", "3", "(40)"]
    assert last == "(the 12 least accurate of 30 classes)"


def test_the_picture_shows_shares_of_the_true_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: figures.append(self) or save(self, *args, **kwargs)
    )
    write_report(tmp_path, "val", np.array([[3, 0, 1], [2, 1, 2], [0, 0, 0]]), ["cat", "dog", "eel"])
    axes, bar = figures[0].axes
    shown = axes.images[0]
    assert shown.get_array().tolist() == [[0.75, 0, 0.25], [0.4, 0.2, 0.4], [0, 0, 0]]
    assert (shown.get_clim(), bar.get_ylabel()) == ((0, 1), "share of the true class")
    for axis, label in ((axes.xaxis, "predicted class"), (axes.yaxis, "true class")):
        assert axis.get_label_text() == label
        assert [tick.get_text() for tick in axis.get_ticklabels()] == ["cat", "dog", "eel"]


@pytest.mark.parametrize(("command", "split"), [("validate", "val"), ("test", "test")])
def test_files_of_an_evaluation(
    command: str, split: str, reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(reference_run, run_dir)
    assert run(command, "--run_dir", run_dir) == 0
    out = capfd.readouterr().out
    matrix = np.loadtxt(run_dir / f"confusion_{split}.csv", delimiter=",", skiprows=1, dtype=int)[:, 1:]
    classes = read_csv(run_dir / f"classes_{split}.csv")
    assert matrix.sum() == {"validate": 32, "test": 360}[command]  # two batches of 16; all
    assert [(int(row["images"]), int(row["correct"])) for row in classes] == [
        (matrix[i].sum(), matrix[i, i]) for i in range(10)
    ]
    top1, balanced = (
        float(next(line for line in out.splitlines() if f"{split}/{name}" in line).replace("│", " ").split()[-1])
        for name in ("top1", "balanced")
    )
    assert matrix.trace() / matrix.sum() == pytest.approx(top1)
    assert np.mean([float(row["accuracy"]) for row in classes]) == pytest.approx(balanced, abs=1e-6)
    with Image.open(run_dir / f"confusion_{split}.png") as picture:
        assert (picture.format, round(picture.info["dpi"][0])) == ("PNG", 120)
    assert f"checkpoint {run_dir / 'checkpoints' / 'best.ckpt'} (EMA of step " in out
    assert "most often taken for" in out
