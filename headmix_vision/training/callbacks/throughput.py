"""Log images per second."""

import time
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from headmix_vision.training.base_module import BaseModule

RATE = "train/images_per_s"


class ImagesPerSecond(Callback):
    """Log the images trained per second by all devices; validation is left out.

    To TensorBoard every `log_every_n_steps` steps, to the other loggers once an epoch: in `metrics.csv` it is the one
    column that differs between repetitions of a run. An epoch that was interrupted counts from where it went on.

    Attributes:
        epoch_rate: Images per second in the epoch; None before its last batch.
    """

    def __init__(self) -> None:
        self.epoch_rate: float | None = None
        self._start_s = self._epoch_s = 0.0
        self._images = self._epoch_images = self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock: an epoch that goes on from its middle has no start of its own."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the counts of images."""
        self.epoch_rate = None
        self._epoch_s, self._epoch_images = 0.0, 0
        self._restart(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock of the epoch."""
        self._note_epoch()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on without the validation."""
        self._restart(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the images of the batch, and log their rate when it is due."""
        self._images += len(batch[0]) * (trainer.world_size // cast(BaseModule, pl_module).sharers)
        step = trainer.global_step - 1
        every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_step - self._first_step >= every_n_steps:
            rate = self._images / (time.monotonic() - self._start_s)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.log_metrics({RATE: rate}, step)
            self._note_epoch()
            self._restart(trainer)
        if trainer.is_last_batch:
            self._note_epoch()
            self._restart(trainer)
            self.epoch_rate = self._epoch_images / self._epoch_s
            for logger in trainer.loggers:
                if not isinstance(logger, TensorBoardLogger):
                    logger.log_metrics({RATE: round(self.epoch_rate, 1)}, step)

    def _note_epoch(self) -> None:
        """Add what has been counted since the last restart to the epoch."""
        self._epoch_s += time.monotonic() - self._start_s
        self._epoch_images += self._images

    def _restart(self, trainer: Trainer) -> None:
        self._start_s, self._images, self._first_step = time.monotonic(), 0, trainer.global_step
