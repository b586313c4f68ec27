"""`bench_context_parallel.py`: a small run on a CPU, in a group of one process."""

import csv
from pathlib import Path

import pytest

from benchmarks import bench_context_parallel


def test_times_errors_and_bytes(monkeypatch, tmp_path: Path):
    group = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in group.items():
        monkeypatch.setenv(name, str(value))
    arguments = ["--device", "cpu", "--tiny", "--grids", "4x4x4/2x2x2", "--repeats", "1", "--out", str(tmp_path)]
    bench_context_parallel.main(arguments)
    with (tmp_path / "context_parallel_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["what"], row["pass"]) for row in rows] == [
        (what, mode) for what in ("mhla", "layer", "model") for mode in ("forward", "both")
    ]
    heads, blocks, dim = 2, 8, 8
    summaries = heads * blocks * dim * (dim + 1) * 4  # float32: types of the torch form
    for row, sent in zip(rows, (summaries, 2 * summaries + 4 * blocks**2), strict=False):  # and the mixing's gradient
        assert int(row["all_gather_into_tensor_bytes"]) == sent and int(row["all_reduce_bytes"]) == 0
    assert all(0 < float(row["error_spread"]) < 1e-2 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--grids", "4x4/2x2"], "three axes"), (["--repeats", "0"], "positive"), ([], "torchrun")],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_wrong_calls_end_with_one_line(monkeypatch, arguments, message):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        bench_context_parallel.main(["--device", "cpu", "--tiny", *arguments])
