"""Models of clips: recipes, recorded rows, flat losses, marks, stopping in time, a small run on a CPU."""

import csv
import json
import shlex
from pathlib import Path

import pytest

from experiments.moving_digits import report
from experiments.moving_digits import run as comparison
from experiments.moving_digits import runs as runs_module
from headmix_lab import script_runs
from headmix_lab.scripts import RunFailed, TimeOver
from headmix_vision.cli import train_gen
from headmix_vision.layers import CORES
from headmix_vision.training.base_cli import RunCLI

SMALL = shlex.split(
    "--size 16 --frames 8 --patch 2 4 4 --blocks 2 2 2 --dim 16 --depth 3 --heads 2 --batch 8 --interval 10"
    " --samples 40 --long 16 --long-samples 40 --sampling-steps 1 --seeds 1"
    " '--options=--data.eval_batch_size 16 --data.num_workers 0'"
)


def test_a_loss_is_flat_when_it_falls_by_less_than_two_percent_in_the_last_tenth():
    is_flat = script_runs.is_flat
    assert not is_flat({10: 1.0}), "nothing to compare with"
    assert not is_flat({80: 1.0, 90: 1.0, 95: 0.5, 100: 0.97})
    assert is_flat({80: 2.0, 90: 1.0, 95: 0.5, 100: 0.985}) and is_flat({90: 1.0, 100: 1.5})
    assert not is_flat({89: 2.0, 91: 1.0, 100: 1.0}), "91 is less than a tenth before"


def test_runs_whose_loss_had_been_lower_are_marked(monkeypatch):
    for last, end, mark in ((1.0, "yes", ""), (0.9, "no", " (not flat)"), (1.05, "rising", " (rising)")):
        monkeypatch.setattr(script_runs, "read_curve", lambda run, name, last=last: {49: 2.0, 79: 1.0, 99: last})
        assert script_runs.flat(Path()) == end and script_runs.mark([{"flat": "yes"}, {"flat": end}]) == mark


def test_models_differ_in_their_attention_alone(tmp_path: Path, monkeypatch):
    seen = []
    runs = comparison.Runs(comparison.parse_arguments(["--out", str(tmp_path / "x.csv")]), 0)
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    layers = {"softmax": ["softmax"] * 6, "hih": ["hih"] * 6, "hybrid": ["softmax", "mhla", "mhla"] * 2}
    recipes = []
    for row, cores in {**layers, "mhla-cpe-factorised": ["mhla"] * 6}.items():
        arguments = ["-c", runs_module.CONFIG, "--run_dir", tmp_path / "run", *runs.options(row, 1)]
        train_gen.main(["fit", *map(str, arguments), "--trainer.max_steps", "7"], None)
        cli = seen.pop()
        assert [type(block.attn.core) for block in cli.model.net.blocks] == [CORES[core] for core in cores]
        assert cli.model.net.base_grid == (8, 8, 8) and cli.model.objective_config.clean_prefix == 0.1
        settings = cli.config["fit"].as_dict()
        for name in runs_module.HYBRID | {"cpe": False}:
            settings["model"]["model_args"].pop(name, None)
        settings["model"].pop("name")
        recipes.append(settings)
    assert all(recipe == recipes[0] for recipe in recipes)


def test_rows_that_are_missing_are_said_and_rows_of_chance_are_marked(tmp_path: Path, monkeypatch, capsys):
    asked = []

    def score(runs, case):
        asked.append(case)
        if case.row == "linear":
            raise TimeOver
        if case.row == "hih":
            raise RunFailed("no memory")
        values = {"steps": 500, "flat": "no", "parameters": 7e6, "fvd": 3.0, "recipe": runs.recipe(case)}
        motion = 40.0 if case.row == "mhla" else 60.0 + 10 * case.seed
        return {**values, "digit_percent": 90.0, "motion_percent": motion, "motion_ceiling_percent": 99.0}

    monkeypatch.setattr(comparison.Runs, "score", score)
    out = tmp_path / "new" / "x.csv"
    arguments = ["--out", str(out), "--seeds", "0", "1", "--long", "0", "--times", "--rows", "softmax", "mhla"]
    comparison.main(arguments)
    printed = capsys.readouterr().out
    assert "| softmax | 7.00 M | 500 (not flat) | – | 3.00 ± 0.00 | 90.00 ± 0.00 | 65.00 ± 7.07 |" in printed
    assert "| mhla (has not learned) |" in printed and "| real clips | – | – | – | 3.00 | – | 99.00 |" in printed

    written, known = out.read_text(), len(asked)
    with pytest.raises(SystemExit, match="75"):
        comparison.main([*arguments, "linear"])
    assert {case.row for case in asked[known:]} == {"linear"} and out.read_text() == written
    assert "before 2 rows: repeat the command" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="1"):
        comparison.main([*arguments, "linear", "hih"])
    assert "error: no memory" in capsys.readouterr().err

    comparison.main([*arguments, "--steps", "20"])
    assert [case.row for case in asked[-4:]] == ["softmax", "mhla"] * 2, "rows of another recipe do not count"


def test_clips_that_go_on_have_known_frames_in_training_and_longer_windows_alone(tmp_path: Path, monkeypatch):
    seen = []
    runs = comparison.Runs(
        comparison.parse_arguments(["--out", "x.csv", "--seeds", "1", "--rows", *runs_module.MODELS]), 0
    )
    assert [*runs_module.EXTENDS] == list(runs_module.BASE)
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli.config["fit"].as_dict()))
    for base, row in runs_module.EXTENDS.items():
        for name in (base, row):
            given = ["-c", runs_module.CONFIG, "--run_dir", tmp_path / "run", *runs.options(name, 1)]
            train_gen.main(["fit", *map(str, given), "--trainer.max_steps", "7"], None)
        plain, extends = (config["model"].pop("objective") for config in seen[-2:])
        assert extends == plain | {"clean_prefix": 0.5, "prefix_class_dropout": 0.5} and seen[-1] == seen[-2]
        whole, windows = [case for case in runs.drawn() if case.row == row]
        assert (whole.frames, whole.way, windows.frames, windows.way) == (16, "whole", 64, "windows")
        assert runs.sampling(windows)[-2:] == ["--overlap", 12] and "--overlap" not in runs.sampling(whole)
        assert runs.recipe(whole) != runs.recipe(whole._replace(row=base))
    assert not {case.row for case in runs.timed()} & {*runs_module.EXTENDS.values()}, (
        "their networks are those of the base"
    )


def test_windows_are_tabulated_beside_those_of_models_trained_for_them(tmp_path: Path, monkeypatch, capsys):

    def score(runs, case):
        digit, motion = (80.0 + case.seed, 99.0) if case.frames == 64 else (90.0, 92.0)
        values = {"steps": 500, "flat": "no", "parameters": 7e6, "fvd": 4.0, "recipe": runs.recipe(case)}
        values |= {"digit_ceiling_percent": 96.0, "motion_ceiling_percent": 100.0}
        return {**values, "digit_percent": digit, "motion_percent": motion}

    monkeypatch.setattr(comparison.Runs, "score", score)
    arguments = ["--out", str(tmp_path / "x.csv"), "--times", "--rows"]
    comparison.main([*arguments, "linear-extends", "--seeds", "1", "3"])
    extends = "| linear-extends | 500 (not flat) | 4.00 ± 0.00 | 90.00 ± 0.00 | 92.00 ± 0.00 | 82.00 ± 1.41 (-8.00) |"
    assert extends in (printed := capsys.readouterr().out) and "| linear |" not in printed
    comparison.main([*arguments, "mhla", "linear", "--seeds", "0", "1", "3"])
    windows = capsys.readouterr().out.partition("Windows:")[2].splitlines()
    assert [line.split(" | ")[0] for line in windows[4:]] == ["| linear", "| linear-extends", "| mhla", "| real clips"]
    assert extends in windows[5] and windows[5].endswith("| 99.00 ± 0.00 (+7.00) |")


def test_options_of_distilled_rows_are_theirs_alone(monkeypatch):
    seen = {}

    def train_once(runs, run, script, config, options):
        seen[run] = options()
        return run

    monkeypatch.setattr(comparison.Runs, "train_once", train_once)

    def trained(row: str, *options: str) -> tuple[Path, list[object]]:
        run = comparison.Runs(comparison.parse_arguments(["--out", "x.csv", *options]), 0).train(row, 3)
        return run, seen[run]

    given = "--distilled=--ema.decay 0.99 --model.distill_steps 300"
    (run, options), (plain_run, plain) = trained("mhla-distilled", given), trained("mhla-distilled")
    assert run != plain_run and options[-2:] == plain[-2:], "the teacher is the same"
    assert [option for option in options if option not in plain] == ["--ema.decay", "0.99", "300"]
    assert [option for option in plain if option not in options] == ["--model.schedule.warmup_epochs", "0.1"]
    steps = [options[place + 1] for place, name in enumerate(options) if name == "--model.distill_steps"]
    assert steps == [150, "300"], "the last one counts"
    for row in ("mhla", "mhla-short", "softmax"):
        assert trained(row, given) == trained(row)
    assert trained("mhla-short", "--short=--ema.decay 0.99") != trained("mhla-short")
    for row in ("mhla", "mhla-short", "mhla-distilled"):
        (run, options), (plain_run, plain) = trained(row, "--compile"), trained(row)
        assert run == plain_run and (options != plain) == (row != "mhla-distilled"), "the same run, only faster"


@pytest.mark.parametrize(("name", "rows"), [("results", "softmax linear mhla hybrid hih"), ("distilled", "softmax")])
def test_a_comparison_whose_rows_are_recorded_runs_nothing(name: str, rows: str, tmp_path: Path, monkeypatch, capsys):
    """The recorded command again: recipes are found, the table is printed, and the file stays."""
    out = tmp_path / f"{name}.csv"
    out.write_bytes((report.FOLDER / f"{name}.csv").read_bytes())
    for step in ("time", "score"):
        monkeypatch.setattr(comparison.Runs, step, lambda runs, case: pytest.fail(f"{case} is not found"))
    more = ["--times", "--compile", "--long", "0", "--seeds", "0", "1"] if name == "distilled" else []
    comparison.main(["--out", str(out), *more, "--rows", *rows.split()])
    assert "| softmax | 4.22 M | 5000 |" in capsys.readouterr().out
    assert out.read_bytes() == (report.FOLDER / f"{name}.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "mhla", "soft"], "'soft'"),
        (["--rows", "mhla", "mhla"], "twice"),
        (["--samples", "3"], "--samples"),
        (["--long", "16"], "above --frames 16"),
        (["--out", __file__], "another --out"),
    ],
)
def test_wrong_arguments_end_with_one_line(arguments, message):
    with pytest.raises(SystemExit, match=f"error: .*{message}") as stop:
        comparison.main(["--out", "x.csv", *arguments])
    assert "\n" not in str(stop.value)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_models_are_trained_distilled_drawn_and_scored(tmp_path: Path, capsys):
    out, runs = tmp_path / "x.csv", tmp_path / "runs"
    arguments = ["--out", str(out), "--runs", str(runs), "--pictures", str(tmp_path), *SMALL]
    arguments += ["--steps", "60", "--rows", "softmax", "linear-extends", "mhla-distilled", "--times", "16"]
    with pytest.raises(SystemExit, match="75"):
        comparison.main([*arguments, "--minutes", "0.05"])
    capsys.readouterr()
    comparison.main(arguments)
    printed = capsys.readouterr().out
    rows = {(row["row"], row["frames"], row["way"]): row for row in csv.DictReader(out.read_text().splitlines())}
    assert len(rows) == 9
    whole, distilled = rows["softmax", "8", "whole"], rows["mhla-distilled", "8", "whole"]
    assert (int(whole["steps"]), int(distilled["steps"])) == (60, 12)
    assert float(rows["real clips", "8", "whole"]["fvd"]) < float(whole["fvd"])
    assert float(rows["softmax", "16", "windows"]["motion_ceiling_percent"]) > 90
    assert float(rows["softmax", "16", "forward"]["ms"]) > 0
    assert "| mhla-distilled (has not learned) |" in printed and "| linear-extends (has not learned) |" in printed
    pictures = [tmp_path / name for name in ("moving_digits.png", "moving_digits_curves.svg")]
    assert all(picture.stat().st_size > 2000 for picture in pictures)
    (teacher,) = (path for path in runs.glob("softmax-*") if (path / "finished").exists())
    weights = (teacher / "checkpoints" / "last.ckpt").stat().st_size
    assert weights < 6 * int(whole["parameters"]) + 50_000, "without the optimizer's state"
    for row, overlap in {"softmax": 4, "linear-extends": 6}.items():
        drawn = next(runs.glob(f"{row}-seed_1-*/drawn_16_windows-*/metadata.json"))
        clips = json.loads(drawn.read_text())["settings"]["clips"]
        assert (clips["window"], clips["overlap"]) == (8, overlap)

    written = out.read_text()
    comparison.main(arguments)
    assert out.read_text() == written
