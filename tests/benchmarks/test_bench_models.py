"""`bench_models.py`: small runs on a CPU."""

import csv
import math
from pathlib import Path

import torch


def test_bench_models_compares_with_the_baseline(load, tmp_path: Path):
    load("bench_models").main(["--device", "cpu", "--tiny", "--windows", "1", "--out", str(tmp_path)])
    with (tmp_path / "models_deit_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["mode"], r["model"]) for r in rows] == [
        (mode, model) for mode in ("train", "inference") for model in ("deit_tiny_patch16_224", "deit_mhla_tiny")
    ]
    for baseline, ours in (rows[:2], rows[2:]):
        assert float(baseline["ratio_to_baseline"]) == 1
        ratio = float(ours["imgs_per_s"]) / float(baseline["imgs_per_s"])
        assert math.isclose(float(ours["ratio_to_baseline"]), ratio, rel_tol=1e-3)


def test_bench_models_halves_a_batch_that_does_not_fit(load, monkeypatch, capsys):
    bench = load("bench_models")

    def compare(names, size, batch, mode, arguments):
        if batch > 10:
            raise torch.OutOfMemoryError
        return batch

    monkeypatch.setattr(bench, "compare", compare)
    assert bench.compare_at_largest_batch(["a"], 224, 64, "train", None) == 8
    assert "batch 32 instead" in capsys.readouterr().out
