"""Keeps `last.ckpt`, from which a run continues."""

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from headmix_vision.errors import InputError
from headmix_vision.training.sharding import finish_saving


class LastCheckpoint(Callback):
    """Keeps `last.ckpt` current: before and after each validation, after the last epoch, and every so many steps.

    After an epoch without validation it is written if the one before is old enough: training waits while it is.

    The one before validation makes Lightning go straight back to that validation, so that neither a crash nor an
    interruption there costs an epoch. Nothing is written while a gradient is half accumulated or while the averaged
    weights stand in for the trained ones.

    Args:
        path: The file, usually `checkpoints/last.ckpt` of the run directory.
        every_n_steps: Also write after every so many optimizer steps; not when None.
        min_interval_s: Age in seconds from which the one before is replaced after an epoch without validation.
    """

    def __init__(self, path: Path, every_n_steps: int | None = None, min_interval_s: float = 60.0) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise InputError(f"checkpoint_every_n_steps must be null or at least 1, got {every_n_steps}")
        self.path = path
        self.every_n_steps = every_n_steps
        self.min_interval_s = min_interval_s
        self._last_step, self._validated, self._saved_epoch, self._saved_at_s = 0, False, False, 0.0

    def save(self, trainer: Trainer) -> None:
        """Writes the checkpoint (not in a `fast_dev_run`); all ranks call it between two optimizer steps."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.path, weights_only=False)
            if not self.path.is_file():  # of a run with metrics behind its first checkpoint it is taken to exist
                finish_saving(trainer)
            self._saved_at_s = time.monotonic()

    def save_epoch(self, trainer: Trainer) -> None:
        """Writes the checkpoint at the end of an epoch, unless that is done; all ranks call it."""
        if not self._saved_epoch:
            self.save(trainer)
            self._saved_epoch = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remembers where this run starts."""
        self._last_step, self._saved_at_s = trainer.global_step, time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for a validation in this epoch."""
        self._validated = self._saved_epoch = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves every `every_n_steps` steps."""
        stepped, self._last_step = trainer.global_step != self._last_step, trainer.global_step
        due = stepped and self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if due and can_resume_after_batch(trainer):
            self.save(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves with the validation marked as begun, which is what makes Lightning repeat it on resuming."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._validated = True
        progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        before = progress.state_dict()
        progress.increment_ready()
        progress.increment_started()
        try:
            self.save(trainer)
        finally:
            progress.load_state_dict(before)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the finished epoch, if it had a validation, is the last one, or the checkpoint before is old."""
        old = time.monotonic() - self._saved_at_s >= self.min_interval_s
        if self._validated or is_last_epoch(trainer) or trainer.strategy.reduce_boolean_decision(old, all=False):
            self.save_epoch(trainer)


def can_resume_after_batch(trainer: Trainer) -> bool:
    """Tells whether a checkpoint written in `on_train_batch_end` loses nothing.

    Lightning resumes from such a checkpoint with the next batch: it would skip a validation due after this one, and
    the hooks at the end of the epoch.
    """
    loop = trainer.fit_loop
    validation_is_due = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]
    return not (trainer.is_last_batch or validation_is_due)


def is_last_epoch(trainer: Trainer) -> bool:
    """Tells at the end of an epoch whether training ends with it: `done` of Lightning's loop says so, and prints it."""
    epochs = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    counts = (trainer.global_step, trainer.max_steps), (epochs, trainer.max_epochs or -1)
    return trainer.should_stop or any(-1 != limit <= count for count, limit in counts)
