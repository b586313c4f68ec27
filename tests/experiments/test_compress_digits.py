"""Fewer heads of keys and values: the chain of trainings, its table and its plot."""

import csv
from pathlib import Path

import pytest
import timm

from experiments.compress import run as compression
from headmix_vision.models import compress_heads

SMALL = ("--model.model_args.depth", "1", "--model.model_args.patch_size", "4", "--model.model_args.block_grid", "2")


def test_what_is_compressed_and_trained(few_digits, tmp_path: Path, monkeypatch, capsys):
    """Both chains of a base, and the options and weights that their trainings are given."""
    groups, train = [], compression.train_side_by_side

    def train_small_networks(commands, device):
        groups.append(commands)
        return train([[*command, *SMALL] for command in commands], device)

    monkeypatch.setattr(compression, "train_side_by_side", train_small_networks)
    out, epochs = tmp_path / "x.csv", ["--epochs", "2", "--recovery-epochs", "1", "--group", "3"]
    arguments = ["--out", str(out), "--plot", str(tmp_path / "x.svg"), "--cores", "mhla", "--seeds", "3"]
    compression.main([*arguments, "--heads", "8", "1", *epochs])
    assert list(map(len, groups)) == [1, 3, 1]
    given = [dict(zip(command[::2], command[1::2], strict=True)) for group in groups for command in group]
    base, *recovered, all_heads, one_head = given
    assert (base["--model.name"], base["--trainer.max_epochs"]) == ("deit_mhla_digits", "2")
    assert (one_head["--model.name"], one_head["--trainer.max_epochs"]) == ("deit_mhla_mea_digits", "1")
    assert one_head["--model.model_args.head_mix_args"] == "{component_heads: 1}"
    assert {options["--seed_everything"] for options in given} == {"3"}
    weights = [options.pop("--model.checkpoint") for options in recovered]
    assert recovered == [all_heads, one_head] and len(set(weights)) == 2

    one, eight = csv.DictReader(out.read_text().splitlines())
    assert [(row["core"], row["component_heads"], row["seed"]) for row in (one, eight)] == [
        ("mhla", h, "3") for h in "18"
    ]
    assert float(eight["keys_error_percent"]) == 0 and float(one["keys_error_percent"]) > 50
    assert all(0 < float(row[name]) < 100 for row in (one, eight) for name in compression.RESULTS)
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"| mhla | 1 | {int(one['parameters']):,} | ") and second.startswith("| mhla | 8 | ")
    assert "| 0.0, 0.0 |" in second and (tmp_path / "x.svg").stat().st_size > 1000


def test_accuracy_is_that_of_the_weights_of_the_package():
    """Of which as many heads as there were make the same function."""
    model = timm.create_model("deit_softmax_digits", pretrained=True).eval()
    assert compression.top1(compress_heads(model, 2).model) == pytest.approx(100 * 351 / 360)


@pytest.mark.parametrize(("arguments", "message"), [(["--heads", "9"], "--heads"), (["--group", "0"], "--group")])
def test_wrong_arguments(arguments, message):
    with pytest.raises(SystemExit, match=f"error: {message}|error: .*{message}"):
        compression.main(["--out", "x.csv", *arguments])
