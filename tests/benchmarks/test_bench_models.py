"""`bench_models.py`: small runs on a CPU."""

import csv
import math
from pathlib import Path

import torch

from benchmarks import bench_models as bench
from benchmarks import model_families


def test_bench_models_compares_with_the_baseline(tmp_path: Path):
    bench.main(["--device", "cpu", "--tiny", "--windows", "1", "--out", str(tmp_path)])
    with (tmp_path / "models_deit_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["mode"], r["model"]) for r in rows] == [
        (mode, model) for mode in ("train", "inference") for model in ("deit_tiny_patch16_224", "deit_mhla_tiny")
    ]
    for baseline, ours in (rows[:2], rows[2:]):
        assert float(baseline["ratio_to_baseline"]) == 1
        ratio = float(ours["imgs_per_s"]) / float(baseline["imgs_per_s"])
        assert math.isclose(float(ours["ratio_to_baseline"]), ratio, rel_tol=1e-3)


def test_bench_models_halves_a_batch_that_does_not_fit(monkeypatch, capsys):

    def compare(names, size, batch, mode, arguments):
        if batch > 10:
            raise torch.OutOfMemoryError
        return batch

    monkeypatch.setattr(bench, "compare", compare)
    assert bench.compare_at_largest_batch(["a"], 224, 64, "train", None) == 8
    assert "batch 32 instead" in capsys.readouterr().out


def test_options_follow_the_name_of_a_model():
    read = model_families.read_spelling
    assert read("deit_mhla_small") == ("deit_mhla_small", {})
    spelled = "deit_mhla_iha_small:head_mix_args.pseudo_heads=4,global_every=5,head_mix_args.collapse=across_heads"
    name, options = read(spelled)
    assert name == "deit_mhla_iha_small"
    assert options == {"head_mix_args": {"pseudo_heads": 4, "collapse": "across_heads"}, "global_every": 5}
    model = model_families.make_model("deit_mhla_iha_tiny:head_mix_args.pseudo_heads=3,depth=1", 64)
    assert model.blocks[0].attn.head_mix.repeats == 3


def test_comparisons_of_head_mixes_have_a_file_of_their_own():
    name_of = bench.name_of_results
    assert name_of(["deit_small_patch16_224", "deit_mhla_small"]) == "models_deit"
    assert name_of(["dit_softmax_s_2", "dit_mhla_mea_s_2", "dit_iha_s_2:global_every=5"]) == "models_dit_iha_mea"
