"""`bench_wan.py`: a small run on a CPU."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench_wan as bench
from benchmarks import bench_wan_stream


def test_bench_wan_compares_with_softmax(tmp_path: Path):
    bench.main(["--device", "cpu", "--tiny", "--windows", "1", "--out", str(tmp_path)])
    with (tmp_path / "wan_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["mode"], row["row"]) for row in rows] == [(mode, row) for mode in bench.MODES for row in bench.ROWS]
    assert [float(row["speed_of_installed"]) for row in rows if row["row"] == "installed"] == [1, 1]
    with pytest.raises(SystemExit, match="like 21x30x50"):
        bench.main(["--device", "cpu", "--tiny", "--sizes", "21x30"])


def test_bench_wan_stream_keeps_one_size(tmp_path: Path):
    bench_wan_stream.main(["--device", "cpu", "--tiny", "--groups", "4", "--out", str(tmp_path)])
    with (tmp_path / "wan_stream_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["frames"]) for row in rows] == [25, 53, 81, 109]
    assert float(rows[1]["state_gib"]) == float(rows[3]["state_gib"]) > 0


@pytest.mark.slow
def test_two_processes_train_as_one_in_shards_and_under_context_parallelism(tmp_path: Path):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = ["--device", "cpu", "--tiny", "--steps", "1", "--out", str(tmp_path)]
    subprocess.run(
        [*start, "-m", "benchmarks.bench_wan_gpus", *options], check=True, cwd=Path(bench.__file__).parents[1]
    )
    with (tmp_path / "wan_gpus_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == ["one", "fsdp2", "context"]
    assert float(rows[0]["first_loss"]) > float(rows[0]["last_loss"]) and float(rows[2]["largest_difference"]) < 1e-4
