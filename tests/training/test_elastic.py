"""Jobs under torchrun that lose processes end as if undisturbed, restarted by torchrun or by the same command."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .helpers import assert_same_run, load, read_csv, write_config
from .test_processes import NO_RANDOMNESS, ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
GLOBAL_BATCH = 16
LONG = {"trainer__max_epochs": 12, "trainer__limit_train_batches": 40}
KILLS = 4


def ranks(job: subprocess.Popen[bytes]) -> list[int]:
    """The processes that torchrun has started, without those that have just ended."""
    found = []
    for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
        try:
            if b"LOCAL_RANK=" in Path(f"/proc/{child}/environ").read_bytes():
                found.append(int(child))
        except OSError:
            continue
    return found


@contextmanager
def started(folder: Path, world_size: int, *options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A job of the command line under torchrun; nothing of it is left behind."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", world_size, "--max-restarts", 10]
    share = ["--data.batch_size", GLOBAL_BATCH // world_size, "--data.eval_batch_size", 2 * GLOBAL_BATCH // world_size]
    share += ["--trainer.devices", world_size]
    command = [sys.executable, "-m", *launcher, ROOT / "train_cls.py", "fit", *options, *share, "--ckpt_path", "auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see examples/slurm.sh
    with (folder / "output.txt").open("ab") as output:
        job = subprocess.Popen([*map(str, command)], stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield job
        finally:
            if job.poll() is None:
                end(job, signal.SIGKILL)


def end(job: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Sends a signal to all processes of a job, as a scheduler does, and waits for their end."""
    for process in (*ranks(job), job.pid):
        os.kill(process, signum)
    job.wait(timeout=120)


def wait_for_steps(job: subprocess.Popen[bytes], metrics: Path) -> None:
    """Waits until the job logs a step."""

    def written_ns() -> int:
        return metrics.stat().st_mtime_ns if metrics.exists() else 0

    before, deadline_s = written_ns(), time.monotonic() + 240
    while written_ns() == before and job.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert written_ns() != before and job.poll() is None, "the job has ended, or does not begin"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("strategy", "every_n_steps", "other_size"),
    [("ddp", 7, 4), ("fsdp2", 4, 1)],  # test_sharding.py goes on in four processes with shards
)
def test_a_job_that_is_killed_at_any_moment_loses_nothing_that_was_saved(
    strategy: str, every_n_steps: int, other_size: int, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "tiny.yaml", **NO_RANDOMNESS, **LONG)
    options = ("-c", config, "--checkpoint_every_n_steps", every_n_steps, "--trainer.strategy", strategy)
    with started(tmp_path, 2, *options, "--run_dir", tmp_path / "whole") as job:
        assert job.wait(timeout=300) == 0
    run_dir, chance, kills, saved = tmp_path / "run", random.Random(0), 0, 0
    last = run_dir / "checkpoints" / "last.ckpt"
    while kills < KILLS:
        with started(tmp_path, 2, *options, "--run_dir", run_dir) as job:
            for kind in ("rank", ("job", "signal")[kills // 2 % 2]):
                wait_for_steps(job, run_dir / "metrics.csv")
                time.sleep(chance.uniform(0, 2))
                assert job.poll() is None
                if kind == "rank":
                    os.kill(chance.choice(ranks(job)), signal.SIGKILL)
                else:
                    end(job, signal.SIGKILL if kind == "job" else signal.SIGTERM)
                kills += 1
        step = load(last)["global_step"] if last.exists() else 0
        assert saved <= step
        saved = step
    shutil.copytree(run_dir, tmp_path / "other")
    for world_size, folder in ((2, run_dir), (other_size, tmp_path / "other")):
        with started(tmp_path, world_size, *options, "--run_dir", folder) as job:
            assert job.wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()[-9000:]
    assert_same_run(run_dir, tmp_path / "whole")
    for row, other in zip(*(read_csv(tmp_path / name / "metrics.csv") for name in ("whole", "other")), strict=True):
        assert row["step"] == other["step"]
        for name in ("train/loss", "val/loss"):
            if row[name]:
                assert float(other[name]) == pytest.approx(float(row[name]), rel=1e-5)


# What SLURM's commands do, on one machine: srun becomes torchrun, scancel signals all processes of the step.
COMMANDS = {
    "srun": 'echo $$ > step; shift; exec "$@"',
    "scancel": "kill -TERM $(cat /proc/$(cat step)/task/*/children) $(cat step)",
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" >> requeued; else echo localhost; fi',
}


@pytest.mark.slow
def test_batch_script_saves_requeues_and_goes_on(tmp_path: Path) -> None:
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    config = write_config(tmp_path / "tiny.yaml", **NO_RANDOMNESS, **LONG, trainer__strategy="ddp")
    command = [ROOT / "examples" / "slurm.sh", sys.executable, ROOT / "train_cls.py", "fit", "-c", config]
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        **{"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_GPUS_ON_NODE": "2"},
        **{"SLURM_JOB_NAME": "headmix", "SLURM_JOB_NODELIST": "localhost"},
    }
    last = tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    for requeued in (True, False):
        with (tmp_path / "output.txt").open("ab") as output:
            job = subprocess.Popen(
                [*map(str, command)], cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            if requeued:
                wait_for_steps(job, tmp_path / "runs" / "tiny" / "metrics.csv")
                job.send_signal(signal.SIGUSR1)
            assert job.wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()[-9000:]
        assert (tmp_path / "requeued").read_text().split() == [str(os.getpid())]
        if requeued:
            assert f"saved {last.relative_to(tmp_path)}" in (tmp_path / "output.txt").read_text()
        assert (load(last)["global_step"] < 240) == requeued
    assert len(read_csv(last.parents[1] / "metrics.csv")) == 240
