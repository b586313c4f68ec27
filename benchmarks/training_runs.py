"""Training runs of a comparison: starting the scripts of the repository."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headmix_vision.console.scripts import run_python
from headmix_vision.runs import starting

REPOSITORY = Path(__file__).parents[1]

run_script = partial(run_python, cwd=REPOSITORY)
"""`run_python` from the repository's root."""


def train(script: str, config: str, run: Path, options: Sequence[object], **how: Any) -> None:
    """Train by a script of the repository (`train_cls.py`, `-m MODULE`) and a recipe; see `runs.starting.train`."""
    starting.train(script.split(), run, ["-c", config, *options], cwd=REPOSITORY, **how)
