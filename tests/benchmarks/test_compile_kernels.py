"""Kernels for GPUs that are not there: they compile, and need no more shared memory than a program has."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_kernels.py"


def compile_for(*arguments):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_training_fits_a_gpu_with_little_shared_memory():
    """The backward pass of keys holds all queries of a head on chip where there is room, and goes tile by tile here."""
    assert "4 kernels" in compile_for("--gpu", "8.9", "--match", "backward_key_kernel mhla pairwise", "--jobs", "2")


def test_hopper_has_kernels_for_short_sequences():
    assert "2 kernels" in compile_for("--gpu", "9.0", "--match", "gluon_", "--jobs", "2")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("gpu", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_the_most_demanding_kernels_fit_every_gpu(gpu):
    report = compile_for("--gpu", gpu)
    assert "do not run" in report and ("head_in_head" in report) == (gpu == "10.0")
