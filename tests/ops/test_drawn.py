"""Random cases: what is drawn, whether the judge can fail, and a few cases of every kernel in the interpreter."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from headmix_vision.doctor import families
from headmix_vision.doctor.cases import CASES_OF_A_KERNEL, DTYPES, FAMILIES, check, draw, numbered, read
from headmix_vision.doctor.drawing import GRADIENT_LAYOUTS, HEAD_DIMS, LAYOUTS, head_dim_range
from headmix_vision.errors import InputError
from headmix_vision.ops import TokenBlocks, mhla
from headmix_vision.ops.mhla.torch_impl import FEATURE_MAPS, NORMALIZERS

from . import fuzz
from .test_drawn_gpu import CASES, STEP

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SMALL = "mhla pairwise:float32:5:small"


@pytest.mark.parametrize(
    "line",
    [
        SMALL,
        "mhla summary:float32:20:small",
        "mhla causal:float32:18:small",
        "mhla causal:float32:11:small",
        "head_in_head:float32:10:small",
        "grid_conv:float32:47:small",
        "mix_heads:float32:56:small",
    ],
)
def test_kernels(line):
    assert not [str(error) for error in check(read(line), DEVICE) if error.bad]


@pytest.mark.parametrize("family", FAMILIES)
def test_pytorch_form_on_a_cpu(family):
    for seed in range(6):
        case = draw(family, seed, torch.float32, small=True)
        assert not [str(error) for error in check(case, CPU, "auto") if error.bad], case


@pytest.mark.parametrize(("count", "step", "least"), [(CASES, STEP, 4), (3000, 1, 24)])
def test_drawn_cases_cover_every_type_with_every_range_of_head_dims(count, step, least):
    cases = [numbered(index * step) for index in range(count)]
    found = Counter((c.dtype, head_dim_range(c.options["dim"])) for c in cases if c.family.startswith("mhla"))
    ranges = [head_dim_range(high) for _, high in HEAD_DIMS]
    assert all(found[dtype, dims] >= least for dtype in DTYPES for dims in ranges), found
    drawn = {(c.family, name, value) for c in cases for name, value in c.options.items()}
    for family in FAMILIES:
        assert all((family, "layout", value) in drawn for value in LAYOUTS)
        assert all((family, "gradient", value) in drawn for value in GRADIENT_LAYOUTS)
    for family in FAMILIES[:3]:
        assert all((family, "normalizer", value) in drawn for value in NORMALIZERS)
        assert all((family, "feature_map", value) in drawn for value in FEATURE_MAPS)
    assert all(("head_in_head", "r", r) in drawn for r in (1, 2, 4, 8))
    dims = {c.options["dim"] for c in cases if "dim" in c.options}
    assert len(dims) > 60 and min(dims) == 1 and max(dims) == 128


def test_a_line_draws_the_case_again():
    case = draw("mhla causal", 7, torch.float16, small=True)
    assert read(case.line) == case and "\n" not in str(case) and f"{case.line} shape=" in str(case)
    assert draw("mhla causal", 7) == draw("mhla causal", 7, DTYPES[7 // CASES_OF_A_KERNEL % 3])
    for line in ("mhla causal:float16", "mhla causal:float64:1", "mhla causal:float16:1:tiny", "mhla:float16:1"):
        with pytest.raises(InputError, match=r"must be one of|a case is"):
            read(line)


def wrong_scale(out, q):
    return out * 1.0001


def wrong_entry(out, q):
    return out + 1e-3 * (torch.arange(out.numel(), device=out.device) == 1).view(out.shape)


def missing_number(out, q):
    return out + torch.where(torch.arange(out.numel(), device=out.device) == 1, torch.nan, 0.0).view(out.shape)


def wrong_gradient(out, q):
    return out + 1e-4 * (q - q.detach()).sum()


@pytest.mark.parametrize(
    ("wrong", "bad"),
    [
        (wrong_scale, {"out", "dq", "dk", "dv", "dmixing"}),
        (wrong_entry, {"out"}),
        (missing_number, {"out"}),
        (wrong_gradient, {"dq"}),
    ],
)
def test_wrong_results_are_bad(wrong, bad, monkeypatch):
    monkeypatch.setattr(families, "mhla", lambda q, *args, **options: wrong(mhla(q, *args, **options), q))
    assert {error.name for error in check(read(SMALL), CPU, "torch") if error.bad} == bad


@pytest.mark.parametrize(
    ("options", "zero"), [({"dim": 1, "value_dim": 5}, "dq"), ({"block_grid": (1, 1)}, "dmixing")], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_are_zero_are_judged_by_rounding(options, zero, dtype, monkeypatch):
    case = draw("mhla pairwise", 5, dtype, small=True)
    case.options.update(options, normalizer="paper", num_prefix_tokens=0, per_head=False)
    errors = {error.name: error for error in check(case, CPU, "torch")}
    assert not any(error.bad for error in errors.values()) and errors[zero].error > 0

    def wrong(q, k, v, mixing, *args, **settings):
        x = {"dq": q, "dmixing": mixing}[zero]
        return mhla(q, k, v, mixing, *args, **settings) * (1 + (x - x.detach()).sum().to(v.dtype))

    monkeypatch.setattr(families, "mhla", wrong)
    assert {error.name for error in check(case, CPU, "torch") if error.bad} == {zero}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_formula_over_all_pairs_is_the_reference(normalizer, causal):
    blocks = TokenBlocks.from_grid((5, 7), (2, 3), num_prefix_tokens=2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, blocks.num_tokens, 3, 4, generator=generator, dtype=torch.float64)
    mixing = torch.rand(3, blocks.num_blocks, blocks.num_blocks, generator=generator, dtype=torch.float64)
    options = {"normalizer": normalizer, "feature_map": "elu1", "eps": 0.1, "causal": causal}
    (found,) = families._dense((q, k, v, mixing), blocks, options)
    torch.testing.assert_close(found, mhla(q, k, v, mixing, blocks, **options, impl="reference"))


def test_what_a_case_raises_is_a_failure():
    case = draw("mhla pairwise", 0, torch.float32, small=True)
    reason = fuzz.failure(case, "nothing")
    assert reason.startswith("InputError: impl must be one of")
    assert re.fullmatch(rf'python tests/ops/fuzz.py --case "{case.line}"  # InputError: .*', fuzz.rerun(case, reason))


@pytest.mark.parametrize("args", [["--seconds", "0"], ["--family", "mlha"], ["--case", "mhla causal:float16"]], ids=str)
def test_wrong_options_end_in_one_line(args, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--impl", "torch", *args])
    with pytest.raises(SystemExit, match="2"):
        fuzz.main()
    assert re.fullmatch(r"error: .+\n", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_a_case_that_ends_its_process_is_counted_and_others_follow():
    command = [sys.executable, fuzz.__file__, "--impl", "torch", "--small", "--jobs", "1", "--seconds", "30"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}")
        while not (
            found := [int(x) for task in children.parent.iterdir() for x in (task / "children").read_text().split()]
        ):
            time.sleep(0.1)
        time.sleep(5)
        os.kill(found[0], signal.SIGKILL)
        printed = process.communicate()[0]
    assert process.returncode == 1
    assert re.search(r'^python tests/ops/fuzz.py --case ".+"  # the process ended with status -9', printed)
    cases, bad = re.search(r"(\d+) cases in \d+ s, (\d+) bad", printed).groups()
    assert int(cases) > int(bad) == 1
