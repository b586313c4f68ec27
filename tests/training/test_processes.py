"""Real processes: signals, and two ranks against one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from headmix_vision.processes import _state, stopped_processes
from headmix_vision.training.base_cli import RunCLI

from . import gen_helpers
from .helpers import TINY, assert_same_run, load, read_csv, run, write_config

ROOT = Path(__file__).parents[2]
NO_RANDOMNESS: dict[str, Any] = {
    "model__mixup": {"mixup_alpha": 0.0, "cutmix_alpha": 0.0},
    "model__model_args": {**TINY["model"]["model_args"], "drop_path_rate": 0.0},
}
TWO_RANKS = ("--trainer.devices", "2", "--trainer.strategy", "ddp")


def test_processes_keep_each_gradient_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunCLI] = []
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    config = write_config(tmp_path / "tiny.yaml")
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run", "--trainer.strategy", "ddp") == 0
    assert seen[0].trainer.strategy._ddp_kwargs == {"gradient_as_bucket_view": True}


def start(*args: object, script: str = "train_cls.py") -> subprocess.Popen[str]:
    """Start a command line in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(ROOT / script), *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def wait_for_row(process: subprocess.Popen[str], path: Path) -> None:
    """Wait until training has logged a step."""
    deadline = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists(), process.communicate()[0]


def second_rank(process: subprocess.Popen[str]) -> int:
    """Finds the process that Lightning has started beside the first rank; its data workers are children as well."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"LOCAL_RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError("there is no second rank")


FAILING = """
import atexit, os, time
import torch.distributed as dist
from headmix_vision.cli.train_cls import main
from headmix_vision.training.classifier import ImageClassifier

def step(*args):
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(200)
    dist.get_backend = lambda: "nccl"
    atexit.register(time.sleep, 200)
    raise {raised}

ImageClassifier.training_step = step
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("raised, status", [("MemoryError('of a test')", 2), ("RuntimeError('a defect')", 1)])
def test_a_rank_that_fails_ends_another_that_waits_for_it(raised: str, status: int, tmp_path: Path) -> None:
    # as with NCCL: neither the other's step nor the end of the group would ever return
    (tmp_path / "failing.py").write_text(FAILING.format(raised=raised))
    config = write_config(tmp_path / "tiny.yaml")
    command = ("fit", "-c", config, "--run_dir", tmp_path / "run", *TWO_RANKS)
    process = start(*command, script=str(tmp_path / "failing.py"))
    output, _ = process.communicate(timeout=120)  # until both have closed it
    assert process.returncode == status, output
    assert output.count("of a test" if status == 2 else "RuntimeError: a defect") == 1, output


REFUSING = """
import os, time
from headmix_vision import console
from headmix_vision.errors import InputError
from headmix_vision.cli.train_cls import main
from headmix_vision.training.classifier import ImageClassifier

def step(*args):
    console._PATIENCE_S = {patience_s}
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank in "{ranks}":
        time.sleep({lag_s} * int(rank))
        raise InputError("of a test")
    return whole_step(*args)

whole_step, ImageClassifier.training_step = ImageClassifier.training_step, step
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "lag_s", "patience_s", "said"),
    [
        ("0 1", 0, 100, "error: of a test"),
        ("0 1", 0.5, 100, "error: of a test"),
        ("1", 0, 1, "error (rank 1): of a test"),
    ],
)
def test_an_error_is_said_once_whichever_rank_has_it(
    ranks: str, lag_s: float, patience_s: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING.format(ranks=ranks, lag_s=lag_s, patience_s=patience_s))
    config = write_config(tmp_path / "tiny.yaml")
    command = ("fit", "-c", config, "--run_dir", tmp_path / "run", *TWO_RANKS)
    process = start(*command, script=str(tmp_path / "refusing.py"))
    output, _ = process.communicate(timeout=90)  # until both have closed it
    assert process.returncode, output
    assert [line for line in output.splitlines() if "of a test" in line] == [said], output


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    long = {"trainer__max_epochs": 4, "trainer__limit_train_batches": 40, "trainer__limit_val_batches": 0}
    config = write_config(tmp_path / "tiny.yaml", **long)
    run_dir = tmp_path / "run"
    process = start("fit", "-c", config, "--run_dir", run_dir, *TWO_RANKS)
    wait_for_row(process, run_dir / "metrics.csv")
    os.kill(second_rank(process), signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "--ckpt-path last" in output and "Traceback" not in output
    assert 0 < load(run_dir / "checkpoints" / "last.ckpt")["global_step"] < 80


def wait_for_state(pid: int, letters: str) -> None:
    """Wait until a signal has done its work, which the one who sends it is not told."""
    deadline = time.monotonic() + 10
    while _state(pid) not in letters:
        assert time.monotonic() < deadline, f"process {pid} is in state {_state(pid)!r}, not in one of {letters!r}"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_stopped_processes_of_this_job_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "12345")
    ours, other = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, "MASTER_PORT": port}) for port in ("12345", "54321")
    )
    try:
        assert stopped_processes() == {}
        for process in (ours, other):
            process.send_signal(signal.SIGSTOP)
            wait_for_state(process.pid, "T")
        assert stopped_processes() == {ours.pid: True}
        monkeypatch.delenv("MASTER_PORT")  # of a single process
        assert stopped_processes() == {}
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_a_signal_ends_a_rank_that_waits_for_a_stopped_one(tmp_path: Path) -> None:
    long = {"trainer__max_epochs": 40, "trainer__limit_train_batches": 40, "trainer__limit_val_batches": 0}
    config, run_dir = write_config(tmp_path / "tiny.yaml", **long), tmp_path / "run"
    process = start("fit", "-c", config, "--run_dir", run_dir, *TWO_RANKS)
    wait_for_row(process, run_dir / "metrics.csv")
    stopped = second_rank(process)
    os.kill(stopped, signal.SIGSTOP)
    wait_for_state(stopped, "T")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert f"error: process {stopped} of this job was stopped" in output and "Traceback" not in output
    wait_for_state(stopped, "Z ")  # ended and not awaited, or gone


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_killed_run_continues_bit_for_bit(signum: signal.Signals, tmp_path: Path) -> None:
    # long enough to be still running when the signal arrives
    long = {"trainer__max_epochs": 4, "trainer__limit_train_batches": 40, "data__num_workers": 1}
    config = write_config(tmp_path / "tiny.yaml", **long)
    run_dir = tmp_path / "run"
    process = start("fit", "-c", config, "--run_dir", run_dir)
    wait_for_row(process, run_dir / "metrics.csv")
    os.killpg(process.pid, signum)  # its data worker, too, as torchrun does
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, output
    assert "--ckpt-path last" in output
    assert "Traceback" not in output
    step = load(run_dir / "checkpoints" / "last.ckpt")["global_step"]
    assert 0 < step < 80
    assert run("fit", "-c", run_dir / "config.yaml", "--ckpt_path", "last", "--data.num_workers", 0) == 0
    assert run("fit", "-c", config, "--run_dir", tmp_path / "whole", "--data.num_workers", 0) == 0
    assert_same_run(run_dir, tmp_path / "whole")


@pytest.mark.parametrize(("rank", "line", "status"), [(0, "Seed set", 143), (1, "Initializing distributed", -15)])
def test_signal_before_the_first_step_leaves_nothing(
    rank: int, line: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TWO_RANKS if rank else ()
    if rank:  # of torchrun, waiting for a first process that does not come
        launched = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": rank, "RANK": rank, "LOCAL_WORLD_SIZE": 2}
        launched |= {"WORLD_SIZE": 2, "GROUP_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 9}
        for name, value in launched.items():
            monkeypatch.setenv(name, str(value))
    process = start("fit", "-c", write_config(tmp_path / "tiny.yaml"), "--run_dir", tmp_path / "run", *options)
    assert process.stdout is not None
    while line not in process.stdout.readline():  # the seed is set before model and data are made
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == status, output
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch(tmp_path: Path) -> None:
    small = write_config(tmp_path / "two.yaml", **NO_RANDOMNESS)
    process = start("fit", "-c", small, "--run_dir", tmp_path / "two", *TWO_RANKS)
    large = write_config(tmp_path / "one.yaml", **NO_RANDOMNESS, data__batch_size=16, data__eval_batch_size=32)
    assert run("fit", "-c", large, "--run_dir", tmp_path / "one") == 0
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    one, two = (load(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("one", "two"))
    assert one["global_step"] == two["global_step"] == 6
    for key in ("state_dict", "current_model_state"):
        for name, value in one[key].items():
            # float32 sums in another order; Adam's normalisation magnifies them where a gradient is close to zero
            torch.testing.assert_close(value, two[key][name], rtol=1e-4, atol=2e-5)
    for a, b in zip(*(read_csv(tmp_path / name / "metrics.csv") for name in ("one", "two")), strict=True):
        assert a["val/top1"] == b["val/top1"]
        if a["train/loss"]:
            assert float(a["train/loss"]) == pytest.approx(float(b["train/loss"]), rel=1e-5)
            assert float(a["val/loss"]) == pytest.approx(float(b["val/loss"]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_samples_and_their_score_are_those_of_one_process(world_size: int, tmp_path: Path) -> None:
    features = tmp_path / "features.safetensors"
    torch.manual_seed(0)
    header = {"model_name": "deit_linear_digits", "model_args": '{"depth": 1}'}
    save_file(timm.create_model("deit_linear_digits", depth=1).state_dict(), features, metadata=header)
    # 5 batches of samples and 7 of real images; steps too small to change a weight that is not zero
    score = {"every_n_epochs": 1, "features": str(features), "real": "digits[:100]"}
    score |= {"num": 70, "steps": 2, "batch_size": 16}
    common = {"fid": score, "trainer__max_epochs": 1, "model__optimizer__lr": 1e-30, "samples__rows": 3}
    shares = {1: 16, world_size: 16 // world_size}
    configs = {
        count: gen_helpers.write_config(
            tmp_path / f"{count}.yaml", **common, data__batch_size=share, data__eval_batch_size=2 * share
        )
        for count, share in shares.items()
    }
    options = ("--trainer.devices", world_size, "--trainer.strategy", "ddp")
    process = start("fit", "-c", configs[world_size], "--run_dir", tmp_path / "many", *options, script="train_gen.py")
    assert gen_helpers.run("fit", "-c", configs[1], "--run_dir", tmp_path / "one") == 0
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    one, many = ([row["val/fid"] for row in read_csv(tmp_path / name / "metrics.csv")] for name in ("one", "many"))
    assert one == many and one[-1]
    pictures = sorted((tmp_path / "one" / "samples").iterdir())
    assert pictures
    for picture in pictures:
        assert picture.read_bytes() == (tmp_path / "many" / "samples" / picture.name).read_bytes(), picture.name
