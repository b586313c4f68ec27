"""Shared runs of the training tests."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from . import helpers


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Put signal handlers and thread count back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the tiny run, uninterrupted."""
    folder = tmp_path_factory.mktemp("reference")
    config = helpers.write_config(folder / "tiny.yaml")
    torch.set_num_threads(1)
    assert helpers.run("fit", "-c", config, "--run_dir", folder / "run") == 0
    return folder / "run"
