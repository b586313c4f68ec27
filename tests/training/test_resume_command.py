"""The command that continues a run is one that its user can type."""

import sys
from pathlib import Path

import pytest

from headmix_vision.training.run_directory import resume_command

OPTIONS = "fit --run-dir runs/digits --ckpt-path last"


@pytest.mark.parametrize(
    ("called", "alone", "launched"),
    [
        (["train_cls.py"], "python train_cls.py", "train_cls.py"),
        (["/opt/env/bin/headmix-train-cls"], "headmix-train-cls", "--no-python headmix-train-cls"),
        (["/opt/env/bin/headmix", "train-cls"], "headmix train-cls", "--no-python headmix train-cls"),
        (
            ["/opt/headmix_vision/__main__.py", "train-cls"],
            "python -m headmix_vision train-cls",
            "-m headmix_vision train-cls",
        ),
    ],
)
def test_it_is_that_of_the_program_and_launcher_in_use(called, alone, launched, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", [*called, "fit"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert resume_command(Path("runs/digits")) == f"{alone} {OPTIONS}"
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    launcher = f"torchrun --nnodes 2 --nproc-per-node 8 {launched}"
    assert resume_command(Path("runs/digits")) == f"{launcher} {OPTIONS}"
