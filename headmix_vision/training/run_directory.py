"""The run directory: when a new run may write into it, and how a run is continued."""

import os
import shutil
import sys
from pathlib import Path

from lightning.fabric.plugins.environments import SLURMEnvironment

from headmix_vision.errors import InputError
from headmix_vision.runs.directory import (
    CHECKPOINTS,
    CONFIG,
    CURVES,
    METRICS,
    PREDICTIONS,
    SAMPLES,
    TENSORBOARD,
)


def prepare_run_directory(run_dir: Path, *, resuming: bool, overwrite: bool) -> None:
    """Check that a training run may start in a directory, and empty it if asked to.

    Only what an earlier run wrote is deleted, nothing else in the directory.

    Args:
        run_dir: The run directory; it need not exist.
        resuming: Whether the run continues from a checkpoint.
        overwrite: Whether an earlier run may be deleted.

    Raises:
        InputError: If there is an earlier run and neither is the case, or both are.
    """
    if resuming and overwrite:
        raise InputError("--overwrite true would delete the checkpoint to resume from; give one of the two options")
    if resuming or not any((run_dir / name).exists() for name in (METRICS, CHECKPOINTS)):
        return
    requeued = SLURMEnvironment.detect() and any(run_dir.glob("hpc_ckpt_*.ckpt"))
    if requeued:
        return
    if not overwrite:
        raise InputError(
            f"{run_dir} already holds a run: continue it with --ckpt_path last,"
            " choose another --run_dir, or delete it with --overwrite true"
        )
    for name in (CONFIG, METRICS, CURVES, TENSORBOARD, CHECKPOINTS, PREDICTIONS, SAMPLES):
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def resume_command(run_dir: Path) -> str:
    """The command which continues the run, for the launcher in use."""
    local_size, nodes = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("GROUP_WORLD_SIZE", "1")
    installed = Path(sys.argv[0]).name.startswith("headmix-")
    command = Path(sys.argv[0]).name if installed else sys.argv[0]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        no_python = "--no-python " if installed else ""
        command = f"torchrun --nnodes {nodes} --nproc-per-node {local_size} {no_python}{command}"
    elif not installed:
        command = f"python {command}"
    return f"{command} fit -c {run_dir / CONFIG} --ckpt_path last"
