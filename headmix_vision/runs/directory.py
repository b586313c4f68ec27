"""The names of the files in a run directory, and how to find a checkpoint there."""

import os
from pathlib import Path

from headmix_vision.errors import InputError

CONFIG = "config.yaml"
METRICS = "metrics.csv"
CURVES = "curves.png"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
PREDICTIONS = "predictions.csv"
SAMPLES = "samples"


def find_checkpoint(run: str | os.PathLike[str], which: str | None = None) -> Path:
    """Finds a checkpoint.

    Args:
        run: A run directory, or a `.ckpt` file, which is the checkpoint itself.
        which: `best` or `last` of the run directory, or the path of a file; the best one when None, or the last one of
            a run that keeps no best.

    Raises:
        InputError: If the file does not exist.
    """
    run = Path(run)
    folder = run / CHECKPOINTS
    if which is None:
        which = "best" if (folder / "best.ckpt").is_file() or not (folder / "last.ckpt").is_file() else "last"
    path = folder / f"{which}.ckpt" if which in ("best", "last") else Path(which)
    if run.suffix == ".ckpt":
        path = run
    if not path.is_file():
        raise InputError(f"no checkpoint at {path} (asked for {which})")
    return path
