"""`bench_conv.py`: its columns agree, its gate refuses, and it runs on a CPU."""

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import bench_conv as bench


@pytest.mark.parametrize("name", ["deit_s_224", "hih_video"])
def test_columns_compute_the_same(name):
    shape = bench.SHAPES[name].tiny()
    inputs = [x.detach().double() for x in bench.make(shape, torch.Generator().manual_seed(0))]
    torch.testing.assert_close(bench.run_ours(shape, *inputs), bench.run_pytorch(shape, *inputs))


def test_the_gate_refuses_wrong_results():
    shape = bench.SHAPES["video"].tiny()
    assert bench.check_shape(shape, torch.device("cpu")) == []
    failures = bench.check_shape(shape, torch.device("cpu"), lambda *inputs: 1.05 * bench.run_ours(*inputs))
    assert [line.split()[4] for line in failures] == ["out", "dx", "dweight", "dbias"]


def test_bench_conv_writes_a_table(tmp_path: Path, capsys):
    bench.main(["--device", "cpu", "--tiny", "--shapes", "deit_s_224", "hih_video", "--out", str(tmp_path)])
    assert "correct: ours at 2 shapes" in capsys.readouterr().out
    with (tmp_path / "conv_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = ("deit_s_224", "hih_video")
    assert [(row["shape"], row["column"]) for row in rows] == [(s, c) for s in names for c in ("ours", "pytorch")]
    assert all(float(row[name]) > 0 for row in rows for name in ("forward_ms", "forward_backward_ms"))
