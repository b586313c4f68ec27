"""Try a command without writing anything."""

from collections.abc import Sized
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from headmix_vision.runs.directory import has_results
from headmix_vision.training.base_module import BaseModule
from headmix_vision.training.callbacks.progress_display import model_size


class DryRun(Callback):
    """End the process after the first batch, and print what the command would have done.

    It has to be the first callback, so that the others, which may write something, never see the end of a batch.

    Args:
        run_dir: The run directory.
        checkpoint: Checkpoint from which training would go on, or which would be evaluated.
    """

    def __init__(self, run_dir: Path, checkpoint: str | None) -> None:
        self.run_dir = run_dir
        self.checkpoint = checkpoint
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where training begins."""
        self._first_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print the plan of training, and end."""
        self._end(trainer, pl_module, batch)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the plan where no batch is left to train, and end."""
        self._first_step = trainer.global_step
        self._end(trainer, pl_module, None)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Print the plan of the evaluation, and end, unless it is the validation before training."""
        if not trainer.sanity_checking:
            self._end(trainer, pl_module, batch)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _end(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        if trainer.is_global_zero:
            lines = [model_size(module), *_data(trainer), *self._plan(trainer, module)]
            if batch is not None:
                loss = module.step_loss if isinstance(module, BaseModule) else None
                value = "" if loss is None else f", loss {float(loss):.4f}"
                lines.append(f"first batch: {_shape(batch)}{value}")
            print("\n".join(["dry run, nothing was written", *(f"  {line}" for line in lines)]), flush=True)
        raise SystemExit(0)

    def _plan(self, trainer: Trainer, module: LightningModule) -> list[str]:
        if trainer.state.fn != "fit":
            return [f"checkpoint {self.checkpoint}", f"run directory {self.run_dir}"]
        total, done = trainer.estimated_stepping_batches, self._first_step
        epochs = f"{trainer.max_epochs} epochs, " if trainer.max_epochs and trainer.max_epochs > 0 else ""
        if self.checkpoint is not None:
            directory = f"run directory {self.run_dir}, continued from {self.checkpoint} at step {done}"
        elif has_results(self.run_dir):
            directory = f"run directory {self.run_dir}, whose run would be replaced"
        else:
            directory = f"run directory {self.run_dir}, new"
        return [f"training: {epochs}{total} steps, {max(0, int(total) - done)} to do", directory]


def _data(trainer: Trainer) -> list[str]:
    if trainer.state.fn == "fit":
        loaders = {"training": trainer.train_dataloader, "validation": trainer.val_dataloaders}
        batches: dict[str, Any] = {"training": trainer.num_training_batches, "validation": trainer.num_val_batches}
    else:
        name = str(trainer.state.fn.value)  # type: ignore[union-attr]
        loaders = {name: getattr(trainer, f"{'val' if name == 'validate' else name}_dataloaders")}
        batches = {name: getattr(trainer, f"num_{'val' if name == 'validate' else name}_batches")}
    lines = []
    for name, loader in loaders.items():
        samples = getattr(loader, "dataset", None)
        count = f"{len(samples)} samples, " if isinstance(samples, Sized) else ""
        number = batches[name] if isinstance(batches[name], int | float) else sum(batches[name])
        if loader:
            shares = f" in each of {trainer.world_size} processes" if trainer.world_size > 1 else ""
            lines.append(f"data, {name}: {count}{number} batch{'es' if number != 1 else ''}{shares}")
    return lines


def _shape(batch: Any) -> str:
    return " and ".join(str(list(x.shape)) if isinstance(x, Tensor) else f"{len(x)} names" for x in batch)
