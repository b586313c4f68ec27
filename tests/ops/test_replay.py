"""Replayed calls without a GPU, in processes whose driver stands in for CUDA's.

`replay_cases.py` compares launches, and `replay_numbers.py` results. Both need the extension, which compiles in 30 s.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headmix_vision.ops import hardware

HERE = Path(__file__).parent
PROCESSES = {  # MALLOC_PERTURB_ overwrites memory that is freed
    "replay_cases.py": {"TRITON_INTERPRET": "0"},
    "replay_numbers.py": {"TRITON_INTERPRET": "1", "MALLOC_PERTURB_": "85"},
}


@pytest.mark.slow
@pytest.mark.skipif(hardware.NO_KERNELS is not None or torch.cuda.is_available(), reason="needs Triton and no GPU")
@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("c++")), reason="needs compilers of C and C++")
@pytest.mark.parametrize("file", PROCESSES)
def test_replayed_calls_beside_another_driver(file, tmp_path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, HERE / "replay_driver.c"], check=True)
    env = {"HEADMIX_VISION_REPLAY": "1", "TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    env |= {"OMP_NUM_THREADS": "1"} | PROCESSES[file]
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", HERE / file]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
