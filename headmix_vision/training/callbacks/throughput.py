"""Logs images per second to TensorBoard."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger


class ImagesPerSecond(Callback):
    """Logs the images trained per second by all devices, every `log_every_n_steps` steps; validation is left out.

    To TensorBoard alone: `metrics.csv` is the same in every repetition of a run.
    """

    def __init__(self) -> None:
        self._start_s = 0.0
        self._images = self._first_step = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the count of images."""
        self._restart(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the count again, without the validation."""
        self._restart(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the images of the batch, and logs their rate when it is due."""
        self._images += len(batch[0]) * trainer.world_size
        every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_step - self._first_step >= every_n_steps:
            rate = self._images / (time.monotonic() - self._start_s)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.log_metrics({"train/images_per_s": rate}, trainer.global_step - 1)
            self._restart(trainer)

    def _restart(self, trainer: Trainer) -> None:
        self._start_s, self._images, self._first_step = time.monotonic(), 0, trainer.global_step
