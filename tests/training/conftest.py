"""Shared runs of the training tests."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch  # noqa: F401  here, as its log handler keeps the stderr in which it is imported
import pytest
import torch

from . import helpers


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Put signal handlers, threads and environment back: LOCAL_RANK of one test makes another wait for its peers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads, environment = torch.get_num_threads(), dict(os.environ)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the tiny run, uninterrupted."""
    folder = tmp_path_factory.mktemp("reference")
    config = helpers.write_config(folder / "tiny.yaml")
    torch.set_num_threads(1)
    assert helpers.run("fit", "-c", config, "--run_dir", folder / "run") == 0
    return folder / "run"
