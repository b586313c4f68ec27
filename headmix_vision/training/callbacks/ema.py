"""Weights that are validated: an average of those being trained, and the whole of sharded ones."""

from contextlib import ExitStack
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from headmix_vision.errors import InputError
from headmix_vision.training.sharding import ShardedStrategy, whole_network

_Tensors = tuple[list[Tensor], list[Tensor]]


def ema_decay(num_updates: int, decay: float) -> float:
    """Return the decay of the update after `num_updates` earlier ones: min(decay, (1 + n) / (10 + n))."""
    return min(decay, (1 + num_updates) / (10 + num_updates))


class WarmedUpAverage(AveragedModel):
    """Copy a module, and let parameters and buffers of the copy follow it.

    The first update copies. The counter stays on the CPU and is read there: torch's own update sends it to the device
    at every step, and so waits for all work queued on it.

    Args:
        module: What is averaged.
        decay: Decay per update, once the warm-up of `ema_decay` has reached it.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        super().__init__(module, use_buffers=True)
        self.decay = decay
        self._pairs: tuple[_Tensors, _Tensors] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pairs": None}  # a copy finds its own

    def forget_tensors(self) -> None:
        """Find the tensors again at the next update: they may have been replaced."""
        self._pairs = None

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Bring the average closer to the model, the same one until `forget_tensors`, and copy integer buffers."""
        if self._pairs is None:  # finding tensors in their modules takes the host longer than all the rest
            self._pairs = _tensors(self.module, model), _tensors(model, self.module)
        (averages, integers), (currents, current_integers) = self._pairs
        count = int(self.n_averaged)
        if count:
            torch._foreach_lerp_(averages, currents, 1 - ema_decay(count, self.decay))
        else:
            torch._foreach_copy_(averages, currents)
        if integers:
            torch._foreach_copy_(integers, current_integers)
        self.n_averaged += 1


def _tensors(module: nn.Module, other: nn.Module) -> _Tensors:
    """Return parameters and buffers, of sharded ones this process's part: floating point ones, and others.

    Tensors that both modules share, such as frozen weights, are left out.
    """
    own, others = ([*one.parameters(), *one.buffers()] for one in (module, other))
    different = [x for x, y in zip(own, others, strict=True) if x is not y]
    tensors = [x.to_local() if isinstance(x, DTensor) else x for x in different]
    return [x for x in tensors if x.is_floating_point()], [x for x in tensors if not x.is_floating_point()]


class ValidateWhole(Callback):
    """Gather the weights of a sharded network on each device for the time of a validation."""

    def __init__(self) -> None:
        super().__init__()
        self._gathered = ExitStack()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Gather the weights at the first batch; all processes have one."""
        if not batch_idx:
            self._gathered.enter_context(whole_network(trainer, pl_module))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the sharded network back, before an average makes way for the trained weights."""
        self._gathered.close()
        super().on_validation_epoch_end(trainer, pl_module)


class EmaWithWarmup(ValidateWhole, WeightAveraging):
    """Keep an exponential moving average in float32, which is validated, and stored as `state_dict` in checkpoints.

    The weights being trained are `current_model_state` of a checkpoint. Values that are equal in model and average
    stay equal bit for bit, and integer buffers (index tables) are copied.

    Args:
        decay: Decay per optimizer step, once the warm-up of `ema_decay` has reached it.
    """

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Copy the model.

        Raises:
            InputError: If the trainer keeps the weights themselves in 16 bits, where an average loses its small steps.
        """
        if trainer.precision in ("bf16-true", "16-true"):
            raise InputError(f"the EMA needs float32 weights, got trainer.precision={trainer.precision}")
        if stage == "fit":
            self._average_model = WarmedUpAverage(pl_module, self.decay)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move, convert or shard the average as the model, which `setup` copies before the strategy has done it."""
        assert self.average is not None
        if isinstance(trainer.strategy, ShardedStrategy):
            trainer.strategy.shard(self.average.net)  # type: ignore[arg-type]
        self.average.to(pl_module.device, pl_module.dtype)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the average look for the model's tensors again, some of which may have been replaced."""
        assert isinstance(self._average_model, WarmedUpAverage)
        self._average_model.forget_tensors()

    @property
    def average(self) -> LightningModule | None:
        """The module with averaged weights; None before `fit` has started."""
        return None if self._average_model is None else cast(LightningModule, self._average_model.module)
