"""`bench_head_mixes.py`: its forms agree, its gate refuses, and it runs on a CPU."""

import csv
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import bench_head_mixes as bench
from benchmarks import head_mixes_cases as cases


def test_all_forms_compute_the_same():
    """In float64, so far as they run on a CPU; softmax is another op than the exact form, which is MHLA."""
    shape = replace(cases.SHAPES[1].tiny(), block_grid=(2, 2))
    for contest in cases.CONTESTS.values():
        inputs = [x.detach().double() for x in contest.make(shape, torch.Generator().manual_seed(0))]
        expected = contest.exact(shape, *inputs)
        forms = [form.run for form in contest.columns if form.device is None]
        for run in (*forms, contest.eager):
            for a, b in zip(run(shape, *inputs), expected, strict=True):
                torch.testing.assert_close(a, b)


def test_softmax_sees_all_pseudo_heads():
    shape = cases.SHAPES[0].tiny()
    q, k, v, weights, collapse, _ = inputs = [
        x.detach().double() for x in cases.op_inputs(shape, torch.Generator().manual_seed(0))
    ]
    B, N, H, D, P = shape.batch, shape.tokens, shape.heads, shape.head_dim, shape.pseudo_heads
    mixed = [torch.einsum("phm,bnmd->bhnpd", w.view(P, H, H), x) for w, x in zip(weights, (q, k, v), strict=True)]
    q, k, v = (x.reshape(B, H, N * P, D) for x in mixed)
    out = (q @ k.mT * D**-0.5).softmax(-1) @ v
    own = collapse[0].view(H, P, H).diagonal(dim1=0, dim2=2)  # [P, H]
    expected = torch.einsum("ph,bhnpd->bnhd", own, out.view(B, H, N, P, D))
    (math_form,) = (form for form in cases.CONTESTS["op"].columns if form.name == "math")
    torch.testing.assert_close(math_form.run(shape, *inputs)[0], expected)


def test_the_gate_refuses_wrong_results():
    shape = cases.SHAPES[0].tiny()
    contest = cases.CONTESTS["mix"]
    assert bench.check_contest(contest, shape, torch.device("cpu")) == []

    def wrong(shape, *inputs):
        return tuple(x * 1.05 for x in contest.columns[0].run(shape, *inputs))

    failures = bench.check_contest(
        replace(contest, columns=(cases.Column("wrong", contest.make, wrong, ours=True),)), shape, torch.device("cpu")
    )
    assert len(failures) == 3 + 3 + 1 and all("wrong of mix" in line for line in failures)


def test_bench_head_mixes_writes_a_table(tmp_path: Path, capsys):
    arguments = ["--device", "cpu", "--tiny", "--shapes", "n196_p2", "--out", str(tmp_path)]
    bench.main(arguments)
    printed = capsys.readouterr().out
    assert "correct: ours in mix, collapse, op at 1 shapes" in printed
    assert "n196_p2, op: over MHLA" in printed and "n196_p2, layer: over MHLA" in printed
    with (tmp_path / "head_mixes_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["part"], row["form"]) for row in rows] == [
        *((part, form) for part in ("mix", "collapse") for form in ("kernel", "einsum")),
        *(("op", form) for form in ("mhla", "math")),
        *(("layer", form) for form in ("mhla", "softmax")),
    ]
    assert all(float(row[time]) > 0 for row in rows for time in ("forward_ms", "forward_backward_ms"))
