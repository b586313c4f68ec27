"""The benchmark scripts: the maths of the columns, the gate, the numbers derived, and small runs on a CPU."""

import csv
import importlib
import math
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headmix_vision.layers import CORES
from headmix_vision.ops import TokenBlocks, mhla
from headmix_vision.training.cli import main as train_classifier
from headmix_vision.training.generation_cli import main as train_generator
from headmix_vision.training.run_cli import RunCLI

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a module of the scripts' folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def cases(load) -> ModuleType:
    return load("mhla_cases")


def exact_inputs(shape) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
    m = shape.blocks.num_blocks
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    return [q, k, v, torch.rand(m, m, generator=generator, dtype=torch.float64)]


def test_the_released_form_is_mhla_with_its_normaliser(cases):
    shape = cases.Shape("any", 2, 3, (6, 9), 24, (2, 3))
    q, k, v, mixing = exact_inputs(shape)
    expected = mhla(q, k, v, mixing, shape.blocks, normalizer="source_block", impl="reference")
    order = shape.blocks.tables(q).tokens
    out = cases.run_released(shape, q[:, order], k[:, order], v[:, order], mixing)
    torch.testing.assert_close(out, expected[:, order].flatten(-2))


def test_the_budget_is_of_the_same_maths(cases):
    """In float64 the form whose bf16 error is the gate's budget agrees with the reference, uneven blocks and all."""
    shape = cases.Shape("any", 2, 2, (5, 7), 16, (2, 3), prefix=2)
    inputs = exact_inputs(shape)
    out = cases.run_low_precision(shape, *inputs)
    torch.testing.assert_close(out, cases.run_mhla("reference", shape, *inputs))


def test_linear_attention_is_mhla_with_one_block(cases):
    shape = cases.Shape("any", 2, 3, (11,), 16, (1,))
    q, k, v, _ = exact_inputs(shape)
    expected = mhla(q, k, v, torch.ones(1, 1), TokenBlocks.from_grid((11,), (1,)), impl="reference")
    out = cases.run_linear(shape, *(x.transpose(1, 2) for x in (q, k, v)))
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_every_column_runs_on_its_own_inputs(cases):
    shape = cases.Shape("any", 1, 2, (4, 4), 16, (2, 2), prefix=1)
    for name in ("auto", "torch", "math", "released", "linear"):
        column = cases.COLUMNS[name]
        inputs = column.make(shape, torch.Generator().manual_seed(0))
        out = column.run(shape, *inputs)
        grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
        assert all(g.isfinite().all() for g in grads)
        assert {x.dtype for x in inputs[:3]} == {out.dtype} == {torch.bfloat16}
    q, k, v, _ = cases.raster_inputs(shape, torch.Generator().manual_seed(0))
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_shapes(cases):
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

    assert [s.name for s in cases.select_shapes("k4,deit,k4")] == ["k4", "deit"]
    assert cases.select_shapes("all") == list(cases.SHAPES)
    assert all(s.tiny().tokens <= 1200 for s in cases.SHAPES)


def test_the_gate_refuses_wrong_results(cases, load, monkeypatch):
    bench = load("bench_mhla")
    shape = cases.Shape("small", 2, 2, (7, 7), 24, (3, 3), prefix=1)
    assert bench.check_shape(shape, ["torch"], "cpu") == []

    def wrong_gradient(shape, q, k, v, mixing):
        return cases.run_mhla("torch", shape, q, k * 1.0, v, mixing + 0.02 * (mixing - mixing.detach()))

    def wrong_value(*arguments):
        return cases.run_mhla("torch", *arguments) * 1.1

    for run, what in ((wrong_gradient, {"dmixing"}), (wrong_value, {"out", "dq", "dk", "dv", "dmixing"})):
        column = cases.Column("wrong", cases.raster_inputs, run, ours=True)
        monkeypatch.setitem(cases.COLUMNS, "wrong", column)
        failures = bench.check_shape(shape, ["wrong"], "cpu")
        assert {line.split(" of ")[1] for line in failures} == what
        with pytest.raises(SystemExit, match="nothing timed"):
            bench.gate([shape], [column], torch.device("cpu"), jobs=1)


def test_scaling_exponents(load):
    rows = [
        {"column": "a", "batch": 1, "tokens": n, "forward_ms": 3 * n**1.5, "forward_backward_ms": n**2.0}
        for n in (64, 256, 1024)
    ]
    rows.append({"column": "skipped", "batch": 1, "tokens": 64, "forward_ms": 1.0, "forward_backward_ms": None})
    rows = [row | {"group": "scaling"} for row in rows]
    # With as many tokens in all, what is linear takes as long.
    rows += [{**rows[0], "group": "sweep", "batch": b, "tokens": 64 // b, "forward_ms": 7.0} for b in (1, 4)]
    exponents = load("columns").scaling_exponents(rows)
    assert exponents.keys() == {"a"} and exponents["a"] == pytest.approx((1.5, 2.0))
    assert load("columns").scaling_exponents(rows, "sweep")["a"][0] == pytest.approx(1.0)


def test_measuring(load, tmp_path: Path):
    measuring = load("measuring")
    device = torch.device("cpu")
    timing = measuring.time_calls([lambda: time.sleep(0.002)] * 2, device, budget_s=0.01)
    assert timing.graph_ms is None and timing.ms >= 2
    assert measuring.peak_mib(lambda: None, device) is None
    assert [measuring.device_slug(x) for x in ("NVIDIA H200", "cpu")] == ["h200", "cpu"]
    assert measuring.format_table(["a", "b"], [["long", "1"], ["x", "22"]]) == "a      b\nlong   1\nx     22"

    measuring.write_csv(tmp_path / "new" / "x.csv", [{"a": 1 / 3, "b": None, "c": "name"}])
    assert (tmp_path / "new" / "x.csv").read_text() == "a,b,c\n0.33333,,name\n"


def test_bench_mhla_writes_table_and_plot(load, tmp_path: Path, capsys):
    names = "deit,n197,sweep_64,sweep_16384,scaling_4096,scaling_65536"
    arguments = ["--device", "cpu", "--tiny", "--shapes", names, "--out", str(tmp_path)]
    load("bench_mhla").main(arguments)
    printed = capsys.readouterr().out
    assert "correct: torch at 6 shapes" in printed and "torch: time grows as N^" in printed
    with (tmp_path / "mhla_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["shape"], r["column"]) for r in rows} == {
        (shape, column)
        for shape in names.split(",")
        for column in ("torch", "math", "released", "linear")
        if not shape.startswith("scaling") or column in ("torch", "linear")
    }
    assert all(float(r["forward_backward_ms"]) > float(r["forward_floor_ms"]) > 0 for r in rows)
    assert all(
        math.isclose(float(r["forward_backward_floor_ms"]) / float(r["forward_floor_ms"]), 2.75, rel_tol=1e-3)
        for r in rows
    )
    image = (tmp_path / "images" / "mhla_cpu.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) < 300_000


def test_bench_hih_writes_tables_and_plot(load, tmp_path: Path, capsys):
    arguments = ["--device", "cpu", "--tiny", "--shapes", "model,sweep", "--out", str(tmp_path)]
    load("bench_hih").main(arguments)
    printed = capsys.readouterr().out
    assert "correct: torch_r1, torch_r4, loop_r1, " in printed and "torch_r4: time grows as N^" in printed
    assert printed.count("| torch, r = 4 | ") == 4
    with (tmp_path / "hih_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    shapes = ("n256", "n1024", "n4096", "n16384")
    assert {(r["shape"], r["column"]) for r in rows} == {
        (shape, column) for shape in shapes for column in ("torch_r1", "torch_r4", "loop_r1", "mhla", "math")
    }
    assert all(float(r["forward_backward_ms"]) > float(r["forward_ms"]) > float(r["forward_floor_ms"]) for r in rows)
    image = (tmp_path / "images" / "hih_cpu.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) < 300_000


def test_shapes_and_columns_of_head_in_head(load, monkeypatch, capsys):
    cases = load("hih_cases")
    by_name = {shape.name: shape for shape in cases.SHAPES}
    sizes = {(s.batch, s.tokens, s.heads, s.head_dim) for s in cases.SHAPES if s.group != "scaling"}
    assert sizes == {(128, 256, 6, 64), (32, 1024, 16, 64), (8, 4096, 16, 64), (2, 16384, 16, 64)}
    assert len({s.batch * s.tokens for s in cases.SHAPES if s.group == "sweep"}) == 1
    assert len({s.batch for s in cases.SHAPES if s.group == "scaling"}) == 1
    features, gates = 2 * 8 * 4096 * 16 * 64, 4 * 8 * 4096 * 16
    assert cases.floor_bytes(by_name["n4096"]) == (4 * features + 2 * gates, 11 * features + 6 * gates)
    assert load("mhla_cases").select_shapes("sweep,n256,n1024", cases.SHAPES)[-1] is by_name["n256"]

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

    bench = load("bench_hih")
    monkeypatch.setattr(bench, "why_no_fla", lambda: "package fla-core is not installed")
    assert [c.name for c in bench.select_columns(["r1", "fla"])] == ["r1"]
    assert capsys.readouterr().out == "fla: package fla-core is not installed, its rows are left out\n"


def test_the_gate_of_head_in_head_refuses_wrong_results(load, monkeypatch):
    bench, columns = load("bench_hih"), load("hih_cases").COLUMNS
    device, right = torch.device("cpu"), bench.head_in_head
    assert bench.check_column(columns["torch_r4"], "head", device) == []
    assert bench.check_column(columns["torch_r4"], "token", device) == []

    def wrong_gradient(*arguments, impl):
        q, k, v, beta, log_decay, mask, *rest = arguments
        factor = 0.98 if impl == "reference" else 1
        return right(q, k, v, beta, log_decay, factor * mask + (1 - factor) * mask.detach(), *rest, impl="torch")

    monkeypatch.setattr(bench, "head_in_head", wrong_gradient)
    for mask in ("head", "token"):
        (failure,) = bench.check_column(columns["loop_r1"], mask, device)
        assert failure.startswith(f"relative error of dmask of loop_r1 with a mask for each {mask} is ")
    with pytest.raises(SystemExit, match="nothing timed"):
        bench.gate([], [columns["loop_r1"]], device, jobs=1)
    monkeypatch.setattr(bench, "head_in_head", right)
    fla = load("hih_cases").COLUMNS["torch_r1"]
    monkeypatch.setattr(bench, "run_fla", lambda shape, *x: 1.1 * fla.run(shape, *x, torch.ones(shape.heads, 1, 1)))
    assert len(bench.check_fla(device, "torch")) == 1


def test_what_others_refuse_is_reported_and_the_forward_pass_kept(load):
    bench, cases, columns = load("bench_hih"), load("hih_cases"), load("columns")

    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *x):
            return x[2].clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("Triton is too new (see #640)\nmore")

    theirs = columns.Column("fla", cases.delta_inputs, lambda shape, *x: Refuses.apply(*x))
    shape, device = cases.SHAPES[1].tiny(), torch.device("cpu")
    rows, notes = bench.measure_all([shape], [theirs, cases.COLUMNS["torch_r1"]], device, 1e4)
    assert notes == ["n1024, fla: refused by fla: Triton is too new (see #640)"]
    assert rows[0]["forward_ms"] > 0 and rows[0]["forward_backward_ms"] is None
    (line,) = (line for line in load("hih_report").tables(rows).splitlines() if line.startswith("| flash-linear"))
    assert line.count("refused") == 1 and line.split(" | ")[2] == "1.00"
    ours = columns.Column("ours", theirs.make, theirs.run, ours=True)
    with pytest.raises(RuntimeError, match="too new"):
        columns.measure(shape, ours, device, 1e4)


def test_bars_of_head_in_head(load):
    report = load("hih_report")
    times = {"fla": (1.0, None), "r1": (1.2, 2.0), "r4": (3.7, 7.0), "torch_r4": (9.0, 9.0)}
    rows = [
        {"shape": "a", "group": "sweep", "column": name, "forward_ms": x, "forward_backward_ms": y}
        for name, (x, y) in times.items()
    ]
    lines = report.bars(rows)
    assert [line.rsplit(": ", 1)[1] for line in lines] == ["met", "missed", "met"]
    assert lines[1] == "a forward: Triton, r = 4 takes 3.08x Triton, r = 1, at most 3: missed"
    assert [report.label(name) for name in ("torch_r8", "mhla")] == ["torch, r = 8", "MHLA"]


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


@pytest.mark.timeout(300)
def test_canvas_comparison_trains_draws_scores_and_goes_on(load, tmp_path: Path, capsys):
    comparison, out = load("compare_canvas"), tmp_path / "canvas.csv"
    arguments = ["--out", str(out), "--runs", str(tmp_path / "runs"), "--models", "mhla+CPE+gate", "--seeds", "3"]
    arguments += ["--dim", "16", "--depth", "1", "--heads", "2", "--steps-cls", "2", "--steps-gen", "2", "--jobs", "2"]
    arguments += ["--samples", "18", "--sampling-steps", "2", "--cls-options=--trainer.limit_val_batches 1"]
    comparison.main(arguments)
    written, printed = out.read_text(), capsys.readouterr().out
    classifier, generator, *floors = csv.DictReader(written.splitlines())
    assert (classifier["task"], generator["task"]) == ("classification", "generation")
    assert {row["task"] for row in floors} == {"floor"} and len(floors) == 2
    assert 0 <= float(classifier["last_top1_percent"]) <= float(classifier["best_top1_percent"]) <= 100
    assert all(0 < float(floor["fid"]) < float(generator["fid"]) for floor in floors)
    assert len({row["features"] for row in (generator, *floors)}) == 1
    assert generator["features"].startswith("mhla+CPE+gate seed 3 ")
    assert f"| {float(generator['fid']):.3f} |" in printed and "| mhla+CPE+gate |" in printed

    comparison.main(arguments)
    assert out.read_text() == written and "generation" not in capsys.readouterr().out
    out.write_text("\n".join(line for line in written.splitlines() if not line.startswith("generation")))
    comparison.main(arguments)
    assert out.read_text() == written, "samples that are there are scored again, alike"


def test_canvas_comparison_changes_nothing_but_the_attention(load, tmp_path: Path, monkeypatch):
    comparison, seen = load("compare_canvas"), []
    arguments = comparison.parse_arguments(["--out", str(tmp_path / "x.csv"), "--models", *comparison.MODELS])
    runs = comparison.Runs(arguments)
    monkeypatch.chdir(FOLDER.parent)
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    for task, main in (("classification", train_classifier), ("generation", train_generator)):
        recipes = []
        for model, (core, extras) in comparison.MODELS.items():
            options = runs.options(comparison.Case(task, model, 1))
            config = f"configs/{'cls' if task == 'classification' else 'gen'}/canvas.yaml"
            main(["fit", "-c", config, "--run_dir", str(tmp_path / "run"), *map(str, options)])
            cli = seen.pop()
            attention = cli.model.net.blocks[0].attn
            assert isinstance(attention.core, CORES[core])
            assert [attention.cpe is not None, attention.gate is not None] == [bool(extras)] * 2
            settings = cli.config["fit"].as_dict()
            for name in ("cpe", "output_gate"):
                settings["model"]["model_args"].pop(name)
            settings["model"].pop("name")
            recipes.append(settings)
        assert all(recipe == recipes[0] for recipe in recipes)
        assert recipes[0]["model"]["model_args"]["depth"] == 6 and recipes[0]["trainer"]["max_steps"] == runs.steps(
            task
        )


def test_a_run_that_fails_leaves_the_rows_of_the_others(load, tmp_path: Path, monkeypatch, capsys):
    comparison, out = load("compare_canvas"), tmp_path / "canvas.csv"

    def fail_for_one_seed(runs, case):
        if case.seed == 1:
            raise comparison.RunFailed("no memory")
        runs.directory(case).mkdir(parents=True, exist_ok=True)
        (runs.directory(case) / "metrics.csv").write_text("step,val/top1\n1,\n2,0.5\n3,0.25\n")

    monkeypatch.setattr(comparison.Runs, "classify", fail_for_one_seed)
    monkeypatch.setattr(comparison.Runs, "generate", lambda runs, case: fail_for_one_seed(runs, case._replace(seed=1)))
    monkeypatch.setattr(comparison.Runs, "parameters", lambda runs, case: 7)
    monkeypatch.setattr(comparison, "open_judge", lambda runs, table: None)
    with pytest.raises(SystemExit) as stop:
        comparison.main(["--out", str(out), "--runs", str(tmp_path), "--models", "linear", "--seeds", "0", "1"])
    assert stop.value.code == 1 and "error: no memory" in capsys.readouterr().err
    (row,) = csv.DictReader(out.read_text().splitlines())
    assert (row["seed"], row["last_top1_percent"], row["best_top1_percent"]) == ("0", "25.00", "50.00")


def test_training_runs_tables(load):
    training_runs = load("training_runs")
    assert training_runs.mean_and_deviation([1.0, 2.0, 3.0]) == "2.00 ± 1.00"
    assert [training_runs.mean_and_deviation(values, 1) for values in ([], [2.0])] == ["–", "2.0"]
    assert training_runs.markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
    with pytest.raises(training_runs.RunFailed, match=r"no_such_script\.py"):
        training_runs.run_script(["no_such_script.py"])
    assert load("compare_canvas").validation_interval(2500, 5) == 500
    assert load("compare_canvas").validation_interval(7, 5) == 7


def test_scripts_share_the_gpus_out(load, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    gpus = load("training_runs").Gpus()
    with gpus.least_busy() as first, gpus.least_busy() as second:
        assert [first, second] == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    with gpus.least_busy(), gpus.least_busy(), gpus.least_busy() as third:
        assert third == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with load("training_runs").Gpus().least_busy() as only:
        assert only == {}


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("bench_mhla", ["--shapes", "deit,big"], "'big'"),
        ("bench_mhla", ["--columns", "flash,fast"], "'fast'"),
        ("bench_mhla", ["--device", "tpu"], "'tpu'"),
        ("bench_mhla", ["--limit_ms", "0"], "positive"),
        ("bench_hih", ["--shapes", "n256,n257"], "'n257'"),
        ("bench_hih", ["--columns", "r1,r3"], "'r3'"),
        ("bench_hih", ["--jobs", "0"], "positive"),
        ("bench_models", ["--models", "deit_mhla_huge"], "'deit_mhla_huge'"),
        ("bench_models", ["--batch", "1", "2", "3"], "--batch"),
        ("bench_models", ["--baseline", "deit_mhla_small"], "twice"),
        ("bench_models", ["--compile", "fast"], "'fast'"),
        ("bench_models", ["--windows", "0"], "positive"),
        ("compare_canvas", ["--out", "x.csv", "--models", "soft"], "'soft'"),
        ("compare_canvas", ["--out", "x.csv", "--seeds", "1", "1"], "twice"),
        ("compare_canvas", ["--out", "x.csv", "--jobs", "0"], "--jobs"),
        ("compare_canvas", ["--out", __file__], "another --out"),
    ],
)
def test_wrong_arguments_end_with_one_line(load, script, arguments, message):
    with pytest.raises(SystemExit) as stop:
        load(script).main(arguments)
    line = str(stop.value)
    assert line.startswith("error: ") and message in line and "\n" not in line


def test_digits_of_one_core_join_those_of_an_earlier_call(load, monkeypatch, tmp_path, capsys):
    digits = load("compare_digits")
    path = tmp_path / "digits.csv"
    calls = []

    def train(core, cpe, seed, *_):
        calls.append((core, cpe, seed))
        return 90 + seed, 95 + seed + len(core) / 10

    monkeypatch.setattr(digits, "train_setting", train)

    def run(*arguments):
        calls.clear()
        monkeypatch.setattr(sys, "argv", ["compare_digits.py", "--out", str(path), *arguments])
        digits.main()
        return capsys.readouterr().out.splitlines()

    assert len(run("--cores", "mhla", "linear", "--seeds", "0", "2")) == 2 + 4 and len(calls) == 8
    table = run("--cores", "hih", "--seeds", "0", "1")
    assert set(calls) == {("hih", cpe, seed) for cpe in (True, False) for seed in (0, 1)}
    cores = ["linear", "mhla", "hih"]
    assert [line.split(" ")[1] for line in table[2:]] == 2 * cores
    assert table[2] == "| linear | on | 91.00 ± 1.41 | 96.60 ± 1.41 |"
    with path.open() as file:
        assert [row["core"] for row in csv.DictReader(file)] == [core for core in 2 * cores for _ in range(2)]

    path.write_text("something,else\n1,2\n")
    with pytest.raises(SystemExit, match="was not written by this script"):
        run("--cores", "hih")
    assert not calls and path.read_text() == "something,else\n1,2\n"
