"""Few images for trainings of digits."""

import pytest

from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.digits import Digits


@pytest.fixture
def few_digits(monkeypatch):
    """Leave 64 images in each split of the digits: reading and augmenting them takes its time."""

    def open_few(request: SplitRequest) -> Digits:
        digits = Digits(request.split, request.channels)
        digits.images, digits.targets = digits.images[:64], digits.targets[:64]
        return digits

    monkeypatch.setattr("headmix_vision.data.datasets.digits.open_digits", open_few)
