"""Keeps `best.ckpt`, the checkpoint of the best validation."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the best validation, the earliest one if several are equal.

    Args:
        dirpath: Folder of `best.ckpt`.
        monitor: What it is the best of: the lowest loss, or the highest of anything else.
    """

    def __init__(self, dirpath: Path, monitor: str) -> None:
        super().__init__(
            dirpath,
            filename="best",
            monitor=monitor,
            mode="min" if monitor.endswith("loss") else "max",
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
