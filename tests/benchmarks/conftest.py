"""The scripts of the folder `benchmarks` as modules."""

import importlib
import sys
from pathlib import Path

import pytest

from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.digits import Digits

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a module of the scripts' folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def few_digits(monkeypatch):
    """Leave 64 images in each split of the digits: reading and augmenting them takes its time."""

    def open_few(request: SplitRequest) -> Digits:
        digits = Digits(request.split, request.channels)
        digits.images, digits.targets = digits.images[:64], digits.targets[:64]
        return digits

    monkeypatch.setattr("headmix_vision.data.datasets.digits.open_digits", open_few)
