"""Tiny runs of `train_gen.py`: 2 epochs of 6 batches with label dropout, averaging and accumulation."""

from pathlib import Path
from typing import Any

import yaml

from headmix_vision.cli import train_gen

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
        "name": "dit_mhla_digits",
        "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2, "class_dropout": 0.5},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
    },
    "ema": {"decay": 0.9},
    "samples": {"every_n_steps": 4, "classes": [3, 7], "rows": 2, "steps": 2, "guidance": 2.0},
    "data": {"dataset": "digits", "batch_size": 8, "eval_batch_size": 16},
}

# What differs for a model of clips, of which some go on from clean frames.
VIDEO: dict[str, Any] = {
    "model__name": "dit_video_mhla_digits",
    "model__input_size": [4, 16, 16],
    "model__objective": {"clean_prefix": 0.5},
    "data__dataset": "moving_digits",
}


def write_config(path: Path, **overrides: Any) -> Path:
    """Write the tiny config with `section__option=value` overrides."""
    config = yaml.safe_load(yaml.safe_dump(TINY))
    for name, value in overrides.items():
        *sections, option = name.split("__")
        target = config
        for section in sections:
            target = target.setdefault(section, {})
        target[option] = value
    path.write_text(yaml.safe_dump(config))
    return path


def run(*args: object) -> int:
    """Run the command line in this process; returns its exit status."""
    try:
        train_gen.main([str(arg) for arg in args], None)
    except SystemExit as end:
        return int(end.code or 0)
    return 0
