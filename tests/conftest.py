"""Run the Triton kernels in their interpreter where there is no GPU, and skip tests that need one."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # benchmarks and experiments, which are not installed
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined, before the package is imported


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
