"""Keeps `best.ckpt`, the checkpoint with the highest validation accuracy."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the best `val/top1`, the earliest one if several are equal.

    Args:
        dirpath: Folder of `best.ckpt`.
    """

    def __init__(self, dirpath: Path) -> None:
        super().__init__(
            dirpath,
            filename="best",
            monitor="val/top1",
            mode="max",
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the best score, also when the run directory has been moved."""
        moved = dict(state_dict)
        if state_dict["best_model_path"]:
            path = self.format_checkpoint_name({})
            moved |= {"dirpath": self.dirpath, "best_model_path": path, "kth_best_model_path": path}
            moved["best_k_models"] = {path: state_dict["best_model_score"]}
        super().load_state_dict(moved)
