"""Start training runs by their command line: a run that was interrupted goes on, a finished one is left as it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headmix_lab.scripts import run_python
from headmix_vision.runs.directory import CONFIG, FINISHED, LAST


def train(script: Sequence[str], run: Path, options: Sequence[object], **how: Any) -> None:
    """Train, or go on with an interrupted run.

    Args:
        script: What Python runs: `["train_cls.py"]`, or `["-m", MODULE]`.
        run: Run directory, the same for the same options alone.
        options: Options of `fit`, with `-c` and the recipes.
        how: As for `run_python`.

    Raises:
        RunFailed: Training failed.
        TimeOver: It was interrupted; the same call goes on with it.
    """
    run = run.absolute()
    if (run / FINISHED).exists():
        return
    trust = [option for option in options if str(option) in ("--trust-config", "--trust_config")]
    arguments = ["-c", run / CONFIG, "--ckpt_path", "last", *trust]
    if not (run / LAST).exists():
        arguments = [*options, "--overwrite", "true"]
    run_python([*script, "fit", *arguments, "--run_dir", run], **how)
    (run / FINISHED).touch()
