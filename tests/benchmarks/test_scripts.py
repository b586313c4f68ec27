"""What all scripts share: measuring, and wrong arguments."""

import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks import fit_mhla_regimes as fit
from headmix_lab import measuring


def test_measuring(tmp_path: Path):
    device = torch.device("cpu")
    timing = measuring.time_calls([lambda: time.sleep(0.002)] * 2, device, budget_s=0.01)
    assert timing.graph_ms is None and timing.ms >= 2
    assert measuring.peak_mib(lambda: None, device) is None
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "cpu")
    assert [measuring.device_slug(name) for name in names] == ["h200", "h100", "geforce_rtx_4090", "cpu"]

    measuring.write_csv(tmp_path / "new" / "x.csv", [{"a": 1 / 3, "b": None, "c": "name"}])
    assert (tmp_path / "new" / "x.csv").read_text() == "a,b,c\n0.33333,,name\n"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("bench_mhla", ["--shapes", "deit,big"], "'big'"),
        ("bench_mhla", ["--columns", "flash,fast"], "'fast'"),
        ("bench_mhla", ["--device", "tpu"], "'tpu'"),
        (
            "bench_mhla",
            ["--device", "cpu", "--causal", "--columns", "torch,linear_kernel"],
            "linear_kernel cannot be causal",
        ),
        ("bench_mhla", ["--limit_ms", "0"], "positive"),
        ("bench_hih", ["--shapes", "n256,n257"], "'n257'"),
        ("bench_hih", ["--columns", "r1,r3"], "'r3'"),
        ("bench_hih", ["--jobs", "0"], "positive"),
        ("bench_models", ["--models", "deit_mhla_huge"], "'deit_mhla_huge'"),
        ("bench_models", ["--models", "deit_mhla_small:depth"], "'depth'"),
        ("bench_models", ["--models", "deit_mhla_small", "--batch", "1", "2", "3"], "--batch"),
        ("bench_models", ["--models", "deit_mhla_small", "--baseline", "deit_mhla_small"], "twice"),
        ("bench_models", ["--baseline", "deit_mhla_small"], "--models"),
        ("bench_models", ["--windows", "0"], "positive"),
        ("bench_training", ["--models", "dit_mhla_huge"], "'dit_mhla_huge'"),
        ("bench_training", ["--batch", "3"], "even"),
        ("bench_training", ["--steps", "100"], "--warmup_steps"),
        (
            "bench_scale",
            ["--device", "cpu", "--losses", "--models", "dit_mhla_s_2"],
            "--losses takes classifiers",
        ),
        ("bench_scale", ["--device", "cpu", "--gpus", "1", "--ways", "ddp"], "--gpus 2 or more"),
        ("plan_scale", ["--gpus", "12"], "multiples of 8"),
    ],
)
def test_wrong_arguments_end_with_one_line(script, arguments, message):
    with pytest.raises(SystemExit) as stop:
        import_module(f"benchmarks.{script}").main(arguments)
    line = str(stop.value)
    assert line.startswith("error: ") and message in line and "\n" not in line


def test_regimes_are_fitted_to_what_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    few = fit.shapes()[::8]
    monkeypatch.setattr(fit, "shapes", lambda: few)
    fit.main(["--device", "cpu", "--tiny"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[: lines.index(next(x for x in lines if x.startswith("WGMMA")))]) == len(few[::5])


def test_fitted_costs_choose_the_faster_regime(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def time_ns(shape: fit.Shape, impl: str, device: object) -> float:
        """Return the time that the model predicts."""
        call = shape.blocks, shape.head_dim, shape.head_dim
        if impl == "pairwise":
            return fit.regimes.cost(fit.regimes.WGMMA.pairwise, fit.regimes.pairwise_terms(*call, on_hopper=True))
        return fit.regimes.cost(fit.regimes.WGMMA.summary, fit.regimes.summary_terms(*call))

    monkeypatch.setattr(fit, "IMPLS", {"cpu": ("pairwise", "summary")})
    monkeypatch.setattr(fit, "time_ns", time_ns)
    fit.main(["--device", "cpu"])
    assert capsys.readouterr().out.endswith("over the better: mean 1.000, worst 1.00\n")
