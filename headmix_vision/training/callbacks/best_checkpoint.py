"""Keeps `best.ckpt`, the checkpoint of the best validation."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.fields import check_fields
from headmix_vision.training.options import mode_of


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the best validation, the earliest one if several are equal.

    Args:
        dirpath: Folder of `best.ckpt`.
        monitor: What it is the best of.
    """

    def __init__(self, dirpath: Path, monitor: str) -> None:
        super().__init__(
            dirpath,
            filename="best",
            monitor=monitor,
            mode=mode_of(monitor),
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuses to go on with a run whose best checkpoint is the best of something else, and would be replaced.

        Raises:
            InputError: If it is.
        """
        for name, state in checkpoint["callbacks"].items():
            if name.startswith(type(self).__name__) and state.get("monitor") != self.monitor:
                raise InputError(
                    f"the best checkpoint of this run is that of {state.get('monitor')}, not of {self.monitor}:"
                    f" set best.monitor={state.get('monitor')}"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the best score, also when the run directory has been moved; takes no path from the checkpoint.

        Raises:
            InputError: If there is a best checkpoint without a score.
        """
        score = Tensor if state_dict["best_model_path"] else Tensor | None
        check_fields(f"the state of {type(self).__name__}", state_dict, {"best_model_score": score})
        path = self.format_checkpoint_name({}) if state_dict["best_model_path"] else ""
        moved = {"dirpath": self.dirpath, "best_model_path": path, "kth_best_model_path": path, "last_model_path": ""}
        best = {path: state_dict["best_model_score"]} if path else {}
        super().load_state_dict({**state_dict, **moved, "best_k_models": best})
