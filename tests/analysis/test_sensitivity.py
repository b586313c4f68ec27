"""`headmix analyze sensitivity`: the errors of one swapped layer at a time."""

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import headmix_vision
from headmix_vision.analysis import SensitivityRequest
from headmix_vision.analysis import analyze as run
from headmix_vision.analysis.sensitivity import layers_to_swap, measure_sensitivity
from headmix_vision.cli.analyze import main as analyze
from headmix_vision.errors import InputError
from headmix_vision.models.attention_errors import feature_errors

SIZES: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 3, "num_heads": 2, "in_chans": 1}


def make_teacher(**arguments: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", **SIZES, num_classes=10, **arguments)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.zeros_(network.blocks[1].attn.proj.weight)  # its attention changes nothing
    return network.eval()


@pytest.fixture
def teacher() -> torch.nn.Module:
    return make_teacher()


@pytest.mark.parametrize("height", [8, 12])
@torch.no_grad()
def test_the_table_has_the_errors_of_each_layer_alone(height: int) -> None:
    teacher = make_teacher(dynamic_img_size=height != 8)
    student, images = copy.deepcopy(teacher), torch.randn(5, 1, height, 8)
    headmix_vision.swap_attention(student, "linear")
    rows = measure_sensitivity(teacher, student, images, batch_size=2)
    assert [row["layer"] for row in rows] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn", "all"]
    wanted = teacher.forward_features(images)
    for number, row in enumerate(rows):
        one = copy.deepcopy(teacher)
        headmix_vision.swap_attention(one, "linear", [number] if number < 3 else None)
        expected = feature_errors(one.forward_features(images), wanted)[0].mean()
        assert row["feature_error"] == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
    assert rows[1]["feature_error"] < 1e-6 < min(rows[0]["feature_error"], rows[2]["feature_error"])
    assert rows[1]["attention_error"] == pytest.approx(0, abs=1e-9)
    assert rows[3]["attention_error"] == pytest.approx(sum(row["attention_error"] for row in rows[:3]) / 3)
    assert {row["order"] for row in rows[:3]} == {1, 2, 3} and rows[1]["order"] == 3
    first = max(rows[:3], key=lambda row: row["feature_error"])["layer"]
    assert layers_to_swap(rows, 1) == [row["layer"] for row in rows[:3] if row["layer"] != first]
    with pytest.raises(InputError, match="keep must be a whole number from 0 to 2, got 3"):
        layers_to_swap(rows, 3)
    assert not any("core" in dict(layer.named_modules()) for layer in teacher.blocks)


def test_the_command_writes_a_table_and_names_the_layers(
    teacher: torch.nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headmix_vision.save_pretrained(teacher, tmp_path / "teacher")
    common = ["sensitivity", "--teacher", f"local-dir:{tmp_path / 'teacher'}", "--data", "digits", "--device", "cpu"]
    common += ["--images", "4", "--out", str(tmp_path / "out")]
    analyze([*common, "--core", "linear", "--keep", "1", "--dry-run"])
    assert "would write sensitivity.csv of 3 layers" in capsys.readouterr().out and not (tmp_path / "out").exists()
    analyze([*common, "--core", "linear", "--keep", "1"])
    printed = capsys.readouterr().out
    with (tmp_path / "out" / "sensitivity.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    layers = json.loads((tmp_path / "out" / "sensitivity.json").read_text())["layers"]
    assert len(rows) == 4 and layers == [row["layer"] for row in rows if row["order"] in "23"]
    assert f"--model.layers '{json.dumps(layers)}'" in printed and "one untrained linear at a time" in printed
    swapped = headmix_vision.from_pretrained(tmp_path / "teacher")
    assert headmix_vision.swap_attention(swapped, "linear", layers).layers == layers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--teacher", "none"], "teacher none is neither"),
        (["--teacher", "deit_softmax_digits", "--keep", "4"], "keep must be a whole number from 0 to 3, got 4"),
        (["--teacher", "deit_softmax_digits", "--core", "softmax"], "the same kind of attention in all layers"),
        (["--teacher", "deit_softmax_digits", "--student", "deit_mhla_digits", "--core", "linear"], "core applies to"),
        (["--teacher", "deit_softmax_digits", "--student", "none"], "none is neither a run directory"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        analyze(["sensitivity", *words, "--data", "digits", "--device", "cpu", "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()


def test_a_student_of_other_sizes_is_refused(teacher: torch.nn.Module, tmp_path: Path) -> None:
    headmix_vision.save_pretrained(teacher, tmp_path / "teacher")
    request = SensitivityRequest(
        teacher=f"local-dir:{tmp_path / 'teacher'}", student="deit_mhla_digits", data="digits", out=tmp_path / "out"
    )
    with pytest.raises(InputError, match="does not fit teacher"):
        run(request)
