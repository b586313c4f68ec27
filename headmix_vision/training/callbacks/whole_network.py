"""Validates sharded networks whole."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from headmix_vision.training.sharding import whole_network


class ValidateWhole(Callback):
    """Gathers the weights of a sharded network on each device for the time of a validation.

    It comes before the callback that puts averaged weights in their place, which ends after it.
    """

    def __init__(self) -> None:
        self._gathered = ExitStack()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Gathers the weights at the first batch; all processes have one."""
        if not batch_idx:
            self._gathered.enter_context(whole_network(trainer, pl_module))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the sharded network back."""
        self._gathered.close()
