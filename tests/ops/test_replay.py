"""Replayed calls without a GPU: `replay_cases.py`, in a process whose driver stands in for CUDA's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headmix_vision.ops import runtime

HERE = Path(__file__).parent


@pytest.mark.skipif(runtime.NO_KERNELS is not None or torch.cuda.is_available(), reason="needs Triton and no GPU")
@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("c++")), reason="needs compilers of C and C++")
def test_replayed_calls_beside_another_driver(tmp_path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, HERE / "replay_driver.c"], check=True)
    env = {"HEADMIX_VISION_REPLAY": "1", "TRITON_INTERPRET": "0", "TRITON_LIBCUDA_PATH": str(tmp_path)}
    env |= {"LD_LIBRARY_PATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", HERE / "replay_cases.py"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
