"""Shows a progress bar with loss, accuracy and images per second."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from headmix_vision.training.base_module import BaseModule


class ImagesPerSecondBar(TQDMProgressBar):
    """Adds to Lightning's progress bar how many images all devices train per second in this epoch."""

    def __init__(self, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._start_s = 0.0
        self._images = 0

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Starts the count of images."""
        super().on_train_epoch_start(trainer)
        self._start_s, self._images = time.monotonic(), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the images of the batch."""
        self._images += len(batch[0]) * trainer.world_size
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Returns the values behind the bar."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if trainer.training and isinstance(pl_module, BaseModule) and pl_module.step_loss is not None:
            metrics["loss"] = float(pl_module.step_loss)  # only where the bar is drawn: reading waits for the device
        if trainer.training and self._images:
            metrics["images/s"] = f"{self._images / (time.monotonic() - self._start_s):.0f}"
        return metrics
