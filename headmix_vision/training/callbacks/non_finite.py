"""Read the numbers of a step without waiting for the device, and stop a run in which one is not finite."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Later:
    """A copy of a tensor on its way from its device to the host.

    Args:
        tensor: Of any shape.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = tensor.detach().to("cpu", non_blocking=tensor.is_cuda)  # into pinned memory
        if tensor.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether there is nothing to wait for, as on a CPU; equal in all processes, however fast their devices are."""
        return self._event is None

    def get(self) -> Tensor:
        """Return the copy; wait for what was queued before it, not for what was queued since."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


class Latest:
    """Read a tensor that changes from time to time: on a CPU as it is, of a device as it was the time before."""

    def __init__(self) -> None:
        self._sent: Later | None = None

    def read(self, tensor: Tensor) -> Tensor | None:
        """Send for the tensor; return the newest copy that is not waited for, None the first time on a device."""
        earlier, self._sent = self._sent, Later(tensor)
        known = self._sent if self._sent.is_here else earlier
        return None if known is None else known.get()


def sum_of_processes(trainer: Trainer, tensor: Tensor) -> Tensor:
    """Add up a tensor of all processes, in place and in the order of the device's work.

    Lightning's `strategy.reduce` stops at a barrier first, which waits for the device.
    """
    if trainer.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


class NonFiniteError(RuntimeError):
    """A loss, gradient, weight, score or sample was infinite or not a number."""


@dataclass(frozen=True)
class _Check:
    """The numbers of one optimizer step: how many processes have bad ones, gradient norm, loss of each batch."""

    epoch: int
    step: int
    last_batch: int
    rank: int
    numbers: Later

    def raise_if_bad(self) -> None:
        processes, norm, *losses = self.numbers.get().tolist()
        if not processes:
            return
        first = self.last_batch - len(losses) + 1
        bad = [first + i for i, loss in enumerate(losses) if not abs(loss) < float("inf")]
        batches = f"batch {', '.join(map(str, bad))}" if bad else f"batch {self.last_batch}"
        raise NonFiniteError(
            f"non-finite numbers in epoch {self.epoch}, step {self.step}, {batches}"
            f" (rank {self.rank}: loss {sum(losses):g}, gradient norm {norm:g}); no checkpoint holds this step"
        )


class StopOnNonFinite(Callback):
    """Raise `NonFiniteError` on all ranks if the loss or the gradient norm of a step is not finite.

    On a CPU it does so before the optimizer step. A device is not waited for: its numbers are read while it works on
    the next step, before which the run ends. Whatever would keep the weights in between, a checkpoint, a validation or
    the end of the epoch, waits for them, and a checkpoint for the weights themselves: those on disk stay the last good
    ones. So do weights and states in memory of a fused Adam or AdamW, which leaves a bad step out by itself; to undo
    the step of another optimizer would take a copy of them all.

    With float16 and a gradient scaler only the loss is checked: overflowing gradients are how the scaler finds its
    scale.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._check: _Check | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier run."""
        self._losses, self._check = [], None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Remember the loss of each batch that enters the step."""
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Send for the numbers of this step, and check those that are here.

        Raises:
            NonFiniteError: Naming epoch, step, batch and the offending values.
        """
        self._settle()
        losses, self._losses = torch.stack(self._losses).float(), []
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = _total_norm(gradients).float().reshape(1)
        checked = losses if trainer.precision == "16-mixed" else torch.cat([losses, norm])
        bad = sum_of_processes(trainer, (~torch.isfinite(checked).all()).float().reshape(1))
        fused = isinstance(optimizer, torch.optim.Adam) and all(group["fused"] for group in optimizer.param_groups)
        if fused and trainer.precision != "16-mixed":
            optimizer.found_inf = bad.clamp(max=1).squeeze()  # type: ignore[attr-defined]
        self._check = _Check(
            trainer.current_epoch,
            trainer.global_step,
            trainer.fit_loop.batch_idx,
            trainer.global_rank,
            Later(torch.cat([bad, norm, losses])),
        )
        if self._check.numbers.is_here:
            self._settle()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the last step."""
        self._settle()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the last step."""
        self._settle()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check the last step, and the weights that came of it, before a checkpoint is written.

        Raises:
            NonFiniteError: If one of them is not finite.
        """
        self._settle()
        if not _total_norm(list(pl_module.parameters())).isfinite():
            raise NonFiniteError(
                f"weights are not finite after step {trainer.global_step - 1}; no checkpoint holds this step"
            )

    def _settle(self) -> None:
        check, self._check = self._check, None
        if check is not None:
            check.raise_if_bad()


def _total_norm(tensors: list[Tensor]) -> Tensor:
    """Compute the norm of all tensors, of sharded ones over all processes."""
    norm = torch.nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def require_finite(value: Tensor, what: str, trainer: Trainer) -> None:
    """Raise `NonFiniteError`, with epoch and step while training, if numbers to be logged or kept are not finite."""
    if not value.isfinite().all():
        where = f" in epoch {trainer.current_epoch}, step {trainer.global_step}" if trainer.state.fn == "fit" else ""
        raise NonFiniteError(f"{what} is not finite{where}")
