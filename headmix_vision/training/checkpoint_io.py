"""Writing checkpoints: complete files only."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from headmix_vision.errors import message_of
from headmix_vision.files.writing import atomic_path, check_place
from headmix_vision.runs.checkpoints import (
    HASH,
    SHARDED,
    SHARDS,
    VALUES_HASH,
    checkpoint_sha256,
    read_checkpoint,
    values_sha256,
)
from headmix_vision.runs.shards import remove_shards
from headmix_vision.training.run_directory import RunDirectory, RunLostError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write checkpoints beside their target, then rename them.

    Lightning's default writes to the system's temporary folder and moves the file from there, which is a plain copy,
    and may be torn, when that folder is on another file system.

    Args:
        after_save: Called when a checkpoint is complete.
        run: The run directory; a checkpoint is written elsewhere when it is lost.
        entries: Further entries of each checkpoint.
    """

    def __init__(
        self,
        after_save: Callable[[], None] | None = None,
        run: RunDirectory | None = None,
        entries: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.entries = entries
        self.after_save = after_save
        self.run = run

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save the checkpoint to `path`, with the hash of its tensors; `storage_options` is not supported.

        The hash takes 0.65 s of CPU time per GiB, on up to 8 threads. Without it a checkpoint takes 1.2 s per GiB.

        Raises:
            OSError: If the system refuses it, such as on a full disk; the file that was there stays.
            RunLostError: If the run directory is lost; the error names another place where the checkpoint is.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not supported")
        run, checkpoint = self.run, {**checkpoint, **self.entries}
        if run is None or run.lost() is None:
            try:
                self._write(checkpoint, Path(path))
            except OSError as error:
                if run is None:
                    raise
                run.note(error)
        if run is not None and (reason := run.lost()) is not None:
            raise RunLostError(f"{reason}; {self._rescue(checkpoint, Path(path), run)}")
        if self.after_save is not None:
            self.after_save()

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            try:
                hashes = {HASH: checkpoint_sha256(checkpoint), VALUES_HASH: values_sha256(checkpoint)}
                torch.save({**checkpoint, **hashes}, file)
            except RuntimeError as error:
                # torch covers what the system said with words about its container
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        remove_shards(path, keep=checkpoint.get(SHARDS, {}).get("folder"))

    def _rescue(self, checkpoint: dict[str, Any], path: Path, run: RunDirectory) -> str:
        """Write a checkpoint somewhere else, or beside its shards, and print where it is."""
        step = checkpoint.get("global_step")
        name = f"{run.path.absolute().name}-step-{step}.ckpt"
        targets = [path] if SHARDS in checkpoint else [place / name for place in _other_places(run.path)]
        reasons = []
        for target in targets:
            try:
                check_place(target)
                self._write(checkpoint, target)
            except OSError as error:
                reasons.append(message_of(error))
            else:
                return (
                    f"the weights of step {step} are in {target}:"
                    f" go on with the same command, another --run-dir and --ckpt-path {target}"
                )
        return f"the weights of step {step} are lost: {', '.join(reasons)}"

    def load_checkpoint(self, path: str | os.PathLike[str], *_: Any, **__: Any) -> dict[str, Any]:
        """Read a checkpoint, also one in shards, on the CPU.

        Raises:
            InputError: As `read_checkpoint`.
        """
        return read_checkpoint(path, sharded=SHARDED)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint with its shards."""
        super().remove_checkpoint(Path(path))
        remove_shards(Path(path))


def _other_places(run_dir: Path) -> list[Path]:
    """List the folders that take a checkpoint when the run directory is lost."""
    places = (run_dir.absolute().parent, Path(), Path(tempfile.gettempdir()))
    return [place for place in places if place.is_dir()]
