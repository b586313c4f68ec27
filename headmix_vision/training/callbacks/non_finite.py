"""Stops a run before a non-finite gradient reaches the weights."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer


class NonFiniteError(RuntimeError):
    """A loss or gradient was infinite or not a number."""


class StopOnNonFinite(Callback):
    """Raises `NonFiniteError` on all ranks before the optimizer step if the loss or the gradient norm is not finite.

    The weights and the checkpoints on disk stay those of the last good step. With float16 and a gradient scaler only
    the loss is checked: overflowing gradients are how the scaler finds its scale.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Remembers the loss of each batch that enters the step, without waiting for the device."""
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Checks the losses and the gradient of the step.

        Raises:
            NonFiniteError: Naming epoch, step, batch and the offending values.
        """
        losses, self._losses = torch.stack(self._losses), []
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        checked = losses if trainer.precision == "16-mixed" else torch.cat([losses, norm.reshape(1)])
        finite = bool(torch.isfinite(checked).all())
        if trainer.strategy.reduce_boolean_decision(finite, all=True):
            return
        last = trainer.fit_loop.batch_idx
        bad = [last - len(losses) + 1 + i for i, loss in enumerate(losses.tolist()) if not abs(loss) < float("inf")]
        batches = f"batch {', '.join(map(str, bad))}" if bad else f"batch {last}"
        values = f"loss {losses.sum().item():g}, gradient norm {norm.item():g}"
        raise NonFiniteError(
            f"non-finite numbers in epoch {trainer.current_epoch}, step {trainer.global_step}, {batches}"
            f" (rank {trainer.global_rank}: {values}); stopped before the optimizer step"
        )
