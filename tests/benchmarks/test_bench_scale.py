"""`bench_scale.py`: tiny runs on a CPU."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks import bench_scale as bench


@pytest.mark.slow
def test_bench_scale_compares_losses_of_one_process_and_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = ["--device", "cpu", "--tiny", "--losses", "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    bench.main(command)
    monkeypatch.setattr("sys.executable", "none")  # all is found already
    bench.main(command)
    with (tmp_path / "scale_losses_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    ways = [("one", "1"), *((way, "2") for way in ("ddp", "fsdp2", "kept", "hybrid"))]
    assert [(row["what"], row["gpus"]) for row in rows] == ways
    assert all(float(row["largest_difference"]) == 0 for row in rows)


def test_a_case_of_bench_scale_says_what_it_found(tmp_path: Path):
    model, folder = "deit_mhla_tiny:depth=1,embed_dim=24", tmp_path / "run"
    case = {"model": model, "what": "one", "gpus": 1, "losses": True, "batch": 4, "folder": str(folder)}
    bench.main(["--device", "cpu", "--tiny", "--case", json.dumps(case)])
    found = json.loads((folder / "found.json").read_text())
    assert len(found["losses"]) == 4 and found["peak_gib"] is None


def test_ratios_are_of_one_gpu(monkeypatch: pytest.MonkeyPatch):
    found = {"step_s": 0.5, "peak_gib": 1.0, "losses": None}
    monkeypatch.setattr(
        bench, "measure", lambda model, what, gpus, arguments, argv: {"what": what, "gpus": gpus, **found}
    )
    rows = list(bench.speed_rows("any", bench.parse_arguments(["--batch", "3"]), []))
    assert [(row["imgs_per_s"], row["ratio"]) for row in rows] == [(6, 1), *[(12, 2)] * 4]
    rows = list(bench.speed_rows("any", bench.parse_arguments(["--batch", "3", "--ways", "one", "ddp", "tokens"]), []))
    assert [(row["what"], row["gpus"]) for row in rows] == [("one", 1), ("ddp", 2), ("tokens", 2)]
    assert rows[-1]["imgs_per_s"] == 6  # of the samples that both share


def test_files_are_named_after_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = {"step_s": 0.5, "peak_gib": None, "losses": [1.0]}
    monkeypatch.setattr(
        bench,
        "measure",
        lambda model, what, gpus, arguments, argv: {"model": model, "batch": 4, "what": what, "gpus": gpus, **found},
    )
    for options in ([], ["--losses"], ["--checkpointing"], ["--losses", "--checkpointing"]):
        bench.main(["--device", "cpu", "--tiny", "--ways", "one", "--out", str(tmp_path), *options])
    names = [
        "scale_checkpointing_cpu.csv",
        "scale_cpu.csv",
        "scale_losses_checkpointing_cpu.csv",
        "scale_losses_cpu.csv",
    ]
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == names
