"""`headmix doctor`: findings, their JSON, the verdict, and tasks whose process crashes or hangs."""

import getpass
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from headmix_vision.cli import main
from headmix_vision.doctor import examination, workers
from headmix_vision.doctor.attention_times import MHLA, SOFTMAX, Times, TokenTimes, attention_calls, batch_of
from headmix_vision.doctor.examination import Request, examine
from headmix_vision.doctor.judging import Error
from headmix_vision.doctor.lines import judge_findings
from headmix_vision.doctor.machine import COMPILED, MEASURED, UNKNOWN, Gpu, Machine, find_ptxas, known_gpu, read_machine
from headmix_vision.doctor.report import FamilyFinding, Report, WrongCase
from headmix_vision.doctor.workers import Failure, Task, Workers, without_names
from headmix_vision.ops import dispatch

CPU = torch.device("cpu")


def run(*arguments: str) -> int:
    """Run the command on the CPU and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--device", "cpu", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_cpu_is_told_that_the_pytorch_form_is_right(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(examination, "FAMILIES", ("mhla causal", "mix_heads"))
    assert run("--json", str(tmp_path / "report.json"), "--seed", "5") == 0
    shown = capsys.readouterr().out
    assert "No GPU: the PyTorch implementation is used, and is right: 20 cases of 2 families." in shown
    text = (tmp_path / "report.json").read_text()
    report = json.loads(text)
    assert {"format", "machine", "seed", "families", "times", "verdict", "wrong", "seconds"} == set(report)
    assert (report["seed"], report["wrong"], report["times"]) == (5, False, [])
    assert report["machine"]["versions"]["torch"] == torch.__version__
    for family in report["families"]:
        assert (family["checked"], family["left_out"], family["types"]) == (10, 0, ["float32"])
        assert 0 <= family["worst"]["error"] <= family["worst"]["budget"] and f"  {family['family']} " in shown
    assert not any(name in text for name in (str(Path.home()), str(tmp_path), socket.gethostname()))


def test_every_family_is_checked():
    report = examine(Request(CPU, cases=1))
    assert {family.family.split()[0] for family in report.families} == {
        "mhla",
        "head_in_head",
        "grid_conv",
        "mix_heads",
    }
    assert all(family.checked == 1 for family in report.families) and not report.wrong


def test_no_case_is_called_right_when_the_time_is_over():
    report = examine(Request(CPU, limit_s=0))
    assert not report.wrong and all(family.left_out == 10 for family in report.families)
    (verdict,) = report.verdict
    assert verdict.startswith("Time or memory did not suffice for 60 cases (10 of mhla pairwise, ")


def break_op(monkeypatch: pytest.MonkeyPatch, name: str, wrong) -> None:
    """Replace the PyTorch implementation of an op by a wrong one."""
    api = importlib.import_module(f"headmix_vision.ops.{name}.api")
    form = api.IMPLEMENTATIONS["torch"]
    monkeypatch.setitem(api.IMPLEMENTATIONS, "torch", lambda *args, **kwargs: wrong(form(*args, **kwargs)))
    monkeypatch.setattr(dispatch, "_plans", {})


def test_a_wrong_result_is_found(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(examination, "FAMILIES", ("grid_conv", "mix_heads"))
    break_op(monkeypatch, "mix_heads", lambda outs: [out * 1.001 for out in outs])
    assert run("--json", str(tmp_path / "report.json")) == 1
    shown = capsys.readouterr().out
    assert (
        "The PyTorch implementation of mix_heads is wrong on this CPU: do not use it" in shown and "and 7 more" in shown
    )
    right, wrong = json.loads((tmp_path / "report.json").read_text())["families"]
    assert right["wrong"] == [] and len(wrong["wrong"]) == 10
    case = wrong["wrong"][0]
    assert case["line"] == "mix_heads:float32:0:small" and "heads=" in case["settings"]
    assert case["errors"][0]["error"] > case["errors"][0]["budget"] and case["failure"] is None


def test_an_exception_is_the_finding_of_its_family(monkeypatch, capsys):
    def fail(out: object) -> None:
        raise RuntimeError("no such file /home/someone/cache/kernel.cubin")

    monkeypatch.setattr(examination, "FAMILIES", ("mix_heads", "grid_conv"))
    break_op(monkeypatch, "mix_heads", fail)
    assert run() == 1
    shown = capsys.readouterr().out
    assert "mix_heads:float32:0:small: RuntimeError: no such file kernel.cubin" in shown
    assert "The PyTorch implementation of mix_heads is wrong" in shown


def test_a_defect_of_the_doctor_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(examination, "read_machine", lambda device: 1 / 0)
    assert run() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the examination itself failed: ZeroDivisionError")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "meta"], "device 'meta' cannot be used here"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 4294967295, got -1."),
        (["--json", "{folder}"], "--json must be a file, {folder} is a folder"),
        (["--jsn", "x"], "unknown option --jsn; did you mean --json?"),
    ],
)
def test_wrong_arguments_end_with_one_line(arguments, line, tmp_path, capsys):
    assert run(*(argument.format(folder=tmp_path) for argument in arguments)) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {line.format(folder=tmp_path)}")


def test_it_needs_neither_timm_nor_triton():
    code = (
        "import sys\nsys.modules['timm'] = sys.modules['triton'] = None\n"
        "import torch\nfrom headmix_vision.doctor import examination\n"
        "report = examination.examine(examination.Request(torch.device('cpu'), cases=1))\n"
        "print(report.machine.versions['triton'], report.wrong)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "None False\n"


def test_a_process_that_crashes_or_hangs_costs_its_task_alone(monkeypatch):
    monkeypatch.setattr(workers, "_LAST_START_S", 0.0)
    tasks = [Task(os._exit, (3,)), Task(len, ("four",)), Task(len, (4,))]
    with Workers(1, CPU) as processes:
        ended = [outcome for _, outcome in processes.run(tasks, time.monotonic() + 300)]
        crashed = Failure("its process ended with status 3")
        assert ended == [crashed, 4, Failure("TypeError: object of type 'int' has no len()")]
        started_s = time.monotonic()
        assert [*processes.run([Task(time.sleep, (600,))], started_s + 0.5)] == []
        assert time.monotonic() - started_s < 60


def test_tasks_run_in_this_process_where_others_cannot_start():
    with Workers(2, torch.device("cuda:99")) as processes:
        ended = [outcome for _, outcome in processes.run([Task(len, ("four",))] * 3, time.monotonic() + 300)]
    assert ended == [4, 4, 4]


def test_texts_lose_folders_users_and_hosts():
    text = f"at {Path.home()}/a/b.py:3, {getpass.getuser()} on {socket.gethostname()}, see https://example.org/a/b"
    assert without_names(text) == "at b.py:3, ... on ..., see https://example.org/a/b"


def test_the_ptxas_of_the_environment_is_seen(tmp_path: Path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    own = find_ptxas("8.0")
    if own is None:
        pytest.skip("the installed Triton has no ptxas")
    assert own.bundled and own.version[0].isdecimal()
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    other.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    found = find_ptxas("8.0")
    assert found is not None and (found.path, found.version, found.bundled) == (str(other), "13.0.48", False)
    machine = Machine({}, {}, found, None, None, None)
    assert str(tmp_path) not in Report(machine, 0, (), (), (), False, 1.0).to_json()
    assert read_machine(CPU).settings["TRITON_PTXAS_PATH"] == "a path"


def test_what_is_known_of_a_gpu():
    assert [known_gpu(name).status for name in ("9.0", "12.0", "7.5")] == [MEASURED, COMPILED, UNKNOWN]


def machine_with(status: str = MEASURED, why_no_kernels: str | None = None) -> Machine:
    gpu = Gpu("NVIDIA X", "9.0", 227, 132, 80.0, status, "X")
    return Machine({"driver": "1.0"}, {}, None, gpu, None, why_no_kernels)


def family_with(wrong: tuple[WrongCase, ...] = (), left_out: int = 0) -> FamilyFinding:
    return FamilyFinding("mhla pairwise", "triton", ("float16",), 10 - left_out, left_out, None, wrong)


def times_at(tokens: int, forward: float, both: float, left_out: tuple[str, ...] = ()) -> TokenTimes:
    """Times of MHLA where the best softmax takes 1 ms."""
    softmax = {"FLASH_ATTENTION": Times(1.0, 2.0, True), "CUDNN_ATTENTION": Times(3.0, 1.0, True)}
    return TokenTimes(tokens, 1, "bfloat16", left_out, Times(forward, both, True), softmax)


def test_the_verdict_on_kernels():
    wrong = (WrongCase("line", "settings", (Error("dk", float("nan"), 1e-2),)),)
    for machine, family, expected, is_wrong in (
        (machine_with(), family_with(), "The kernels are right on this GPU: 10 cases of 1 families", False),
        (machine_with(), family_with(wrong), "The kernels of mhla pairwise are wrong on this GPU: do not use", True),
        (machine_with(why_no_kernels="too old"), family_with(), "The kernels do not run here: too old.", False),
        (machine_with(COMPILED), family_with(), "Nobody has reported a run on such a GPU yet", False),
        (machine_with(), family_with(left_out=3), "Time or memory did not suffice for 3 cases", False),
    ):
        sentences, found_wrong = judge_findings(machine, [family], [])
        assert found_wrong is is_wrong and any(sentence.startswith(expected) for sentence in sentences), sentences
    text = Report(machine_with(), 0, (family_with(wrong),), (), (), True, 1.0).to_json()
    assert json.loads(text)["families"][0]["wrong"][0]["errors"][0]["error"] == "nan"


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        ([(196, 2, 2), (1024, 0.5, 0.5), (4096, 0.1, 0.1)], "MHLA pays from 1,024 tokens on this card."),
        ([(196, 0.9, 2), (1024, 0.9, 0.9)], "pays in inference from 196 tokens and in training from 1,024 tokens"),
        ([(196, 0.9, 2), (1024, 0.9, 2)], "MHLA pays in inference from 196 tokens and not in training"),
        ([(196, 0.5, 0.5), (1024, 2, 2)], "MHLA does not pay on this card. Timed: 196, 1,024 tokens."),
        ([(196, 2, 2), (1024, 0.1, 0.1, ("CUDNN_ATTENTION",))], "MHLA does not pay on this card. Timed: 196 tokens."),
    ],
)
def test_the_verdict_on_times(times, sentence):
    sentences, wrong = judge_findings(machine_with(), [family_with()], [times_at(*at) for at in times])
    assert not wrong and sentence in sentences[-1]


def test_mhla_that_fails_when_it_is_timed_is_wrong():
    failed = TokenTimes(196, 1, "bfloat16", failed="RuntimeError: no")
    sentences, wrong = judge_findings(machine_with(), [family_with()], [failed])
    assert wrong and "MHLA failed when it was timed at 196 tokens: RuntimeError: no" in sentences[-1]


def test_all_columns_have_the_same_shapes():
    for column in (MHLA, SOFTMAX[0]):
        forward, both = attention_calls(column, 196, 1, CPU, torch.float32)
        assert forward().shape == (1, 196, 6, 64)
        assert [x.shape for x in both()][:3] == [(1, 196, 6, 64)] * 3
    assert [batch_of(tokens, 132) for tokens in (196, 1_024, 16_384, 10**6)] == [345, 66, 4, 1]


@pytest.mark.gpu
def test_a_gpu_is_examined():
    report = examine(Request(torch.device("cuda:0"), cases=2))
    assert report.machine.gpu is not None and not report.wrong, report.verdict
    assert sum(family.checked for family in report.families) and report.seconds < 60
    assert report.times and all(at.mhla is not None for at in report.times)
