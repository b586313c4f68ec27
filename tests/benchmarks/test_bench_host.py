"""`bench_host.py`: with its gate, a check of what the ops launch without Triton's search."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_later_calls_launch_what_the_first_does():
    """In a process of its own: here the kernels are interpreted."""
    command = [sys.executable, "-m", "benchmarks.bench_host", "--repeats", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].split(",")[0].strip() for line in done.stdout.splitlines()[2:]] == [
        *["mhla"] * 4,
        "head_in_head",
        "mix_heads",
        "grid_conv",
    ]
