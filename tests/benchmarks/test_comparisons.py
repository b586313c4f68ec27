"""`compare_canvas.py` and `compare_digits.py`: recipes, tables, small runs on a CPU."""

import csv
import sys
from pathlib import Path

import pytest

from headmix_vision.layers import CORES
from headmix_vision.training.base_cli import RunCLI
from headmix_vision.training.classification_cli import main as train_classifier
from headmix_vision.training.generation_cli import main as train_generator


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_canvas_comparison_trains_draws_scores_and_goes_on(load, tmp_path: Path, capsys):
    comparison, out = load("compare_canvas"), tmp_path / "canvas.csv"
    arguments = ["--out", str(out), "--runs", str(tmp_path / "runs"), "--models", "mhla+CPE+gate", "--seeds", "3"]
    arguments += ["--dim", "16", "--depth", "1", "--heads", "2", "--steps-cls", "2", "--steps-gen", "2", "--jobs", "2"]
    arguments += ["--samples", "18", "--sampling-steps", "2", "--cls-options=--trainer.limit_val_batches 1"]
    comparison.main(arguments)
    written, printed = out.read_text(), capsys.readouterr().out
    classifier, generator, *floors = csv.DictReader(written.splitlines())
    assert (classifier["task"], generator["task"]) == ("classification", "generation")
    assert {row["task"] for row in floors} == {"floor"} and len(floors) == 2
    assert 0 <= float(classifier["last_top1_percent"]) <= float(classifier["best_top1_percent"]) <= 100
    assert all(0 < float(floor["fid"]) < float(generator["fid"]) for floor in floors)
    assert len({row["features"] for row in (generator, *floors)}) == 1
    assert generator["features"].startswith("mhla+CPE+gate seed 3 ")
    assert f"| {float(generator['fid']):.3f} |" in printed and "| mhla+CPE+gate |" in printed

    comparison.main(arguments)
    assert out.read_text() == written and "generation" not in capsys.readouterr().out
    out.write_text("\n".join(line for line in written.splitlines() if not line.startswith("generation")))
    comparison.main(arguments)
    assert out.read_text() == written, "samples that are there are scored again, alike"


def test_canvas_comparison_changes_nothing_but_the_attention(load, tmp_path: Path, monkeypatch):
    comparison, seen = load("compare_canvas"), []
    arguments = comparison.parse_arguments(["--out", str(tmp_path / "x.csv"), "--models", *comparison.MODELS])
    runs = comparison.Runs(arguments)
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    for task, main in (("classification", train_classifier), ("generation", train_generator)):
        recipes = []
        for model, (core, extras) in comparison.MODELS.items():
            options = runs.options(comparison.Case(task, model, 1))
            main(["fit", "-c", "canvas", "--run_dir", str(tmp_path / "run"), *map(str, options)])
            cli = seen.pop()
            attention = cli.model.net.blocks[0].attn
            assert isinstance(attention.core, CORES[core])
            assert [attention.cpe is not None, attention.gate is not None] == [bool(extras)] * 2
            settings = cli.config["fit"].as_dict()
            for name in ("cpe", "output_gate"):
                settings["model"]["model_args"].pop(name)
            settings["model"].pop("name")
            recipes.append(settings)
        assert all(recipe == recipes[0] for recipe in recipes)
        assert recipes[0]["model"]["model_args"]["depth"] == 6
        assert recipes[0]["trainer"]["max_steps"] == runs.steps(task)


def test_a_run_that_fails_leaves_the_rows_of_the_others(load, tmp_path: Path, monkeypatch, capsys):
    comparison, out = load("compare_canvas"), tmp_path / "canvas.csv"

    def fail_for_one_seed(runs, case):
        if case.seed == 1:
            raise comparison.RunFailed("no memory")
        runs.directory(case).mkdir(parents=True, exist_ok=True)
        (runs.directory(case) / "metrics.csv").write_text("step,val/top1\n1,\n2,0.5\n3,0.25\n")

    monkeypatch.setattr(comparison.Runs, "classify", fail_for_one_seed)
    monkeypatch.setattr(comparison.Runs, "generate", lambda runs, case: fail_for_one_seed(runs, case._replace(seed=1)))
    monkeypatch.setattr(comparison.Runs, "parameters", lambda runs, case: 7)
    monkeypatch.setattr(comparison, "open_judge", lambda runs, table: None)
    arguments = ["--out", str(out), "--runs", str(tmp_path), "--models", "linear", "--seeds", "0", "1"]
    with pytest.raises(SystemExit) as stop:
        comparison.main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == 1 and "error: no memory" in captured.err and "| 25.00 | 50.00 |" in captured.out
    (row,) = csv.DictReader(out.read_text().splitlines())
    assert (row["seed"], row["last_top1_percent"], row["best_top1_percent"]) == ("0", "25.00", "50.00")

    monkeypatch.setattr(comparison.Runs, "classify", lambda runs, case: fail_for_one_seed(runs, case._replace(seed=1)))
    with pytest.raises(SystemExit):
        comparison.main([*arguments, "--steps-cls", "7"])
    assert "25.00" not in capsys.readouterr().out, "a row of another recipe"


def test_digits_of_one_core_join_those_of_an_earlier_call(load, monkeypatch, tmp_path, capsys):
    digits = load("compare_digits")
    path = tmp_path / "digits.csv"
    calls = []

    def train(core, cpe, seed, *_):
        calls.append((core, cpe, seed))
        return 90 + seed, 95 + seed + len(core) / 10

    monkeypatch.setattr(digits, "train_setting", train)

    def run(*arguments):
        calls.clear()
        monkeypatch.setattr(sys, "argv", ["compare_digits.py", "--out", str(path), *arguments])
        digits.main()
        return capsys.readouterr().out.splitlines()

    assert len(run("--cores", "mhla", "linear", "--seeds", "0", "2")) == 2 + 4 and len(calls) == 8
    table = run("--cores", "hih", "--seeds", "0", "1")
    assert set(calls) == {("hih", cpe, seed) for cpe in (True, False) for seed in (0, 1)}
    cores = ["linear", "mhla", "hih"]
    assert [line.split(" ")[1] for line in table[2:]] == 2 * cores
    assert table[2] == "| linear | on | 91.00 ± 1.41 | 96.60 ± 1.41 |"
    with path.open() as file:
        assert [row["core"] for row in csv.DictReader(file)] == [core for core in 2 * cores for _ in range(2)]

    path.write_text("something,else\n1,2\n")
    with pytest.raises(SystemExit, match="was not written by this script"):
        run("--cores", "hih")
    assert not calls and path.read_text() == "something,else\n1,2\n"


def test_validations_divide_the_steps(load):
    assert load("canvas_runs").validation_interval(2500, 5) == 500
    assert load("canvas_runs").validation_interval(7, 5) == 7
