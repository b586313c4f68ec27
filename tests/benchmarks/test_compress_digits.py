"""`compress_digits.py`: the chain of runs, its table and its plot."""

import csv
from pathlib import Path

import pytest
import timm

from headmix_vision.models import compress_heads


@pytest.fixture
def compression(load):
    return load("compress_digits")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_chain_of_runs(compression, tmp_path: Path, capsys):
    arguments = ["--out", str(tmp_path / "x.csv"), "--plot", str(tmp_path / "x.png"), "--runs", str(tmp_path / "runs")]
    arguments += ["--cores", "softmax", "--seeds", "3", "--heads", "2", "--epochs", "1", "--recovery-epochs", "1"]
    compression.main(arguments)
    (row,) = csv.DictReader((tmp_path / "x.csv").read_text().splitlines())
    assert (row["core"], row["component_heads"], row["seed"]) == ("softmax", "2", "3")
    assert 0 < float(row["keys_error_percent"]) < 100
    assert f"| softmax | 2 | {int(row['parameters']):,} |" in capsys.readouterr().out
    assert (tmp_path / "x.png").stat().st_size > 1000


def stand_in(name, heads):
    """What a run would have left."""
    return timm.create_model(name, num_heads=heads).eval()


def test_what_is_compressed_and_trained(compression, tmp_path: Path, monkeypatch, capsys):
    """All runs of a chain, with the models and weights that they are given."""
    calls = []

    def train(script, recipe, run, options, one_thread):
        given = dict(zip(options[::2], options[1::2], strict=True))
        run.mkdir(parents=True)
        (run / "metrics.csv").write_text(f"step,val/top1\n1,0.1\n2,0.{len(calls) + 1}\n")
        calls.append((run.name, given))

    monkeypatch.setattr(compression, "train", train)
    monkeypatch.setattr(compression.Case, "base", lambda case: stand_in(f"deit_{case.core}_digits", compression.HEADS))
    out = tmp_path / "x.csv"
    compression.main(["--out", str(out), "--plot", str(tmp_path / "x.png"), "--cores", "mhla", "--heads", "8", "1"])
    runs = {(name, given["--seed_everything"]): given for name, given in calls}
    names = ["base_32-base-32", *(f"base_32-{start}_{h}-8" for start in ("recovered", "scratch") for h in (8, 1))]
    assert set(runs) == {(name, seed) for name in names for seed in range(3)}
    assert {given["--model.name"] for given in runs.values()} == {"deit_mhla_digits", "deit_mhla_mea_digits"}
    recovered, scratch = (runs[f"base_32-{start}_1-8", 2] for start in ("recovered", "scratch"))
    assert Path(recovered.pop("--model.checkpoint")).name == "base_32-compressed_1-0.safetensors"
    assert recovered == scratch and scratch["--model.model_args.head_mix_args"] == "{component_heads: 1}"
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(row["component_heads"], row["seed"]) for row in rows] == [(h, s) for h in "18" for s in "012"]
    assert all(float(row["keys_error_percent"]) == 0 for row in rows[3:]) and float(rows[0]["keys_error_percent"]) > 50
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 4 and table[3].startswith("| mhla | 8 | ") and "| 0.0 ± 0.0 |" in table[3]


def test_accuracy_is_that_of_the_weights_of_the_package(compression):
    model = timm.create_model("deit_softmax_digits", pretrained=True).eval()
    assert compression.top1(model) == pytest.approx(100 * 351 / 360)
    assert compression.top1(compress_heads(model, 2).model) == compression.top1(model)


@pytest.mark.parametrize(("arguments", "message"), [(["--heads", "9"], "--heads"), (["--jobs", "0"], "--jobs")])
def test_wrong_arguments(compression, arguments, message):
    with pytest.raises(SystemExit, match=f"error: {message}|error: .*{message}"):
        compression.main(["--out", "x.csv", *arguments])
