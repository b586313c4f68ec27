"""`headmix analyze sweep`: what differs between its runs, how rates are chosen, what is written and refused."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from headmix_lab.scripts import RunFailed, TimeOver
from headmix_lab.sweeps.figure import draw
from headmix_lab.sweeps.kinds import SWEEPS
from headmix_lab.sweeps.runs import COLUMNS, QUIET, Case, Request, Runs, read_run, read_test, with_core
from headmix_lab.sweeps.table import report
from headmix_lab.tables import ResultTable
from headmix_vision.cli.analyze import main as analyze
from headmix_vision.cli.train_cls import main as train_cls
from headmix_vision.errors import InputError
from headmix_vision.layers import CORES
from headmix_vision.runs.networks import open_network
from headmix_vision.training.base_cli import RunCLI

SMALL = ("--model.model_args.embed_dim", "16", "--model.model_args.depth", "1", "--trainer.max_epochs", "3")
CONFIG: dict[str, Any] = {  # of `--print_config`, as far as a sweep reads it
    "analysis": {"every_n_epochs": 5},
    "trainer": {"max_epochs": 200},
    "best": {"monitor": "val/top1"},
    "early_stopping": {"monitor": None, "patience": 20},
    "model": {"name": "deit_hih_digits", "num_classes": None, "img_size": None, "optimizer": {"lr": 3e-3}},
    "data": {"val_split": "validation", "test_split": None, "holdout_every": None},
}
CONFIG["model"]["model_args"] = {"embed_dim": 16, "depth": 1}


def status_of(*arguments: object) -> int:
    try:
        analyze(["sweep", *map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the commands of training, which take ten seconds to start, and what tries the first run."""
    monkeypatch.setattr(Runs, "_ask", lambda runs, *arguments: json.dumps(CONFIG))
    monkeypatch.setattr(Runs, "check", lambda runs, case: None)


def make(out: Path, kind: str = "block_count", **changes: Any) -> tuple[Runs, ResultTable]:
    given = {"recipes": ["digits"], "root": None, "options": (), "rates": None, "seeds": 3, "epochs": None, "jobs": 1}
    request = Request(kind=kind, sweep=SWEEPS[kind], out=out, **(given | changes))
    runs = Runs(request, math.inf)
    return runs, ResultTable(request.table, COLUMNS, 3, runs.place)


def figure_of(table: ResultTable, runs: Runs) -> Any:
    rows = {name: runs.rows(table, name) for name in runs.variants}
    return draw(runs.request.kind, rows, runs.accuracy, runs.curves(table))


def fill(runs: Runs, table: ResultTable, top1: dict[str, float], **more: object) -> None:
    """Add a row for each network and seed at the recipe's rate, one point above another."""
    for rate in runs.rates:
        for variant, score in top1.items():
            for seed in range(runs.request.seeds if rate == "0.003" else 1):
                case = Case(variant, rate, seed)
                scores = {
                    "val_percent": score if rate == "0.003" else score - 1,
                    "test_top1_percent": score + seed,
                }
                row = {**scores, "floor_percent": 11.0, "images_per_s": 900.0, "epochs": 31, "parameters": 7, **more}
                table.add(case, ended="patience", recipe=runs.recipe(case), **row)


@pytest.mark.usefixtures("without_training")
def test_networks_differ_in_what_is_varied_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    expected = {
        "block_count": ({"M=4": ("mhla", 64), "M=64": ("mhla", 64)}, "block_grid"),
        "length": ({"softmax-256": ("softmax", 256), "mhla-1024": ("mhla", 1024)}, "img_size", "name"),
        "cores": ({"softmax": ("softmax", 64), "hih+CPE": ("hih", 64)}, "name", "cpe"),
        "modules": ({"gate": ("mhla", 64), "plain-uniform-kept": ("mhla", 64)}, "cpe", "output_gate", "core_args"),
    }
    attentions = {}
    for kind, (networks, *varied) in expected.items():
        runs, _ = make(tmp_path, kind)
        rest = []
        for variant, (core, tokens) in networks.items():
            train_cls(["fit", *map(str, runs._options(Case(variant, "0.006", 2))), "--run_dir", str(tmp_path / "run")])
            cli = seen.pop()
            net, options = cli.model.net, cli.config["fit"].as_dict()
            attention = attentions[variant] = net.blocks[0].attn
            assert isinstance(attention.core, CORES[core]) and net.patch_embed.num_patches == tokens
            assert net.cls_token is None and options["data"]["holdout_every"] == 5
            assert sum(parameter.numel() for parameter in net.parameters()) == runs.parameters[variant]
            model = options["model"]
            rest.append({**options, **model, **model.pop("model_args"), "model": None})
            for name in (*varied, "model_args"):
                rest[-1].pop(name, None)
        assert rest[0] == rest[1]
        assert (rest[0]["optimizer"]["lr"], rest[0]["seed_everything"]) == (0.006, 2)
        assert rest[0]["schedule"]["sched"] == "constant"
    assert [attentions[name].core.mixing.blocks.num_blocks for name in ("M=4", "M=64", "mhla-1024")] == [4, 64, 16]
    assert attentions["hih+CPE"].cpe is not None and attentions["softmax"].cpe is None
    assert attentions["gate"].gate is not None and attentions["gate"].cpe is None
    kept = attentions["plain-uniform-kept"]
    assert kept.gate is None and "weight" not in dict(kept.core.mixing.named_parameters())
    assert kept.core.mixing.weight.unique().numel() == 1


@pytest.mark.usefixtures("without_training")
def test_rates_are_chosen_by_validation_and_then_come_the_other_seeds(tmp_path: Path):
    runs, table = make(tmp_path)
    assert runs.rates == ["0.0015", "0.003", "0.006"]
    first = runs.ready(table)
    assert first[:3] == [Case("M=1", rate, 0) for rate in runs.rates] and len(first) == 12
    assert runs.missing(table) == 12 + 4 * 2
    for case, validation, test in zip(first, (50, 60, 60), (99, 1, 2), strict=False):
        assert runs.chosen(table, "M=1") is None
        table.add(case, val_percent=float(validation), test_top1_percent=float(test), recipe=runs.recipe(case))
    assert runs.chosen(table, "M=1") == "0.003", "the lowest of equals"
    assert runs.ready(table)[:2] == [Case("M=1", "0.003", 1), Case("M=1", "0.003", 2)]
    assert runs.missing(table) == 9 + 4 * 2
    again, known = make(tmp_path, seeds=1)
    assert known.rows == table.rows and again.missing(known) == 9, "the same runs, of a later call"
    other, _ = make(tmp_path, options=("--data.batch_size", "7"))
    assert other.row(table, first[0]) is None and other.directory(first[0]) != runs.directory(first[0])
    moved, _ = make(tmp_path, root="elsewhere")
    assert moved.recipe(first[0]) == runs.recipe(first[0])


@pytest.mark.usefixtures("without_training")
def test_the_table_says_what_is_to_be_known(tmp_path: Path):
    runs, table = make(tmp_path)
    fill(runs, table, {"M=1": 50.0, "M=16": 70.0})
    row = table.rows["M=1", "0.003", "0"]
    table.add(("M=1", "0.003", 0), **{name: row[name] for name in COLUMNS[3:]} | {"ended": "limit"})
    text = report(table, runs)
    assert "| M=16 | 7 | 0.003 | 3 | 31 ± 0 | 70.00 ± 0.00 | 71.00 ± 1.00 | 900 ± 0 |" in text
    assert "| M=1 (still improving) |" in text and "M=4" not in text
    assert "| always the commonest class | – | – | – | – | – | 11.00 | – |" in text
    assert "by val/top1 of training images that are held out" in text
    assert "ends when val/top1 has not improved for 20 validations" in text

    equal, table = make(tmp_path / "equal", epochs=40)
    fill(equal, table, {"M=1": 50.0})
    row = table.rows["M=1", "0.003", "0"]
    table.add(("M=1", "0.003", 0), **{name: row[name] for name in COLUMNS[3:]} | {"ended": "limit"})
    text = report(table, equal)
    assert "by half a cosine" in text and "| M=1 |" in text and "improve" not in text

    lengths, table = make(tmp_path, "length", rates=[3e-3, 6e-3], seeds=2)
    top1 = {"softmax-256": 60.0, "softmax-1024": 50.0, "linear-256": 60.0, "linear-1024": 60.4, "mhla-256": 12.0}
    fill(lengths, table, top1)
    text = report(table, lengths)
    assert "softmax falls off at 1,024 tokens; linear does not fall off up to 1,024 tokens (" in text
    assert "| mhla-256 (has not learned, rate at the edge) |" in text
    assert report(ResultTable(tmp_path / "none.csv", COLUMNS, 3, str), runs)


@pytest.mark.usefixtures("without_training")
def test_a_recipe_says_which_accuracy_is_chosen_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CONFIG, "best", {"monitor": "val/balanced"})
    runs, table = make(tmp_path)
    fill(runs, table, {"M=1": 50.0})
    text = report(table, runs)
    assert "ends when val/balanced has not" in text and "chosen by val/balanced of training images" in text
    fill(runs, table, {"M=1": 50.0}, test_balanced_percent=9.0)
    figure = figure_of(table, runs)
    assert figure is not None and figure.axes[0].get_ylabel() == "balanced accuracy, %"
    metrics = "epoch,step,train/images_per_s,val/top1,val/balanced\n0,9,8.0,0.9,0.2\n1,19,8.0,0.5,0.4\n"
    (tmp_path / "metrics.csv").write_text(metrics)
    monkeypatch.setattr("headmix_lab.sweeps.runs._has_stopped", lambda run: True)
    assert read_run(tmp_path, runs.monitor)["val_percent"] == 40
    monkeypatch.setitem(CONFIG, "best", {"monitor": "val/loss"})
    with pytest.raises(InputError, match="chooses by an accuracy"):
        make(tmp_path)


@pytest.mark.usefixtures("without_training")
@pytest.mark.parametrize("kind", SWEEPS)
def test_figures(kind: str, tmp_path: Path):
    runs, table = make(tmp_path, kind)
    assert figure_of(table, runs) is None
    top1 = {name: 10.0 * place for place, name in enumerate(runs.variants, 1)}
    fill(runs, table, top1, test_balanced_percent=9.0, rank=7.0)
    if kind == "rank_over_training":
        assert figure_of(table, runs) is None, "metrics are gone"
        for case in runs.compared(table, "mhla"):
            runs.directory(case).mkdir(parents=True)
            text = "epoch,step,analysis/rank/layer0,analysis/rank/layer1\n0,9,1,3\n0,10,,\n1,19,5,7\n"
            (runs.directory(case) / "metrics.csv").write_text(text)
    figure = figure_of(table, runs)
    assert figure is not None and figure.get_size_inches()[0] == 6
    assert len(figure.axes) == len(runs.request.sweep.numbers)
    for axes in figure.axes:
        assert axes.get_xlabel() and bool(axes.get_ylabel()) == bool(axes.texts) == (runs.request.sweep.draw != "dots")
        assert 1 <= len({line.get_color() for line in axes.lines}) <= 5
    names = [text.get_text() for text in figure.axes[0].texts]
    if kind == "rank_over_training":
        assert all(tick == round(tick) for tick in figure.axes[0].get_xticks()), "epochs are whole, of short runs too"
        (line,) = figure.axes[0].lines
        assert line.get_xydata().tolist() == [[1, 2], [2, 6]] and names == ["MHLA"]
        second = {"variant": "mhla", "rate": "0.003", "seed": "0", "epoch": "2", "val_percent": "", "rank": "6.00"}
        assert runs.curves(table)[1] == second
    elif kind == "length":
        assert sorted(names) == ["MHLA", "linear", "softmax"]


@pytest.mark.usefixtures("without_training")
@pytest.mark.parametrize("kind", ["block_count", "length"])
def test_the_rank_at_the_end_of_a_run_is_drawn_where_it_was_logged(kind: str, tmp_path: Path):
    runs, table = make(tmp_path, kind)
    options = [*runs.request.rule, *QUIET, *runs.request.sweep.options]
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert int(given["--analysis.every_n_epochs"]) <= int(given["--early_stopping.patience"]) / 2
    first, *others = runs.variants
    fill(runs, table, dict.fromkeys(others, 50.0))
    shorter = figure_of(table, runs)
    assert shorter is not None and [axes.get_ylabel() for axes in shorter.axes] == ["top-1, %", "training, images/s"]
    fill(runs, table, {first: 50.0}, rank=3.0)
    figure = figure_of(table, runs)
    assert figure is not None and figure.axes[-1].get_ylabel() == "rank of attention"
    assert figure.axes[-1].lines[0].get_xydata().tolist() == [[runs.variants[first].x, 3.0]]


def test_the_last_rank_of_a_run_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headmix_lab.sweeps.runs._has_stopped", lambda run: True)
    lines = ["epoch,step,train/images_per_s,val/top1,analysis/rank/layer0,analysis/rank/layer1"]
    lines += ["3,9,7,0.1,,", "4,19,7,0.2,1,3", "9,29,7,0.9,2,8", "12,39,7,0.8,,"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    assert read_run(tmp_path, "val/top1")["rank"] == 5


@pytest.mark.usefixtures("without_training")
def test_a_call_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    asked, broken = list[Case](), set[str]()

    def complete(runs: Runs, case: Case) -> dict[str, object]:
        asked.append(case)
        if case.variant in broken:
            raise RunFailed("python fit ended with 1:\nTraceback\nerror: no memory")
        if len(asked) == 3:
            raise TimeOver
        score = 90.0 + case.seed
        return {"val_percent": score, "test_top1_percent": score, "recipe": runs.recipe(case), "ended": "patience"}

    monkeypatch.setattr(Runs, "complete", complete)
    arguments = ["block_count", "--out", tmp_path / "out", "--seeds", 2, "--rates", "3e-3", "--variants", "M=4", "M=1"]
    assert status_of(*arguments, "--dry-run") == 0 and not (tmp_path / "out").exists()
    planned = capsys.readouterr().out
    assert "would train 4 runs, first 4:" in planned and "block_count.csv, block_count_curves.csv, " in planned
    assert status_of(*arguments) == 75
    assert "the time was over before 1 runs: repeat the command" in capsys.readouterr().err
    (lost,) = set(asked[2:3])
    assert status_of(*arguments) == 0 and asked[4:] == [lost]
    written = (tmp_path / "out" / "block_count.csv").read_text()
    assert [row["variant"] for row in csv.DictReader(written.splitlines())] == ["M=1", "M=1", "M=4", "M=4"]
    assert "90.50 ± 0.71" in (tmp_path / "out" / "block_count.md").read_text()

    assert status_of(*arguments) == 0 and len(asked) == 5, "nothing is repeated"
    broken.add("M=16")
    assert status_of(*arguments, "M=16") == 1
    assert "error: M=16, rate 0.003, seed 0: no memory\n" in capsys.readouterr().err
    assert (tmp_path / "out" / "block_count.csv").read_text() == written
    assert status_of(*arguments, "--options", "--data.batch_size", "8") == 2
    assert "block_count.csv holds runs of other options (M=1, rate 0.003, seed 0); choose" in capsys.readouterr().err
    (tmp_path / "out" / "block_count.csv").write_text(written.replace("91.00", "much"))
    assert status_of(*arguments) == 2 and "is damaged: could not convert" in capsys.readouterr().err


@pytest.mark.usefixtures("without_training")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["blocks"], "invalid choice: 'blocks'"),
        (["length", "--seeds", "0"], "--seeds must be a whole number from 1 to 1000, got 0"),
        (["length", "--epochs", str(10**15)], f"--epochs must be a whole number from 1 to 1000000, got {10**15}"),
        (["length", "--jobs", "-1"], "--jobs must be a whole number of at least 1, got -1"),
        (["length", "--minutes", "nan"], "--minutes must be a finite number above 0, got nan"),
        (["length", "--rates", "1e-3", "0"], "--rates must be a finite number above 0, got 0.0"),
        (["length", "--rates", "1e-3", "0.001"], "--rates names one twice"),
        (["length", "--rates", "1e-3", "0.0010000001"], "--rates names one twice"),
        (["block_count", "--variants", "M=2"], "--variants of block_count are M=1, M=4, M=16, M=64, got 'M=2'"),
        (["length", "--task", "digit"], "--config digit is neither a file nor a shipped recipe; did you mean digits"),
        (["length", "--out", Path(__file__)], f"Not a directory: {Path(__file__)}"),
        (["length", "--sedes", "3"], "unknown option --sedes; did you mean --seeds?"),
    ],
)
def test_wrong_input_is_refused(arguments: list[object], message: str, tmp_path: Path, capsys: Any):
    assert status_of("--out", tmp_path / "out", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("without_training")
def test_files_of_others_are_left_alone(tmp_path: Path, capsys: Any):
    (tmp_path / "block_count.md").write_text("a thesis")
    assert status_of("block_count", "--out", tmp_path) == 2
    assert "holds block_count.md without block_count.csv; choose another --out" in capsys.readouterr().err
    for content in (b"a,b\n1,2\n", b"hello\n", b"\xff\xfe\x00", b""):
        (tmp_path / "block_count.csv").write_bytes(content)
        assert status_of("block_count", "--out", tmp_path) == 2
        assert "block_count.csv is not a table of this command; choose another --out" in capsys.readouterr().err
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["block_count.csv", "block_count.md"]


def test_models_without_a_core_are_refused():
    assert with_core("deit_softmax_iha_tiny", "mhla") == "deit_mhla_iha_tiny"
    for name in ("resnet18", "deit_tiny_patch16_224", "dit_mhla_s_2"):
        with pytest.raises(InputError, match=f"such as deit_mhla_tiny, the recipe trains {name}"):
            with_core(name, "mhla")


def test_accuracies_are_those_of_all_images(tmp_path: Path):
    (tmp_path / "x.csv").write_text("class,images,correct,accuracy\na,30,30,1\nb,10,0,0\nc,0,0,\n")
    assert list(read_test(tmp_path / "x.csv").values()) == [75.0, 50.0, 75.0]


@pytest.mark.slow
def test_what_the_training_refuses_ends_in_its_line(tmp_path: Path, capsys: Any):
    assert status_of("length", "--out", tmp_path / "out", "--options", "--model.optimizer.lrr", "3") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "did you mean --model.optimizer.lr?" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_of_digits_are_trained_tested_and_continued(tmp_path: Path, capsys: Any):
    out = tmp_path / "out"
    arguments = ["rank_over_training", "--task", "digits", "--out", out, "--seeds", 1, "--rates", "3e-3", "1e30"]
    arguments += ["--variants", "mhla", "--jobs", 2, "--options", *SMALL, "--early_stopping.patience", 1]
    assert status_of("--minutes", 0.1, *arguments) == 75  # four commands have to start before a run has a row
    assert status_of(*arguments) == 0
    rows = {row["rate"]: row for row in csv.DictReader((out / "rank_over_training.csv").read_text().splitlines())}
    assert rows["1e+30"]["ended"] == "not finite" and rows["0.003"]["ended"] in ("patience", "limit")
    assert not rows["0.003"]["images_per_s"] and 1 <= float(rows["0.003"]["rank"]) <= 64
    assert ">MHLA</text>" in (out / "rank_over_training.svg").read_text()
    curves = list(csv.DictReader((out / "rank_over_training_curves.csv").read_text().splitlines()))
    assert [int(row["epoch"]) for row in curves] == list(range(1, int(rows["0.003"]["epochs"]) + 1))
    assert float(curves[-1]["rank"]) == pytest.approx(float(rows["0.003"]["rank"]), abs=0.01)
    (run,) = (out / "rank_over_training").glob("mhla-rate_0.003-*")
    network, about = open_network(run)
    assert about["name"] == "deit_mhla_digits" and network.embed_dim == 16
    written = (out / "rank_over_training.csv").read_text()
    capsys.readouterr()
    assert status_of(*arguments) == 0 and " s] " not in capsys.readouterr().out
    assert (out / "rank_over_training.csv").read_text() == written
