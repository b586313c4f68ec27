"""Log numbers of the attention matrices while a network trains."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from headmix_vision.analysis.profiles import PROFILES, profile_layers
from headmix_vision.errors import InputError
from headmix_vision.training.callbacks.non_finite import require_finite
from headmix_vision.training.options import AnalysisConfig


class AttentionNumbers(Callback):
    """Log rank, stable rank, entropy and distance of each attention layer, in the validation of every few epochs.

    Args:
        config: What to compute, and after how many epochs, which must be given.
    """

    def __init__(self, config: AnalysisConfig) -> None:
        assert config.every_n_epochs is not None
        self.config, self.every_n_epochs = config, config.every_n_epochs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there are validations.

        Raises:
            InputError: If there are none.
        """
        if not sum(trainer.num_val_batches):
            raise InputError("analysis.every_n_epochs needs validation: set data.val_split")

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Compute the numbers of the first images; before the training to try whether it can.

        Raises:
            InputError: If the matrices do not fit into memory.
            NonFiniteError: If a number is not finite.
        """
        config = self.config
        due = trainer.sanity_checking or (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if not due or batch_idx or not len(batch[0]) or not trainer.is_global_zero:
            return
        inputs = pl_module.network_inputs([x[: config.images] for x in batch])  # type: ignore[operator]
        rows = profile_layers(pl_module.net, inputs, [*PROFILES], config.queries)  # type: ignore[arg-type]
        if trainer.sanity_checking:
            return
        metrics = {}
        for name in (name for profile in PROFILES.values() for name in profile.labels):
            for layer in dict.fromkeys(row["layer"] for row in rows):
                heads = torch.tensor([row[name] for row in rows if row["layer"] == layer])
                require_finite(heads, f"the {name} of layer {layer}", trainer)
                metrics[f"analysis/{name}/layer{layer}"] = float(heads.mean())
        pl_module.log_now(metrics, trainer.global_step - 1)  # type: ignore[operator]
