"""The directory of a training run: who may write into it, and how one run takes the place of another.

A run that replaces another one (`--overwrite`) leaves it alone until its first training batch, when model, data
and trainer stand. Then the earlier run's files go to `.replaced/`, which is itself a run directory, and when the new
run has its first checkpoint they are deleted. They are collected in `.replacing/`, which is renamed when it is whole:
what a killed process has left there belongs back.

A command that refuses changes nothing: leftovers of killed processes are tidied up when training begins. Until then a
run is read from where they have left it, see `runs.directory.standing_file`.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.plugins.environments import SLURMEnvironment

from headmix_vision.console import command_words, say
from headmix_vision.errors import InputError, message_of
from headmix_vision.files.writing import hold_lock, remove_temporaries
from headmix_vision.runs.checkpoints import find_standing_checkpoint
from headmix_vision.runs.directory import (
    CHECKPOINTS,
    LAST,
    LOCK,
    REPLACED,
    REPLACING,
    WRITTEN_BY_A_RUN,
    check_folders,
    has_results,
    is_run,
    run_files,
    run_folders,
    standing_file,
    standing_places,
)
from headmix_vision.runs.shards import remove_unfinished

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what is there stays, and the run goes on from it


class RunLostError(RuntimeError):
    """The directory of a run has disappeared, or cannot be written to any more."""


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
        self._begun = False
        self._claimed: os.stat_result | None = None
        self._failure: str | None = None
        self._replaced, self._replacing = path / REPLACED, path / REPLACING

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the directory against other runs, and check that this run may write into it; change nothing.

        Raises:
            InputError: If another run writes there, if there is an earlier run that is neither continued nor replaced,
                or files that no run wrote, or a link in the place of a folder.
        """
        if self.checkpoint is not None and self.overwrite:
            raise InputError("--overwrite would delete the checkpoint to resume from; give one of the two options")
        with hold_lock(self.path / LOCK, f"run directory {self.path}"):
            self.check()
            self._claimed = self.path.stat()
            try:
                yield
            finally:
                if self._begun and self._replaced.is_dir():
                    say(
                        f"{self.path} has no checkpoint yet: the earlier run is kept in {self._replaced}"
                        " until it has one, and put back by fit --ckpt-path last"
                    )

    def begin(self) -> None:
        """Tidy up after killed runs, and make room for a new one, when nothing stands in the way of its first step.

        Put an earlier run back that goes on, and whose replacement ended before its first checkpoint.
        """
        self._begun = True
        self._tidy()
        if self.checkpoint is not None or _requeued(self.path):
            return
        if self._replaced.is_dir() or not has_results(self.path):
            _delete(self.path)
        else:
            _move(self.path, self._replacing)
            self._replacing.rename(self._replaced)

    def note(self, error: OSError) -> None:
        """Remember that a file could not be written, which ends the run at its next step; raise if a disk is full."""
        if error.errno in FULL_DISK:
            raise error
        self._failure = self._failure or message_of(error)

    def lost(self) -> str | None:
        """Return the reason why nothing can be written to the directory any more; None while it can."""
        assert self._claimed is not None
        try:
            if not os.path.samestat(self._claimed, self.path.stat()):
                return f"another folder has taken the place of the run directory {self.path}"
        except OSError as error:
            gone = isinstance(error, FileNotFoundError | NotADirectoryError)
            return f"the run directory {self.path} has disappeared" if gone else message_of(error)
        return self._failure

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
            say(f"{self.path}: put back the run whose replacement ended before its first checkpoint")
        if self._replacing.is_dir():
            _move(self._replacing, self.path)
            self._replacing.rmdir()

    def check(self) -> None:
        """Check that a run may write into the directory.

        Raises:
            InputError: As `claimed`, but for another run that writes there.
        """
        check_folders(self.path)
        if _requeued(self.path) or self._continues():
            return
        places = standing_places(self.path)
        files = run_files(self.path) or sorted((self.path / CHECKPOINTS).glob("*"))
        if files and not any(map(is_run, places)):
            raise InputError(f"{self.path} holds {files[0]}, which no run wrote; choose another --run-dir")
        if self.overwrite or not any(map(has_results, places)):
            return
        if self.checkpoint is not None:
            raise InputError(
                f"{self.path} already holds a run, and {self.checkpoint} is none of its checkpoints:"
                " choose another --run-dir"
            )
        can_go_on = standing_file(self.path, LAST).is_file()
        resume = "continue it with --ckpt-path last, " if can_go_on else "it has no last.ckpt, "
        raise InputError(
            f"{self.path} already holds a run: {resume}choose another --run-dir, or delete it with --overwrite"
        )

    def _continues(self) -> bool:
        """Return whether the run continues from a checkpoint of this directory."""
        if self.checkpoint is None:
            return False
        return find_standing_checkpoint(self.path, self.checkpoint).resolve().is_relative_to(self.path.resolve())


def _requeued(run_dir: Path) -> bool:
    return SLURMEnvironment.detect() and any(run_dir.glob("hpc_ckpt_*.ckpt"))


def _move(source: Path, target: Path) -> None:
    """Move the files of a run from one folder to another on the same file system."""
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
    for folder in sorted(run_folders(run_dir), reverse=True):  # those inside of others first
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def resume_command(run_dir: Path) -> str:
    """The command which continues the run, for the launcher in use."""
    words = command_words()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local_size, nodes = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("GROUP_WORLD_SIZE", "1")
        program = words[1:] if words[0] == "python" else ["--no-python", *words]
        words = ["torchrun", "--nnodes", nodes, "--nproc-per-node", str(local_size), *program]
    return f"{' '.join(words)} fit --run-dir {run_dir} --ckpt-path last"
