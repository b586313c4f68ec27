"""Head mixes and the learning rates that they bear: equal budgets, splits, choice of rates, resuming."""

import csv
import json
import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from experiments.harness import classifier_runs as runs
from experiments.harness import run_groups as groups
from experiments.head_mixes import run as head_mixes_run
from experiments.stable_rates import report
from experiments.stable_rates import run as stable_rates_run
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.digits import Digits


@pytest.fixture
def without_training(monkeypatch):
    """Replace the processes that train by a function of the run; returns the runs that were asked for."""
    asked = []

    def install(outcome):
        def train_group(runs, device):
            asked.extend(runs)
            return [groups.Result(value, 0.5, run.epochs, value) for run in runs for value in [outcome(run)]]

        class Pool(ThreadPoolExecutor):
            def __init__(self, jobs, **_):
                super().__init__(jobs)

        monkeypatch.setattr(groups, "ProcessPoolExecutor", Pool)
        monkeypatch.setattr(groups, "train_group", train_group)
        return asked

    return install


def test_networks_are_equal_in_parameters_or_in_flops():
    narrowed = set()
    for task, core, mix in product(runs.SHAPES, runs.CORES, runs.MIXES):
        network = runs.Network(task, core, mix)
        runs.check_equal(network, "parameters")
        equal = runs.of_equal_flops(network)
        runs.check_equal(equal, "flops")
        if equal != network:
            narrowed.add(mix)
            with pytest.raises(AssertionError, match="differs in flops"):
                runs.check_equal(network, "flops")
    assert narrowed == {"iha"}


def test_counted_flops_are_those_of_the_products():
    """Against PyTorch's counter, which sees the products of softmax attention as they are run."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    network = runs.Network("digits", "softmax", "plain")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network.build()(torch.rand(1, 1, 8, 8))
    assert runs.size_of(network).flops == counter.get_total_flops()


def test_no_image_that_is_reported_is_tuned_on():
    train, held_out = (
        runs.open_digits_for_tuning(SplitRequest("digits-tuning", split, (1, 8, 8), "classification"))
        for split in ("train", "validation")
    )
    pictures = [
        {image.numpy().tobytes() for image, _ in map(part.read, range(len(part)))} for part in (train, held_out)
    ]
    reported = {image.numpy().tobytes() for image in Digits("validation").images}
    assert len(train) + len(held_out) == len(Digits("train")) and len(train) == 4 * len(held_out) - 3
    assert not pictures[0] & pictures[1] and not (pictures[0] | pictures[1]) & reported

    boards, others, reported_boards = (
        runs.open_few_canvases(SplitRequest("canvas-few", split, (1, 60, 60), "classification"))
        for split in ("train", "validation", runs.REPORTED)
    )
    assert (boards.split, others.split) == ("train", "train") and boards.seed != others.seed
    assert reported_boards.split == "validation" and len(reported_boards) == 5000
    assert len(boards) == runs.TRAINING_BOARDS and len(others) == runs.STOPPING_LENGTH
    assert not torch.equal(boards.read_batch([0])[0], others.read_batch([0])[0])


def test_rates_are_chosen_on_the_tuning_split_and_the_rest_is_left_for_the_next_call(
    without_training, tmp_path, capsys
):
    out = tmp_path / "head_mixes.csv"

    def accuracy(run):
        if run.dataset == "digits-tuning":
            return 100 - abs(run.rate - 3e-3) * 1e3
        if run.network.mix == "mea" and run.seed == 1:
            raise RuntimeError("no memory")
        return {"plain": 90, "iha": 95, "mea": 40}[run.network.mix] + run.seed / 10

    asked = without_training(accuracy)
    arguments = ["--out", str(out), "--plot", str(tmp_path / "plot.svg"), "--cores", "softmax", "hih"]
    with pytest.raises(SystemExit, match="1"):
        head_mixes_run.main([*arguments, "--tasks", "digits", "--seeds", "0", "1", "--group", "1"])
    captured = capsys.readouterr()
    assert "no memory" in captured.err and (tmp_path / "plot.svg").stat().st_size > 10_000
    assert "| softmax | 90.05 ± 0.07 | 95.05 ± 0.07 (+5.00 ± 0.07) | " in captured.out
    assert "40.00 (has not learned)" in captured.out
    final = [run for run in asked if run.dataset == "digits"]
    assert {run.rate for run in final} == {3e-3}
    assert len(final) == 2 * (3 + 1) * 2, "three mixes, and IHA with narrower MLPs"

    written, count = out.read_text(), len(asked)
    with pytest.raises(SystemExit):
        head_mixes_run.main([*arguments, "--tasks", "digits", "--seeds", "0", "1"])
    assert {(run.network.mix, run.seed) for run in asked[count:]} == {("mea", 1)} and out.read_text() == written

    out.write_text("something,else\n1,2\n")
    with pytest.raises(SystemExit, match="no table of this command"):
        head_mixes_run.main(arguments)


def test_a_tuned_canvas_run_is_a_reported_one(without_training, tmp_path, capsys):
    asked = without_training(lambda run: 80 - 1e3 * run.rate)
    arguments = ["--out", str(tmp_path / "x.csv"), "--cores", "mhla", "--tasks", "canvas", "--seeds", "0", "1"]
    head_mixes_run.main(arguments)
    assert len(asked) == len(set(asked)) == 3 * 2 + 3 + 2
    assert all(run.command()[-4:] == ["--ema.decay", "0.99", "--data.batch_size", "64"] for run in asked)
    assert "| mhla | 79.00 ± 0.00 | 79.00 ± 0.00 (+0.00 ± 0.00) | " in capsys.readouterr().out


@pytest.mark.parametrize("edges", [{"MEA": 5, "core with norm": 3}, {"MEA": 4, "core with norm": 4}])
def test_two_steps_after_a_variant_fell_no_higher_rate_is_tried(without_training, tmp_path, capsys, edges):
    edges = {"core alone": 3, "MEA without norm": 3, **edges}
    known = {settings: variant for variant, settings in report.VARIANTS.items()}

    def accuracy(run):
        index = round(math.log(run.rate / 1e-3, stable_rates_run.STEP))
        edge = edges[known[run.network.mix, json.dumps(dict(run.network.options))]]
        return 92 if index < edge else 85 if index == edge else math.nan

    asked = without_training(accuracy)
    out, plot = tmp_path / "x.csv", tmp_path / "x.svg"
    arguments = ["--out", str(out), "--plot", str(plot), "--lowest", "1e-3", "--steps", "9", "--seeds", "0", "1"]
    stable_rates_run.main(arguments)
    assert len(asked) == 2 * 2 * sum(edge + 3 for edge in edges.values())
    lines = capsys.readouterr().out.strip().splitlines()[-2 * len(edges) :]
    stable = {tuple(line.split(" | ")[:2]): line.split(" | ").index("**85.0 ± 0.0**") - 2 for line in lines}
    assert stable == {(f"| {core}", name): edge for core in ("softmax", "mhla") for name, edge in edges.items()}
    assert plot.stat().st_size > 10_000
    stable_rates_run.main(arguments)
    assert len(asked) == 2 * 2 * sum(edge + 3 for edge in edges.values()), "nothing is repeated"


def test_a_variant_may_bear_all_rates_that_were_tried(without_training, tmp_path, capsys):
    without_training(lambda run: 90 - 5 * (run.seed == 1 and run.rate > 4e-3))
    stable_rates_run.main(["--out", str(tmp_path / "x.csv"), "--cores", "mhla", "--steps", "4", "--seeds", "0", "1"])
    assert capsys.readouterr().out.count(" | **87.5 ± 3.5** |\n") == 4


@pytest.mark.parametrize("script", [head_mixes_run, stable_rates_run], ids=["head_mixes", "stable_rates"])
def test_a_comparison_whose_rows_are_recorded_trains_nothing(without_training, tmp_path, script):
    asked, out = without_training(lambda run: 0), tmp_path / "x.csv"
    recorded = (Path(script.__file__).parent / "results.csv").read_bytes()
    out.write_bytes(recorded)
    script.main(["--out", str(out), "--cores", "mhla"])
    assert not asked and out.read_bytes() == recorded


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_scripts_train(tmp_path: Path, capsys):
    rates, mixes = tmp_path / "rates.csv", tmp_path / "mixes.csv"
    short = ["--options", "--data.batch_size", "700"]
    stable_rates_run.main(
        ["--out", str(rates), "--cores", "mhla", "--steps", "1", "--seeds", "0", "--epochs", "1", *short]
    )
    with rates.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and all(0 <= float(row["top1_percent"]) <= 100 for row in rows)
    assert "MEA without norm" in capsys.readouterr().out
    arguments = ["--out", str(mixes), "--cores", "linear", "--seeds", "0", "--digits-rates", "1e-3"]
    arguments += ["--canvas-rates", "1e-3", "--digits-epochs", "1", "--canvas-epochs", "1"]
    head_mixes_run.main([*arguments, *short])
    with mixes.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["dataset"] for row in rows} == {"digits", "digits-tuning", "canvas-few"} and len(rows) == 3 + 4 + 4
