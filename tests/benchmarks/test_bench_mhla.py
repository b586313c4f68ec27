"""`bench_mhla.py`: the maths of its columns, its gate, its shapes, and a small run on a CPU."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_mhla as bench
from benchmarks import columns
from benchmarks import mhla_cases as cases
from headmix_vision.ops import TokenBlocks, mhla


def exact_inputs(shape) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
    m = shape.blocks.num_blocks
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    return [q, k, v, torch.rand(m, m, generator=generator, dtype=torch.float64)]


def test_the_released_form_is_mhla_with_its_normaliser():
    shape = cases.Shape("any", 2, 3, (6, 9), 24, (2, 3))
    q, k, v, mixing = exact_inputs(shape)
    expected = mhla(q, k, v, mixing, shape.blocks, normalizer="source_block", impl="reference")
    order = shape.blocks.tables(q).tokens
    out = cases.run_released(shape, q[:, order], k[:, order], v[:, order], mixing)
    torch.testing.assert_close(out, expected[:, order].flatten(-2))


def test_the_budget_is_of_the_same_maths():
    """In float64 the form whose bf16 error is the gate's budget agrees with the reference, uneven blocks and all."""
    shape = cases.Shape("any", 2, 2, (5, 7), 16, (2, 3), prefix=2)
    inputs = exact_inputs(shape)
    out = cases.run_low_precision(shape, *inputs)
    torch.testing.assert_close(out, cases.run_mhla("reference", shape, *inputs))


def test_linear_attention_is_mhla_with_one_block():
    shape = cases.Shape("any", 2, 3, (11,), 16, (1,))
    q, k, v, _ = exact_inputs(shape)
    expected = mhla(q, k, v, torch.ones(1, 1), TokenBlocks.from_grid((11,), (1,)), impl="reference")
    out = cases.run_linear(shape, *(x.transpose(1, 2) for x in (q, k, v)))
    torch.testing.assert_close(out.transpose(1, 2), expected)
    gridded = cases.Shape("any", 2, 3, (2, 5), 16, (1, 2), prefix=1)  # the same tokens, blocks and prefix left out
    torch.testing.assert_close(cases.run_linear_kernel(gridded, q, k, v, torch.ones(1, 1)), expected)


@pytest.mark.parametrize(("unit", "shares"), [("tile", 9 / 20), ("token", 9 / 20)])
def test_sliding_attention_sees_three_tiles_along_each_axis(unit, shares):
    shape = cases.Shape("any", 1, 2, (2, 10, 8), 8, (1, 5, 4))  # tiles of 2x2x2 tokens
    order = [
        (t, h + i, w + j)
        for h in range(0, 10, 2)
        for w in range(0, 8, 2)
        for t in (0, 1)
        for i in (0, 1)
        for j in (0, 1)
    ]

    def sees(query: int, key: int, size: int) -> bool:
        if unit == "tile":
            query, key, size, width = query // 2, key // 2, size // 2, 3
        else:
            width = 6
        start = min(max(query - width // 2, 0), size - width)
        return start <= key < start + width

    mask = torch.tensor([[sees(a[1], b[1], 10) and sees(a[2], b[2], 8) for b in order] for a in order])
    assert mask.float().mean() == pytest.approx(3 / 5 * 3 / 4)
    q, k, v = (torch.randn(1, 2, shape.tokens, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(cases.run_flex(unit, shape, q, k, v), expected)


def test_columns_of_missing_packages_are_left_out(capsys):
    gone = cases.Column("gone", cases.head_inputs, cases.run_linear, module="no_such_package.ops", package="no-such")
    assert columns.importable([cases.COLUMNS["math"], gone]) == [cases.COLUMNS["math"]]
    assert capsys.readouterr().out.startswith("gone: left out, no-such is missing or broken (No module named")


def test_every_column_runs_on_its_own_inputs():
    shape = cases.Shape("any", 1, 2, (4, 4), 16, (2, 2), prefix=1)
    for name in ("auto", "torch", "math", "released", "linear_kernel", "linear_compiled"):
        column = cases.COLUMNS[name]
        inputs = column.make(shape, torch.Generator().manual_seed(0))
        out = column.run(shape, *inputs)
        grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
        assert all(g.isfinite().all() for g in grads)
        assert {x.dtype for x in inputs[:3]} == {out.dtype} == {torch.bfloat16}
    q, k, v, _ = cases.raster_inputs(shape, torch.Generator().manual_seed(0))
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_shapes():
    by_name = {shape.name: shape for shape in cases.SHAPES}
    assert len(by_name) == len(cases.SHAPES)
    tokens = {
        "deit": 256,
        "dit256": 256,
        "dit512": 1024,
        "k4": 4096,
        "k16": 16384,
        "wan": 31500,
        "n196": 196,
        "n197": 197,
    }
    assert {name: by_name[name].tokens for name in tokens} == tokens
    assert by_name["wan"].blocks.num_blocks == 150
    assert by_name["deit"].floor_bytes == 4 * 128 * 6 * 256 * 64 * 2

    sweep = [s for s in cases.SHAPES if s.group == "sweep"]
    assert [s.tokens for s in sweep] == [2**e for e in range(6, 17)]
    assert {s.batch * s.tokens for s in sweep} == {65536}
    scaling = [s for s in cases.SHAPES if s.group == "scaling"]
    assert [s.tokens for s in scaling] == [4096, 8192, 16384, 32768, 65536]
    assert len({s.batch for s in scaling}) == 1
    assert {s.blocks.num_blocks for s in (*sweep, *scaling)} == {16}

    assert [s.name for s in columns.select_shapes("k4,deit,k4", cases.SHAPES)] == ["k4", "deit"]
    assert columns.select_shapes("all", cases.SHAPES) == list(cases.SHAPES)
    assert all(s.tiny().tokens <= 1200 for s in cases.SHAPES)


def test_the_gate_refuses_wrong_results(monkeypatch):
    shape = cases.Shape("small", 2, 2, (7, 7), 24, (3, 3), prefix=1)
    for causal in (False, True):
        assert bench.check_shape(replace(shape, causal=causal), ["torch"], "cpu") == []

    def wrong_gradient(shape, q, k, v, mixing):
        return cases.run_mhla("torch", shape, q, k * 1.0, v, mixing + 0.02 * (mixing - mixing.detach()))

    def wrong_value(*arguments):
        return cases.run_mhla("torch", *arguments) * 1.1

    for run, what in ((wrong_gradient, {"dmixing"}), (wrong_value, {"out", "dq", "dk", "dv", "dmixing"})):
        column = cases.Column("wrong", cases.raster_inputs, run, ours=True)
        monkeypatch.setitem(cases.COLUMNS, "wrong", column)
        failures = bench.check_shape(shape, ["wrong"], "cpu")
        assert {line.split(" of ")[1].split(" ")[0] for line in failures} == what
        with pytest.raises(SystemExit, match="nothing timed"):
            bench.gate([shape], [column], torch.device("cpu"), jobs=1)


def test_causal_attention_has_its_own_table_without_what_cannot_be_causal(tmp_path: Path):
    arguments = ["--device", "cpu", "--tiny", "--causal", "--shapes", "deit", "--limit_ms", "1e6"]
    bench.main([*arguments, "--out", str(tmp_path)])
    with (tmp_path / "mhla_causal_cpu.csv").open() as file:
        assert [row["column"] for row in csv.DictReader(file)] == ["torch", "math"]


def test_scaling_exponents():
    rows = [
        {"column": "a", "batch": 1, "tokens": n, "forward_ms": 3 * n**1.5, "forward_backward_ms": n**2.0}
        for n in (64, 256, 1024)
    ]
    rows.append({"column": "skipped", "batch": 1, "tokens": 64, "forward_ms": 1.0, "forward_backward_ms": None})
    rows = [row | {"group": "scaling"} for row in rows]
    # With as many tokens in all, what is linear takes as long.
    rows += [{**rows[0], "group": "sweep", "batch": b, "tokens": 64 // b, "forward_ms": 7.0} for b in (1, 4)]
    exponents = columns.scaling_exponents(rows)
    assert exponents.keys() == {"a"} and exponents["a"] == pytest.approx((1.5, 2.0))
    assert columns.scaling_exponents(rows, "sweep")["a"][0] == pytest.approx(1.0)


def test_bench_mhla_writes_table_and_plot(tmp_path: Path, capsys):
    names = "deit,n197,sweep_64,sweep_16384,scaling_4096,scaling_65536"
    arguments = ["--device", "cpu", "--tiny", "--shapes", names, "--out", str(tmp_path), "--limit_ms", "1e6"]
    bench.main(arguments)
    printed = capsys.readouterr().out
    assert "correct: torch, linear_kernel at 6 shapes" in printed and "torch: time grows as N^" in printed
    with (tmp_path / "mhla_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["shape"], r["column"]) for r in rows} == {
        (shape, column)
        for shape in names.split(",")
        for column in ("torch", "math", "released", "linear_kernel", "linear_compiled")
        if not shape.startswith("scaling") or column in ("torch", "linear_kernel")
    }
    assert all(float(r["forward_backward_ms"]) > 0 and float(r["forward_floor_ms"]) > 0 for r in rows)
    assert all(
        math.isclose(float(r["forward_backward_floor_ms"]) / float(r["forward_floor_ms"]), 2.75, rel_tol=1e-3)
        for r in rows
    )
    image = (tmp_path / "mhla_cpu.svg").read_text()
    assert "memory's floor" in image and len(image) < 100_000
