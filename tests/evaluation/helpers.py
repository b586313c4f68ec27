"""Images to score, and the command line in this process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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


def write_run(folder: Path, state: dict[str, torch.Tensor], **description: Any) -> Path:
    """Write the best checkpoint of a classifier's run as training does."""
    checkpoint = folder / "checkpoints" / "best.ckpt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    weights = {f"net.{name}": value for name, value in state.items()}
    torch.save({"state_dict": weights, "headmix_vision": {"name": "deit_mhla_digits", **description}}, checkpoint)
    return checkpoint


def run(*args: object) -> int:
    """Run the command line; returns its exit status."""
    try:
        main([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line with which a command is refused, below those that tell how far it came and what it left out."""
    capsys.readouterr()
    assert run(*args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = (
        line for line in captured.err.splitlines() if not line.startswith("scoring: ") and " left out: " not in line
    )
    assert line.startswith("error: ")
    return line
