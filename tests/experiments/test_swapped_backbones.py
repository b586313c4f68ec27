"""The swapped backbone: options of runs, the table, and a small run to its end; Fashion-MNIST in place of emoji."""

import csv
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from inputs import write_fashion_mnist

from experiments.emoji import run as drawing
from experiments.swap import run as comparison
from experiments.swap.report import STAGES, open_table, task_table
from headmix_vision import save_pretrained
from headmix_vision.cli import distill, train_gen
from headmix_vision.training.base_cli import RunCLI


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "init_values": 1.0}
    folder = tmp_path_factory.mktemp("teacher")
    save_pretrained(timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes), folder)
    return folder


def given(teacher: Path, out: Path, *more: object) -> list[str]:
    small = ("--task", "digits", "--sizes", 16, "--attention-steps", 4, "--feature-steps", 2, "--batch", 8)
    fast = "--options=--trainer.precision 32-true --data.num_workers 0 --trainer.val_check_interval 2"
    return [*map(str, ["--teacher", teacher, "--out", out, "--every", 8, *small, fast, *more])]


def test_students_differ_in_their_attention_alone(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = list[Any]()
    runs = comparison.Runs(comparison.parse_arguments(given(teacher, tmp_path / "x.csv")), 0)
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    configs = []
    for row in comparison.ROWS:
        options = runs.options(comparison.Case(row, 16, STAGES[1]))
        places = ["--model.teacher", f"local-dir:{teacher}", "--data.root", "null", "--run_dir", tmp_path / "run"]
        distill.main(["classifier", "fit", *map(str, [*options, *places])])
        config = seen.pop().config["fit"].as_dict()
        assert config["model"]["attention"]["steps"] == 4 and config["model"]["features"]["steps"] == 0
        config["model"].pop("core"), config["model"].pop("softmax_every")
        configs.append({name: part for name, part in config.items() if name != "run_dir"})
    assert all(config == configs[0] for config in configs)
    recipes = {runs.recipe(case) for case in runs.cases()}
    assert len(recipes) == len(runs.cases()) == 1 + 3 * len(comparison.ROWS)


def test_table_shows_the_teacher_first(tmp_path: Path):
    table = open_table(tmp_path / "x.csv")
    for row, stage, cosine in (("mhla", "features", 0.9), ("mhla", "swapped", 0.5), ("teacher", "", 1.0)):
        table.add((row, 224, stage), knn_class_token=75.0, cosine_patches=f"{cosine:.4f}", recipe="x")
    shown = [line.split(" | ")[1:3] for line in task_table(table.rows.values()).splitlines()[2:]]
    written = [row["stage"] for row in csv.DictReader((tmp_path / "x.csv").read_text().splitlines())]
    assert written == ["", "swapped", "features"] and ["teacher", "–"] in shown


def test_fashion_mnist_is_drawn_in_place_of_emoji(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = list[Any]()
    write_fashion_mnist(tmp_path, 24, 12)
    options = ["--task", "fashion_mnist", "--root", tmp_path, "--features", tmp_path, "--judge", tmp_path]
    sizes = ["--size", 28, "--patch", 7, "--dim", 16, "--depth", 1, "--heads", 2, "--batch", 8]
    arguments = drawing.parse_arguments([*map(str, [*options, *sizes, "--out", tmp_path / "x.csv"])])
    runs = drawing.Runs(arguments, 0)
    assert len(runs.class_names) == 10 and runs.labels["test"] == [number % 10 for number in range(12)]
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    options = ["-c", runs.task.recipe, "--run_dir", tmp_path / "run", "--data.root", runs.root]
    train_gen.main(["fit", *map(str, [*options, *runs.options("mhla", 0)])], None)
    net = seen.pop().model.net
    assert (net.in_channels, *net.input_size) == (1, 28, 28)
    assert sum(parameter.numel() for parameter in net.parameters()) == runs.parameters("mhla")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_students_are_trained_and_scored(teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "x.csv"
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "README.md").touch()  # beside other files
    places = ("--runs", tmp_path / "runs", "--pictures", tmp_path / "maps", "--rows", "hybrid")
    comparison.main(given(teacher, out, *places))
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["stage"] for row in rows] == ["", *STAGES]
    assert [row["steps"] for row in rows] == ["", "", "4", "6"]
    assert float(rows[0]["cosine_patches"]) == 1
    assert (tmp_path / "maps" / "maps.png").exists()
    assert "| 16 | hybrid | features | 6 |" in capsys.readouterr().out
    before = out.stat().st_mtime_ns
    comparison.main(given(teacher, out, *places))
    assert out.stat().st_mtime_ns == before
