"""Show how far training and evaluation are: by a bar on a terminal, elsewhere by plain lines."""

import time
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from headmix_vision.console import Advance, duration, progress
from headmix_vision.training.base_module import BaseModule
from headmix_vision.training.callbacks.non_finite import Latest


class ModelSize(Callback):
    """Print the name of the model and its number of parameters when training starts."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line, on the first process."""
        if trainer.is_global_zero:
            print(model_size(pl_module), flush=True)


def model_size(module: LightningModule) -> str:
    """Print the name of a module's model and its number of parameters."""
    counts = {trained: 0 for trained in (True, False)}
    for parameter in module.net.parameters():  # type: ignore[union-attr]
        counts[parameter.requires_grad] += parameter.numel()
    frozen = f", {counts[False]:,} of them frozen" if counts[False] else ""
    name = module.description["name"]  # type: ignore[index]
    return f"model {name}: {sum(counts.values()):,} parameters{frozen}"


class EpochLines(Callback):
    """Print a line after each epoch: losses, accuracy, images per second and the time left, on the first process."""

    def __init__(self) -> None:
        self._validated = False
        self._start_s = 0.0
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where this start of the run begins."""
        self._start_s, self._first_step, self._validated = time.monotonic(), trainer.global_step, False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the epoch has been validated."""
        self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line."""
        if trainer.is_global_zero:
            print(self._line(trainer, pl_module), flush=True)
        self._validated = False

    def _line(self, trainer: Trainer, module: LightningModule) -> str:
        parts = []
        finished = isinstance(module, BaseModule) and module.epoch_loss is not None
        if finished:
            parts.append(f"loss {module.epoch_loss:.4f}")
        if self._validated:
            metrics = trainer.callback_metrics
            for name in ("val/loss", "val/attention_error", "val/feature_cosine"):
                shown = name.replace("/", " ").replace("_", " ")
                parts += [f"{shown} {float(metrics[name]):.4f}"] if name in metrics else []
            for name, shown in (("val/top1", "val top-1"), ("val/balanced", "val balanced")):
                parts += [f"{shown} {100 * float(metrics[name]):.2f} %"] if name in metrics else []
        if finished:
            parts.append(f"{module.epoch_rate:.0f} images/s")
        done, total = trainer.global_step - self._first_step, trainer.estimated_stepping_batches
        if done and total < float("inf"):
            passed_s, left = time.monotonic() - self._start_s, total - trainer.global_step
            parts.append(f"{duration(passed_s / done * left)} left" if left > 0 else f"took {duration(passed_s)}")
        epochs = trainer.max_epochs
        of = f"/{epochs}" if epochs is not None and epochs > 0 else ""
        return f"epoch {trainer.current_epoch + 1}{of}: {', '.join(parts)}"


class EvaluationLines(Callback):
    """Print plain lines while a long validation, test or prediction runs on its own, on the first process."""

    def __init__(self) -> None:
        self._shown = ExitStack()
        self._advance: Advance = lambda batches: None

    def _start(self, trainer: Trainer, what: str, batches: list[int | float]) -> None:
        shown = progress(what, int(sum(batches)), "batches", enabled=trainer.is_global_zero)
        self._advance = self._shown.enter_context(shown)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the count of batches."""
        self._start(trainer, "validating", trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the count of batches."""
        self._start(trainer, "testing", trainer.num_test_batches)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the count of batches."""
        self._start(trainer, "predicting", trainer.num_predict_batches)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Count the batch."""
        self._advance(1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the last line."""
        self._shown.close()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end


class ImagesPerSecondBar(TQDMProgressBar):
    """Add to Lightning's progress bar the loss, and how many images all devices train per second in this epoch.

    The bar does not wait for the device: the loss of a GPU is that of the time before at which the bar was drawn.
    """

    def __init__(self, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._loss = Latest()

    def on_train_start(self, *args: Any) -> None:
        """Forget the loss of an earlier run."""
        super().on_train_start(*args)
        self._loss = Latest()

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the values behind the bar."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if trainer.training and isinstance(pl_module, BaseModule) and pl_module.step_loss is not None:
            loss = self._loss.read(pl_module.step_loss)
            metrics |= {} if loss is None else {"loss": float(loss)}
            if pl_module.throughput.images:
                metrics["images/s"] = f"{pl_module.throughput.of_epoch():.0f}"
        return metrics
