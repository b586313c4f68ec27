"""`predict` writes one row per image."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headmix_vision.training.parser import with_config_of_run

from . import gen_helpers
from .helpers import read_csv, run


def write_images(folder: Path, count: int) -> None:
    """Random 8 x 8 grey images, one of them in a sub-folder."""
    (folder / "more").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8), dtype=np.uint8)
    for i in range(count):
        parent = folder / "more" if i == 0 else folder
        Image.fromarray(pixels[i]).save(parent / f"{i}.png")


def test_folder_and_single_image(reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "images", 5)
    args = ("predict", "-c", reference_run / "config.yaml", "--ckpt_path", "last", "--data.predict_path")
    assert run(*args, tmp_path / "images") == 0
    out = reference_run / "predictions.csv"
    printed = capfd.readouterr().out
    assert f"wrote 5 predictions to {out}" in printed
    rows = read_csv(out)
    assert list(rows[0])[:5] == ["file", "label", "probability", "label2", "probability2"]
    assert [Path(row["file"]).name for row in rows] == ["1.png", "2.png", "3.png", "4.png", "0.png"]
    for row in rows:
        best = [float(row[f"probability{k}"]) for k in ("", 2, 3, 4, 5)]
        assert best == sorted(best, reverse=True)
        assert 0 < sum(best) <= 1.000005
        assert row["label"] in {str(i) for i in range(10)}

    assert run(*args, tmp_path / "images" / "1.png") == 0
    assert read_csv(out) == rows[:1]
    (first, last) = (line for line in capfd.readouterr().out.splitlines() if "1.png: " in line or "wrote" in line)
    assert (
        first.endswith(f"1.png: {rows[0]['label']} ({100 * float(rows[0]['probability']):.1f} %)") and first in printed
    )
    assert last == f"wrote 1 prediction to {out}"
    out.unlink()


def test_missing_path(reference_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = ("predict", "-c", reference_run / "config.yaml", "--ckpt_path", "last")
    assert run(*args, "--data.predict_path", "nowhere") == 2
    assert "error: " in capfd.readouterr().err


def test_an_evaluated_run_of_an_earlier_version_leaves_out_what_it_left_out(tmp_path: Path) -> None:
    for text, more in (
        ("data: {dataset: table/subgroup}", ["--data.skip_unlabelled", "true"]),
        ("data: {dataset: table/subgroup, skip_unlabelled: false}", []),
        ("data: {dataset: folder}", []),
        ("data: [", []),
    ):
        (tmp_path / "config.yaml").write_text(text)
        config = ["--config", str(tmp_path / "config.yaml")]
        args = ["--run_dir", str(tmp_path)]
        assert with_config_of_run(["test", *args]) == ["test", *config, *more, *args]


def test_a_run_of_the_other_command_is_refused_by_name(
    reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("model: {name: dit_mhla_digits, objective: {kind: flow}}")
    assert run("predict", "--run-dir", tmp_path, "--data.predict_path", "a.png") == 2
    assert f"error: {tmp_path} is a run of headmix train-gen" in capfd.readouterr().err
    assert gen_helpers.run("validate", "--run-dir", reference_run) == 2
    assert f"error: {reference_run} is a run of headmix train-cls" in capfd.readouterr().err
