"""Moving average of the weights with a warm-up of its decay."""

from typing import cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor


def ema_decay(num_updates: int, decay: float) -> float:
    """Decay of the update after `num_updates` earlier ones: min(decay, (1 + n) / (10 + n))."""
    return min(decay, (1 + num_updates) / (10 + num_updates))


class EmaWithWarmup(WeightAveraging):
    """Exponential moving average in float32, which is validated, and stored as `state_dict` in checkpoints.

    The weights being trained are `current_model_state` of a checkpoint. Values that are equal in model and average
    stay equal bit for bit, and integer buffers (index tables) are copied.

    Args:
        decay: Decay per optimizer step, once the warm-up of `ema_decay` has reached it.
    """

    def __init__(self, decay: float) -> None:
        @torch.no_grad()
        def average(averages: list[Tensor], currents: list[Tensor], _: Tensor) -> None:
            assert self._average_model is not None
            # The counter itself, which stays on the CPU: reading its copy on a GPU would wait for all queued work.
            weight = 1 - ema_decay(int(self._average_model.n_averaged), decay)
            if averages[0].is_floating_point():
                torch._foreach_lerp_(averages, currents, weight)
            else:
                torch._foreach_copy_(averages, currents)

        super().__init__(multi_avg_fn=average)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Copy the model.

        Raises:
            ValueError: If the trainer keeps the weights themselves in 16 bits, where an average loses its small steps.
        """
        if trainer.precision in ("bf16-true", "16-true"):
            raise ValueError(f"the moving average needs float32 weights, got trainer.precision={trainer.precision}")
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the average to the device of the model, which `setup` copies before the strategy has moved it there."""
        assert self._average_model is not None
        self._average_model.module.to(pl_module.device)

    @property
    def average(self) -> LightningModule | None:
        """The module with averaged weights; None before `fit` has started."""
        return None if self._average_model is None else cast(LightningModule, self._average_model.module)
