"""Kill commands at random moments, go on with them, and compare every bit with a run that was left alone.

python tests/kills.py                          # 60 moments over all commands
python tests/kills.py --seed 3 --command cache  # the commands whose name holds this word

Half of the moments are SIGKILL to all processes of a command, as when a machine dies; the others are SIGTERM to the
first process, or, where there are several, SIGKILL to one of them. A moment is bad if processes stay behind, SIGTERM
prints a traceback, the same command does not go on, or its result differs.
"""

import argparse
import filecmp
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from hostile import make, parser_of, start, wait_for
from hostile_lines import CACHE, LINES, make_kit
from training import gen_helpers, helpers
from training.test_processes import NO_RANDOMNESS

from headmix_vision.cli import COMMANDS

PATIENCE_S = 60  # for processes to end after a signal
LONG = {"trainer__max_epochs": 3, "trainer__limit_train_batches": 20, "trainer__accumulate_grad_batches": 1}
OFTEN = "--checkpoint_every_n_steps 4 --ckpt_path auto"
SWEEP = "analyze sweep block_count --task cls.yaml --seeds 1 --rates 0.01 --epochs 1 --variants M=1 M=4 --out new"


def same_files(one: Path, other: Path) -> None:
    """Assert that two files or folders hold the same bytes."""
    names = [path.relative_to(other) for path in sorted(other.rglob("*")) if path.is_file()] or [Path()]
    assert names == ([path.relative_to(one) for path in sorted(one.rglob("*")) if path.is_file()] or [Path()])
    different = [str(name) for name in names if not filecmp.cmp(one / name, other / name, shallow=False)]
    assert not different, f"{different[:3]} differ"


def same_table(one: Path, other: Path) -> None:
    """Assert that two sweeps found the same, at whatever speed."""
    rows = [helpers.read_csv(place / "block_count.csv", without="images_per_s") for place in (one, other)]
    assert rows[0] == rows[1]


class Job(NamedTuple):
    """A command to kill.

    Args:
        words: The command line, which also goes on with what is there.
        moments: How often it is killed, of 60 in all.
        processes: How many of torchrun share it; 0 for a fork of this process.
        same: Asserts that two results are equal.
        out: What it writes.
    """

    words: str
    moments: int
    processes: int = 0
    same: Callable[[Path, Path], None] = same_files
    out: str = "new"


FIT = f"train-cls fit -c long.yaml --run_dir new {OFTEN}"
JOBS = {
    "fit a classifier": Job(FIT, 9, same=helpers.assert_same_run),
    "fit a generator": Job(f"train-gen fit -c long_gen.yaml --run_dir new {OFTEN}", 8, same=helpers.assert_same_run),
    "fit, 2 processes": Job(f"{FIT} --trainer.devices 2 --trainer.strategy ddp", 5, 2, helpers.assert_same_run),
    "fit, 4 processes": Job(f"{FIT} --trainer.devices 4 --trainer.strategy ddp", 3, 4, helpers.assert_same_run),
    "fit, 2 with shards": Job(f"{FIT} --trainer.devices 2 --trainer.strategy fsdp2", 5, 2, helpers.assert_same_run),
    "sample": Job("sample images --model gen --num 200 --steps 4 --batch-size 8 --npz --out new", 8),
    "sample, 2 processes": Job("sample images --model gen --num 200 --steps 40 --batch-size 8 --out new", 3, 2),
    "cache-latents": Job(f"{CACHE} new --shard-size 1", 6),
    "cache-latents, 2 processes": Job(f"{CACHE} new --shard-size 1", 2, 2),
    "export a classifier": Job("export run --out new.safetensors --overwrite", 3, out="new.safetensors"),
    "export a generator": Job("export gen --out new --overwrite", 3),
    "index-shards": Job("index-shards tars/train --workers 0", 3, out="tars/train"),
    "sweep": Job(SWEEP, 2, 1, same_table),
}


def family(pid: int) -> list[int]:
    """List a process and all that it has started, by generations."""
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def begin(job: Job, folder: Path) -> int:
    """Start a command in a folder; return its process."""
    (folder / "stderr").touch()  # as it may be killed before it does
    if not job.processes:
        return start(job.words.split(), folder, folder)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes), "-m", "--"]
    words = ["headmix_vision", *job.words.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as errors:
        command = [sys.executable, "-m", *(launcher if job.processes > 1 else ()), *words]
        return subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=errors, env=environment, start_new_session=True
        ).pid


def finish(job: Job, folder: Path) -> float:
    """Run a command to its end, which must be a good one; return the seconds that it took."""
    began_s = time.monotonic()
    status = wait_for(begin(job, folder), 600)
    assert status == 0, f"does not go on: {(folder / 'stderr').read_text()[-1500:]}"
    return time.monotonic() - began_s


def strike(job: Job, folder: Path, rng: random.Random, length_s: float) -> str:
    """Start a command and kill it at some moment; return how."""
    pid = begin(job, folder)
    time.sleep(rng.uniform(0.3 * (job.processes > 0), 0.95) * length_s)
    alive = family(pid)
    how = rng.choice(["all", "all", "term", "one" if job.processes > 1 else "term"])
    for one in {"all": alive, "term": [pid], "one": [rng.choice(alive[1:] or alive)]}[how]:
        try:
            os.kill(one, signal.SIGTERM if how == "term" else signal.SIGKILL)
        except ProcessLookupError:
            continue
    ended = wait_for(pid, PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while left := [one for one in alive if Path(f"/proc/{one}/exe").exists()]:
        if time.monotonic() > deadline:
            for one in left:
                os.kill(one, signal.SIGKILL)
            raise AssertionError(f"{len(left)} processes stayed behind")
        time.sleep(0.05)
    assert ended is not None, "did not end"
    said = (folder / "stderr").read_text()
    assert how != "term" or "SignalException" in said or "Traceback" not in said, f"SIGTERM prints {said[-1500:]}"
    return "too late" if ended == 0 else {"all": "SIGKILL", "term": "SIGTERM", "one": "SIGKILL to one"}[how]


def main() -> None:
    """Kill, go on and compare; end with status 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", default="", help="commands whose name holds this word (all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for command in COMMANDS:
        parser_of(command)
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        kit, whole, folder = (Path(place) / name for name in ("kit", "whole", "new"))
        make_kit(LINES, kit, make)
        helpers.write_config(kit / "long.yaml", **LONG, **NO_RANDOMNESS)
        gen_helpers.write_config(kit / "long_gen.yaml", **LONG)
        print(f"{'command':28}{'length':>8}  moments")
        for name, job in JOBS.items():
            if options.command not in name:
                continue
            rng, found = random.Random(f"{options.seed}/{name}"), Counter[str]()
            shutil.copytree(kit, whole)
            length_s = finish(job, whole)
            for _ in range(job.moments):
                try:
                    how = "too late"
                    for _ in range(4):
                        shutil.rmtree(folder, ignore_errors=True)
                        shutil.copytree(kit, folder)
                        if (how := strike(job, folder, rng, length_s)) != "too late":
                            break
                    finish(job, folder)
                    job.same(folder / job.out, whole / job.out)
                    found[how] += 1
                except AssertionError as error:
                    bad += 1
                    found["BAD"] += 1
                    print(f"{name}: {error}", flush=True)
            shutil.rmtree(whole)
            print(
                f"{name:28}{length_s:6.1f} s  " + ", ".join(f"{count} {how}" for how, count in found.items()),
                flush=True,
            )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
