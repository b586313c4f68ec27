"""The directory of a training run: who may write into it, and how one run takes the place of another.

A run that replaces another one (`--overwrite true`) leaves it alone until its first training batch, when model, data
and trainer stand. Then the earlier run's files go to `.replaced/`, which is itself a run directory, and when the new
run has its first checkpoint they are deleted. They are collected in `.replacing/`, which is renamed when it is whole:
what a killed process has left there belongs back.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.plugins.environments import SLURMEnvironment

from headmix_vision.console.arguments import command_words
from headmix_vision.errors import InputError
from headmix_vision.files.atomic import remove_temporaries
from headmix_vision.files.locks import hold_lock
from headmix_vision.runs.directory import (
    CHECKPOINTS,
    CONFIG,
    LAST,
    LOCK,
    REPLACED,
    WRITTEN_BY_A_RUN,
    find_checkpoint,
    has_results,
    is_run,
    run_files,
)
from headmix_vision.runs.shards import remove_unfinished

_REPLACING = ".replacing"


class RunDirectory:
    """The directory of one training run; used by the first process only.

    Args:
        path: The directory; it need not exist.
        checkpoint: What the run continues from: `last`, `best` or a file; None for a new run.
        overwrite: Whether an earlier run may be replaced.
    """

    def __init__(self, path: Path, checkpoint: str | None, *, overwrite: bool) -> None:
        self.path = path
        self.checkpoint = checkpoint
        self.overwrite = overwrite
        self._replaced, self._replacing = path / REPLACED, path / _REPLACING

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the directory against other runs, and check that this run may write into it.

        Puts an earlier run back whose replacement ended before its first checkpoint, and removes the temporary files
        of killed runs. Nothing else is changed.

        Raises:
            InputError: If another run writes there, if there is an earlier run that is neither continued nor replaced,
                or files that no run wrote.
        """
        if self.checkpoint is not None and self.overwrite:
            raise InputError("--overwrite true would delete the checkpoint to resume from; give one of the two options")
        with hold_lock(self.path / LOCK, f"run directory {self.path}"):
            self._tidy()
            self.check()
            try:
                yield
            finally:
                if self._replaced.is_dir():
                    print(
                        f"{self.path} has no checkpoint yet: the earlier run is kept in {self._replaced}"
                        " until it has one, and put back by the next fit without --overwrite",
                        file=sys.stderr,
                    )

    def begin(self) -> None:
        """Make room for a new run, when nothing stands in the way of its first step."""
        if self.checkpoint is not None or _requeued(self.path):
            return
        if self._replaced.is_dir() or not has_results(self.path):
            _delete(self.path)
        else:
            _move(self.path, self._replacing)
            self._replacing.rename(self._replaced)

    def discard_replaced(self) -> None:
        """Delete the run that this one has replaced."""
        if self._replaced.is_dir():
            shutil.rmtree(self._replaced)

    def _tidy(self) -> None:
        for pattern in WRITTEN_BY_A_RUN:
            remove_temporaries((self.path / pattern).parent, Path(pattern).name)
        remove_unfinished(self.path / CHECKPOINTS)
        if self._replaced.is_dir() and (self.path / LAST).is_file():
            self.discard_replaced()  # killed between the checkpoint and the deletion
        elif self._replaced.is_dir() and not self.overwrite:
            _delete(self.path)
            self._replaced.rename(self._replacing)
            print(f"{self.path}: put back the run whose replacement ended before its first checkpoint", file=sys.stderr)
        if self._replacing.is_dir():
            _move(self._replacing, self.path)
            self._replacing.rmdir()

    def check(self) -> None:
        """Check that a run may write into the directory.

        Raises:
            InputError: As `claimed`, but for another run that writes there.
        """
        if _requeued(self.path) or self._continues():
            return
        files = run_files(self.path) or sorted((self.path / CHECKPOINTS).glob("*"))
        if files and not is_run(self.path):
            raise InputError(f"{self.path} holds {files[0]}, which no run wrote; choose another --run_dir")
        if self.overwrite or not has_results(self.path):
            return
        if self.checkpoint is not None:
            raise InputError(
                f"{self.path} already holds a run, and {self.checkpoint} is none of its checkpoints:"
                " choose another --run_dir"
            )
        resume = "continue it with --ckpt_path last, " if (self.path / LAST).is_file() else "it has no last.ckpt, "
        raise InputError(
            f"{self.path} already holds a run: {resume}choose another --run_dir, or delete it with --overwrite true"
        )

    def _continues(self) -> bool:
        """Tells whether the run continues from a checkpoint of this directory."""
        if self.checkpoint is None:
            return False
        return find_checkpoint(self.path, self.checkpoint).resolve().is_relative_to(self.path.resolve())


def _requeued(run_dir: Path) -> bool:
    return SLURMEnvironment.detect() and any(run_dir.glob("hpc_ckpt_*.ckpt"))


def _move(source: Path, target: Path) -> None:
    """Moves the files of a run from one folder to another on the same file system."""
    for path in run_files(source):
        moved = target / path.relative_to(source)
        moved.parent.mkdir(parents=True, exist_ok=True)
        path.rename(moved)
    _remove_empty_folders(source)


def _delete(run_dir: Path) -> None:
    for path in run_files(run_dir):
        path.unlink()
    _remove_empty_folders(run_dir)


def _remove_empty_folders(run_dir: Path) -> None:
    parents = {Path(pattern).parent for pattern in WRITTEN_BY_A_RUN} - {Path()}
    folders = {folder for parent in parents for folder in run_dir.glob(str(parent))}
    for folder in sorted(folders, reverse=True):  # those inside of others first
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def resume_command(run_dir: Path) -> str:
    """The command which continues the run, for the launcher in use."""
    words = command_words()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local_size, nodes = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("GROUP_WORLD_SIZE", "1")
        program = words[1:] if words[0] == "python" else ["--no-python", *words]
        words = ["torchrun", "--nnodes", nodes, "--nproc-per-node", str(local_size), *program]
    return f"{' '.join(words)} fit -c {run_dir / CONFIG} --ckpt_path last"
