"""A tiny run of the command line: 2 epochs of 6 batches with drop path, mixup, averaging and accumulation."""

import csv
from pathlib import Path
from typing import Any

import torch
import yaml

from headmix_vision.cli import train_cls
from headmix_vision.runs.checkpoints import SHARDED, read_checkpoint

TINY: dict[str, Any] = {
    "seed_everything": 3,
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 2,
        "limit_train_batches": 6,
        "limit_val_batches": 2,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
    "model": {
        "name": "vit_tiny_patch16_224",
        "num_classes": 10,
        "img_size": 8,
        "model_args": {
            "patch_size": 2,
            "in_chans": 1,
            "depth": 2,
            "embed_dim": 24,
            "num_heads": 3,
            "drop_path_rate": 0.2,
        },
        "mixup": {"mixup_alpha": 0.4, "cutmix_alpha": 1.0},
        "schedule": {"warmup_epochs": 0.5},
    },
    "ema": {"decay": 0.9},
    "data": {"dataset": "digits", "batch_size": 8, "eval_batch_size": 16},
}


def write_config(path: Path, **overrides: Any) -> Path:
    """Write the tiny config with `section__option=value` overrides."""
    config = yaml.safe_load(yaml.safe_dump(TINY))
    for name, value in overrides.items():
        *sections, option = name.split("__")
        target = config
        for section in sections:
            target = target[section]
        target[option] = value
    path.write_text(yaml.safe_dump(config))
    return path


def run(*args: object) -> int:
    """Run the command line in this process; returns its exit status."""
    try:
        train_cls.main([str(arg) for arg in args], None)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint."""
    return torch.load(path, map_location="cpu", weights_only=True)


def read_csv(path: Path, without: str = "train/images_per_s") -> list[dict[str, str]]:
    """Rows of a CSV file, without the one column that differs between repetitions of a run."""
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if name != without} for row in csv.DictReader(file)]


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Compare nested containers of tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}/{i}")
    else:
        assert a == b, where


def assert_same_run(a: Path, b: Path) -> None:
    """Two run directories ended with the same weights, optimizer state and metrics."""
    first, second = (read_checkpoint(run / "checkpoints" / "last.ckpt", sharded=SHARDED) for run in (a, b))
    for key in ("epoch", "global_step", "state_dict", "current_model_state", "averaging_state", "optimizer_states"):
        assert_equal(first[key], second[key], key)
    assert read_csv(a / "metrics.csv") == read_csv(b / "metrics.csv")
