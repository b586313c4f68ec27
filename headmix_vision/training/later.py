"""Reading numbers from the device, and agreeing with other processes, without waiting for the work queued there."""

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor


class Later:
    """A copy of a tensor on its way from its device to the host.

    Args:
        tensor: Of any shape.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = tensor.detach().to("cpu", non_blocking=True)  # into pinned memory
        if tensor.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether there is nothing to wait for, as on a CPU; equal in all processes, however fast their devices are."""
        return self._event is None

    def get(self) -> Tensor:
        """Returns the copy; waits for what was queued before it, not for what was queued since."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def sum_of_processes(trainer: Trainer, tensor: Tensor) -> Tensor:
    """Adds up a tensor of all processes, in place and in the order of the device's work.

    Lightning's `strategy.reduce` stops at a barrier first, which waits for the device.
    """
    if trainer.world_size > 1:
        dist.all_reduce(tensor)
    return tensor
