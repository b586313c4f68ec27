"""End a run when validation does not improve any more."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from headmix_vision.errors import InputError
from headmix_vision.training.options import EarlyStoppingConfig, mode_of


class EarlyStop(EarlyStopping):
    """End a run after so many validations without a better one, also a run that is resumed after that.

    Args:
        config: The rule; its patience must be given.
        monitor: What is monitored where the rule does not say it.
    """

    def __init__(self, config: EarlyStoppingConfig, monitor: str) -> None:
        assert config.patience is not None
        monitor = config.monitor or monitor
        super().__init__(
            monitor,
            config.min_delta,
            config.patience,
            mode=mode_of(monitor),
            check_on_train_epoch_end=False,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value and the count; the patience is that of the command line."""
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a run at once that had been stopped: Lightning would train until the next validation.

        Raises:
            InputError: If there are no validations.
        """
        if not sum(trainer.num_val_batches):
            raise InputError("early_stopping.patience needs validation: set data.val_split")
        trainer.should_stop = self.wait_count >= self.patience

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the validation with the best one.

        Raises:
            InputError: If it does not log what is monitored; before the training already.
        """
        if self.monitor not in trainer.callback_metrics:
            known = ", ".join(name for name in trainer.callback_metrics if name.startswith("val/"))
            raise InputError(f"early_stopping.monitor must be one of {known}, got {self.monitor}")
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print why the run has ended."""
        if self.wait_count >= self.patience and trainer.is_global_zero:
            best = float(self.best_score)
            print(f"stopped: no better {self.monitor} than {best:.4f} in {self.wait_count} validations", flush=True)
