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
