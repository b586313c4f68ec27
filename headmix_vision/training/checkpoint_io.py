"""Writing checkpoints: complete files only."""

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from headmix_vision.atomic import atomic_path


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints beside their target, then renames them.

    Lightning's default writes to the system's temporary folder and moves the file from there, which is a plain copy,
    and may be torn, when that folder is on another file system.

    Args:
        after_save: Called when a checkpoint is complete.
    """

    def __init__(self, after_save: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.after_save = after_save

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves the checkpoint to `path`; `storage_options` is not supported."""
        if storage_options is not None:
            raise TypeError("storage_options are not supported")
        with atomic_path(path) as temporary:
            torch.save(checkpoint, temporary)
        if self.after_save is not None:
            self.after_save()
