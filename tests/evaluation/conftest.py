"""A classifier of digits with random weights, and folders of digits."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import headmix_vision  # noqa: F401  (registers the models with timm)

from .helpers import write_digits


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export as `python -m headmix_vision.export` writes it."""
    torch.manual_seed(0)
    model = timm.create_model("deit_mhla_digits")
    torch.nn.init.normal_(model.head.weight)
    path = tmp_path_factory.mktemp("classifier") / "model.safetensors"
    save_file(model.state_dict(), path, metadata={"model_name": "deit_mhla_digits", "model_args": "{}", "top1": "0"})
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of 90 and 80 different digits as PNG."""
    root = tmp_path_factory.mktemp("folders")
    return write_digits(root / "real", range(90)), write_digits(root / "fake", range(100, 180))
