"""Fixtures of the data tests."""

from pathlib import Path

import pytest

from .helpers import write_image


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """train: 3 classes of 4 images, val: 3 classes of 2 images."""
    root = tmp_path / "images"
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("ant", "bee", "cat")):
            for i in range(count):
                write_image(root / split / name / f"{name}{i}.png", seed=100 * label + 10 * i + len(split))
    return root
