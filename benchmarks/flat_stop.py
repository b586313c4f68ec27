"""When a training is over: the rule that its validation loss is flat, and a callback of Lightning that follows it."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

SHARE, DROP = 0.25, 0.01


def is_flat(losses: Mapping[int, float]) -> bool:
    """Tell whether the last loss is less than 1 % below that of a quarter of the run before.

    Args:
        losses: Validation losses by their steps; the last one at or before three quarters of the run is compared.
    """
    last = max(losses)
    earlier = [step for step in losses if step <= (1 - SHARE) * last]
    return bool(earlier) and losses[last] > (1 - DROP) * losses[max(earlier)]


class StopWhenFlat(Callback):
    """Ends a training after the validation that finds its loss flat.

    Lightning's `EarlyStopping` waits for a fixed number of validations and compares by an absolute difference; curves
    fall more and more slowly, so here both grow with the run.

    Args:
        min_steps: Optimizer steps before which it never ends.
    """

    def __init__(self, min_steps: int) -> None:
        self.min_steps = min_steps
        self.losses: dict[int, float] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the loss, and ends the training if the rule says so."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self.losses[trainer.global_step] = float(trainer.callback_metrics["val/loss"])
        if trainer.global_step >= self.min_steps and is_flat(self.losses):
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """The losses so far."""
        return {"losses": dict(self.losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the losses over."""
        self.losses = dict(state_dict["losses"])
