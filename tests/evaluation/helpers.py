"""Images to score, and the command line in this process."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headmix_vision.data.datasets.digits import Digits
from headmix_vision.evaluate import main


def digit_pixels(indices: Iterable[int]) -> np.ndarray:
    """Digits as uint8 [N, 8, 8]."""
    images = Digits("train").images[list(indices), 0]
    return (images * 255).round().numpy().astype(np.uint8)


def write_digits(folder: Path, indices: Iterable[int]) -> Path:
    """Write digits as PNG files."""
    folder.mkdir(parents=True)
    for number, pixels in enumerate(digit_pixels(indices)):
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")
    return folder


def run(*args: object) -> int:
    """Run the command line; returns its exit status."""
    try:
        main([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line with which a command is refused."""
    capsys.readouterr()
    assert run(*args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line
