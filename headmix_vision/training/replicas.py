"""Train copies of a network whose gradients are summed in the same order in each step (DDP)."""

from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class _OrderedReplica(DistributedDataParallel):
    """Lay gradients out for their sums before the first step, from the last parameter to the first.

    PyTorch lays them out anew after the first step of each start, in the order in which they became ready. The sums of
    more than two processes depend on the layout, so that a run that was interrupted would not go on bit-equal.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reducer._push_all_rebuilt_params()  # the next forward pass lays them out, and none after it

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]


class ReplicatedStrategy(DDPStrategy):
    """Lightning's `ddp`, with which an interrupted run goes on bit-equal on any number of processes."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):  # as Lightning does
            return _OrderedReplica(model, device_ids, **self._ddp_kwargs)


StrategyRegistry.register(
    "ddp", ReplicatedStrategy, description="A copy on each process", override=True, start_method="popen"
)
