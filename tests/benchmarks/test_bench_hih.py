"""`bench_hih.py`: its columns, its gate, and a small run on a CPU."""

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import bench_hih as bench
from benchmarks import columns
from benchmarks import hih_cases as cases


def test_bench_hih_writes_tables(tmp_path: Path, capsys):
    arguments = ["--device", "cpu", "--tiny", "--shapes", "model,sweep", "--out", str(tmp_path), "--limit_ms", "1e6"]
    bench.main(arguments)
    printed = capsys.readouterr().out
    assert "correct: torch_r1, torch_r4, loop_r1, " in printed and "torch_r4: time grows as N^" in printed
    assert printed.count(" | torch_r4 | ") == 4
    with (tmp_path / "hih_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    shapes = ("n256", "n1024", "n4096", "n16384")
    assert {(r["shape"], r["column"]) for r in rows} == {
        (shape, column) for shape in shapes for column in ("torch_r1", "torch_r4", "loop_r1", "mhla", "math")
    }
    assert all(float(r["forward_backward_ms"]) > 0 and float(r["forward_floor_ms"]) > 0 for r in rows)


def test_shapes_and_columns_of_head_in_head(monkeypatch, capsys):
    by_name = {shape.name: shape for shape in cases.SHAPES}
    sizes = {(s.batch, s.tokens, s.heads, s.head_dim) for s in cases.SHAPES if s.group != "scaling"}
    assert sizes == {(128, 256, 6, 64), (32, 1024, 16, 64), (8, 4096, 16, 64), (2, 16384, 16, 64)}
    assert len({s.batch * s.tokens for s in cases.SHAPES if s.group == "sweep"}) == 1
    assert len({s.batch for s in cases.SHAPES if s.group == "scaling"}) == 1
    features, gates = 2 * 8 * 4096 * 16 * 64, 4 * 8 * 4096 * 16
    assert cases.floor_bytes(by_name["n4096"]) == (4 * features + 2 * gates, 11 * features + 6 * gates)
    assert columns.select_shapes("sweep,n256,n1024", cases.SHAPES)[-1] is by_name["n256"]

    tiny = by_name["n1024"].tiny()
    generator = torch.Generator().manual_seed(0)
    outs = []
    for name in ("torch_r1", "loop_r1"):
        inputs = cases.COLUMNS[name].make(tiny, torch.Generator().manual_seed(0))
        assert inputs[-1].tolist() == [[[1.0]]] * tiny.heads
        outs.append(cases.COLUMNS[name].run(tiny, *inputs))
    torch.testing.assert_close(*outs)
    mask = cases.sub_head_mask((3, 5, 4, 4), generator)
    torch.testing.assert_close(mask.diagonal(dim1=-2, dim2=-1), torch.ones(3, 5, 4))

    monkeypatch.setattr(bench, "why_no_fla", lambda: "package fla-core is not installed")
    assert [c.name for c in bench.select_columns(["r1", "fla"])] == ["r1"]
    assert capsys.readouterr().out == "fla: package fla-core is not installed, its rows are left out\n"


def test_the_gate_of_head_in_head_refuses_wrong_results(monkeypatch):
    columns = cases.COLUMNS
    device, right = torch.device("cpu"), bench.head_in_head
    assert bench.check_column(columns["torch_r4"], "head", device) == []
    assert bench.check_column(columns["torch_r4"], "token", device) == []

    def wrong_gradient(q, k, v, beta, log_decay, mask, impl, **options):
        factor = 0.98 if impl == "reference" else 1
        return right(q, k, v, beta, log_decay, factor * mask + (1 - factor) * mask.detach(), impl="torch", **options)

    monkeypatch.setattr(bench, "head_in_head", wrong_gradient)
    for mask in ("head", "token"):
        (failure,) = bench.check_column(columns["loop_r1"], mask, device)
        assert failure.startswith(f"relative error of dmask of loop_r1 with a mask for each {mask} is ")
    with pytest.raises(SystemExit, match="nothing timed"):
        bench.gate([], [columns["loop_r1"]], device, jobs=1)
    monkeypatch.setattr(bench, "head_in_head", right)
    fla = cases.COLUMNS["torch_r1"]
    monkeypatch.setattr(bench, "run_fla", lambda shape, *x: 1.1 * fla.run(shape, *x, torch.ones(shape.heads, 1, 1)))
    assert len(bench.check_fla(device, "torch")) == 1


def test_what_others_refuse_is_reported_and_the_forward_pass_kept(capsys):
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *x):
            return x[2].clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("Triton is too new (see #640)\nmore")

    theirs = columns.Column("fla", cases.delta_inputs, lambda shape, *x: Refuses.apply(*x))
    shape, device = cases.SHAPES[1].tiny(), torch.device("cpu")
    rows, notes = columns.measure_all(
        [shape], [theirs, cases.COLUMNS["torch_r1"]], device, 1e4, bench.describe, cases.floor_bytes
    )
    assert notes == ["n1024, fla: refused by fla: Triton is too new (see #640)"]
    assert rows[0]["forward_ms"] > 0 and rows[0]["forward_backward_ms"] is None
    columns.print_rows(rows, "torch_r1")
    theirs_shown, ours_shown = capsys.readouterr().out.strip().splitlines()[-2:]
    assert theirs_shown.startswith("| n1024 | fla | ") and " | refused | " in theirs_shown
    assert ours_shown.startswith("| n1024 | torch_r1 | ") and ours_shown.count(", 1.00) | ") == 2
    ours = columns.Column("ours", theirs.make, theirs.run, ours=True)
    with pytest.raises(RuntimeError, match="too new"):
        columns.measure(shape, ours, device, 1e4)
