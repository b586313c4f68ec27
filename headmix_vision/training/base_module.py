"""Define the LightningModule under classifier and generator: optimizer, schedule, random numbers, logged loss."""

import atexit
import gc
import math
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from timm.optim import Muon, create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from headmix_vision.console import say_once
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_fields
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY, check_description, check_finite, check_state
from headmix_vision.training.grouped_muon import GroupedMuon
from headmix_vision.training.options import OptimizerConfig, ScheduleConfig
from headmix_vision.training.resuming import check_optimizers, check_progress, check_sums
from headmix_vision.training.sharding import ShardedStrategy

RATE = "train/images_per_s"
_STEP = 0  # stream of random numbers
_FUSED = (torch.optim.Adam, torch.optim.AdamW)  # fused on GPUs; fused SGD fails on parameters without a first gradient

Compile = bool | Literal["blocks", "graphs"]


class Schedule(Protocol):
    """Learning rates as a function of the optimizer step."""

    def step_update(self, num_updates: int) -> None:
        """Set the rates of a step."""


def count_epoch_steps(trainer: Trainer) -> float:
    """Count the optimizer steps of an epoch; infinite where the number of batches is unknown.

    Lightning also steps at the end of an epoch, with as many gradients as have been accumulated by then.
    """
    batches = trainer.num_training_batches
    return batches if batches == math.inf else math.ceil(batches / trainer.accumulate_grad_batches)


def make_schedule(optimizer: Optimizer, config: ScheduleConfig, total_steps: int, epoch_steps: float) -> Scheduler:
    """Make the schedule of a run of so many optimizer steps; `epoch_steps` is infinite where it is unknown."""
    warmup_steps = round(config.warmup_epochs * epoch_steps) if epoch_steps < math.inf else 0
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=config.sched,
        num_epochs=total_steps,
        warmup_epochs=warmup_steps,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return schedule


def release_graphs() -> None:
    """Release all CUDA graphs of compiled networks.

    NCCL destroys a process group only after the graphs that hold its collectives. Training with graphs on several
    processes releases them when the process ends. Call this first if you destroy the group before.
    """
    torch.compiler.reset()
    gc.collect()


def compile_blocks(network: nn.Module, mode: str | None = None) -> None:
    """Compile each block of a network by itself: those that are alike share one program, which is made once.

    Args:
        network: Network whose transformer blocks are its `blocks`.
        mode: Mode of `torch.compile`; with `reduce-overhead` each block becomes CUDA graphs. If they hold collectives,
            call :func:`release_graphs` before the process group is destroyed.

    Raises:
        InputError: If the network has no `blocks`.
    """
    blocks = getattr(network, "blocks", None)
    if not blocks:
        raise InputError("model.compile: this model has no blocks; set it to true, or to false where it is sharded")
    # Each rate of stochastic depth makes a program of its own, in training and without one more.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks))
    torch._dynamo.config.optimize_ddp = False  # gradients are sent between blocks: no need to cut these up for it
    for block in blocks:
        block.compile(mode=mode)
    if mode == "reduce-overhead":
        blocks[0]._compiled_call_impl = _beginning_a_step(blocks[0]._compiled_call_impl)


def _beginning_a_step(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of the first block, which starts a new step of CUDA graphs each time.

    Without the mark each block starts one where no backward pass is pending, and in validation it overwrites its input.
    With it the blocks must not run again between a forward pass and its backward pass.
    """

    def begin(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return run(*args, **kwargs)

    return begin


def place_steps(optimizer: Optimizer) -> None:
    """Put the counts of steps of a checkpoint where the optimizer reads them: it may have been fused there or not."""
    for group in optimizer.param_groups:
        on_device = group["fused"] or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] = state["step"].to(parameter.device if on_device else "cpu")


class Throughput:
    """Images trained by all devices in an epoch, and the time that they took; validation is left out."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin an epoch, or go on in its middle."""
        self.images, self._passed_s, self._noted = 0, 0.0, (0, 0.0)
        self.resume()

    def resume(self) -> None:
        """Let the clock run again."""
        self._since_s = time.monotonic()

    def pause(self) -> None:
        """Add the time that has passed."""
        now_s = time.monotonic()
        self._passed_s, self._since_s = self._passed_s + now_s - self._since_s, now_s

    def of_epoch(self) -> float:
        """Return the images per second of the epoch."""
        self.pause()
        return self.images / self._passed_s

    def lately(self) -> float:
        """Return the images per second since the last call in this epoch."""
        self.pause()
        (images, passed_s), self._noted = self._noted, (self.images, self._passed_s)
        return (self.images - images) / (self._passed_s - passed_s)


class BaseModule(LightningModule):
    """Train the network `net` with an optimizer and a schedule of timm, in steps that are functions of their index.

    Random numbers of a training batch follow from the seed, the epoch, the batch index and the rank alone, so that an
    interrupted run continues as if it had not been interrupted.

    Args:
        optimizer: Optimizer.
        schedule: Learning rate schedule.
        seed: Seed of whatever is random in a step; the command line sets it to `seed_everything`.
        compile: Compile the network with `torch.compile`; with `blocks`, and where it is sharded, each block by itself,
            which takes less time; with `graphs` into CUDA graphs, against launch overhead: the whole network in one
            process, each block in several, but not shards.
        grad_checkpointing: Compute the blocks a second time in the backward pass, which saves memory.

    Attributes:
        sharers: Processes that have the same training batches, and compute parts of them.
        step_loss: Mean loss of the last training batch, on the device.
        epoch_loss: Mean loss of the epoch; None before its last batch.
        epoch_rate: Images per second of the epoch, after its last batch.
        num_classes: Number of classes.
        class_names: Names of the classes, once they are known.
        description: Entry of checkpoints on the model: its `name`, and how it was made.
        throughput: Counts the images. An epoch that was interrupted counts from where it went on.
        may_end_in_warmup: Whether the run may be shorter than the warm-up of its learning rate.
    """

    net: nn.Module
    num_classes: int
    description: dict[str, Any]
    class_names: list[str] | None = None
    train_loss: Tensor
    schedule: Schedule
    sharers: int = 1
    step_loss: Tensor | None = None
    epoch_loss: float | None = None
    epoch_rate: float = math.nan
    _optimizer_states: list[Any] | None = None
    may_end_in_warmup: bool = False

    def __init__(
        self,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        seed: int = 0,
        *,
        compile: Compile = False,
        grad_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.compile_net, self.grad_checkpointing = compile, grad_checkpointing
        self.optimizer_config, self.schedule_config = optimizer, schedule
        self.seed = seed
        self.throughput = Throughput()
        self._copied_gradients: dict[nn.Parameter, Tensor] = {}
        self._param_group_options: list[dict[str, Any]] = []

    def configure_model(self) -> None:
        """Compile the network, and shard it for training, if asked to.

        Raises:
            InputError: If gradient checkpointing is asked of a network that has none, blocks of one without them, or
                CUDA graphs of shards, or on several processes with gradient checkpointing.
        """
        if isinstance(self.net, FSDPModule):
            return
        if self.grad_checkpointing:
            set_checkpointing: Any = getattr(self.net, "set_grad_checkpointing", None)
            if set_checkpointing is None:
                raise InputError("model.grad_checkpointing: this model cannot checkpoint gradients; set it to false")
            set_checkpointing()
        strategy, by_blocks = self.trainer.strategy, self.compile_net == "blocks"
        mode = "reduce-overhead" if self.compile_net == "graphs" else None
        if mode and isinstance(strategy, ShardedStrategy):
            raise InputError("model.compile=graphs is not for shards; set it to true or to blocks")
        if isinstance(strategy, ShardedStrategy) and self.trainer.state.fn == "fit":
            strategy.shard(self.net)
            by_blocks = True  # between them weights are gathered
        if mode and self.trainer.world_size > 1:
            by_blocks = True  # between them gradients are sent
            atexit.register(release_graphs)  # runs before Lightning's handler, which destroys the process group
            if self.grad_checkpointing and self.trainer.state.fn == "fit":  # pytorch#154306
                raise InputError(
                    "model.compile=graphs cannot recompute blocks on several processes; set it to blocks, or"
                    " model.grad_checkpointing to false"
                )
        if self.compile_net and by_blocks:
            compile_blocks(self.net, mode)
        elif self.compile_net:
            self.net.compile(mode=mode)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer; the schedule follows in `on_train_start`.

        Raises:
            InputError: If the optimizer does not take its options.
        """
        config = self.optimizer_config
        try:
            optimizer = create_optimizer_v2(
                self.net,
                opt=config.opt,
                lr=config.lr,
                weight_decay=config.weight_decay,
                layer_decay=config.layer_decay,
                **config.args,
            )
        except (TypeError, ValueError, LookupError, AssertionError, ImportError) as error:  # as optimizers refuse
            raise InputError(
                f"optimizer {config.opt} cannot be made with optimizer.args={config.args}: {error}"
            ) from error
        if type(optimizer) is Muon:
            optimizer = GroupedMuon(optimizer.param_groups, **optimizer.defaults)
        if type(optimizer) in _FUSED:
            # Lightning does not clip for optimizers that could undo a gradient scaler themselves; let it do both
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
            for group in optimizer.param_groups if self.device.type == "cuda" else ():
                if group["fused"] is group["foreach"] is None and not group["differentiable"]:
                    group["fused"] = True
        self._param_group_options = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        return optimizer

    def on_fit_start(self) -> None:
        """Check the states of the optimizers in a checkpoint, which Lightning restores next."""
        states, self._optimizer_states = self._optimizer_states, None
        if states is not None:
            check_optimizers(self.trainer.optimizers, states)

    def on_train_start(self) -> None:
        """Make the schedule, a pure function of the optimizer step.

        Not a Lightning scheduler: its length needs the training data, which must not be asked for before Lightning has
        restored the progress within the epoch. And it has no state: on resuming, the command line holds, not the
        options stored with the optimizer.
        """
        optimizer = self.trainer.optimizers[0]
        for group, options in zip(optimizer.param_groups, self._param_group_options, strict=True):
            group.pop("initial_lr", None)
            group.update(options)
        if type(optimizer) in _FUSED:
            place_steps(optimizer)
        total_steps = self.trainer.estimated_stepping_batches
        if not 0 < total_steps < math.inf:
            raise InputError("the schedule needs the length of the run: set trainer.max_epochs or trainer.max_steps")
        if self.trainer.max_steps > total_steps:
            say_once(
                f"note: trainer.max_epochs={self.trainer.max_epochs} ends the run after {total_steps:g} steps, before"
                f" trainer.max_steps={self.trainer.max_steps}. For all steps set trainer.max_epochs to -1"
            )
        epoch_steps = count_epoch_steps(self.trainer)
        if math.isinf(epoch_steps) and self.schedule_config.warmup_epochs:
            raise InputError("the length of an epoch is unknown: set schedule.warmup_epochs=0")
        self._check_warmup(total_steps, epoch_steps)
        self.schedule = self.make_schedule(optimizer, int(total_steps), epoch_steps)
        self.schedule.step_update(max(0, self.trainer.global_step - 1))
        if not hasattr(self, "train_loss"):
            self.train_loss = torch.zeros(2)
        self.train_loss = self.train_loss.to(self.device)
        self.throughput.start()  # an epoch that goes on from its middle has no start of its own

    def make_schedule(self, optimizer: Optimizer, total_steps: int, epoch_steps: float) -> Schedule:
        """Make the schedule of the run; see the function of this name."""
        return make_schedule(optimizer, self.schedule_config, total_steps, epoch_steps)

    def _check_warmup(self, total_steps: float, epoch_steps: float) -> None:
        """Refuse a warm-up that the run does not finish; the default one, and that of a shortened recipe, are noted."""
        warmup = self.schedule_config.warmup_epochs
        if math.isinf(epoch_steps) or warmup * epoch_steps <= total_steps or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        message = (
            f"model.schedule.warmup_epochs={warmup:g} is longer than the run of {total_steps / epoch_steps:g} epochs:"
            " the learning rate does not reach model.optimizer.lr"
        )
        if warmup != ScheduleConfig.warmup_epochs and not self.may_end_in_warmup:
            raise InputError(f"{message}; train longer, or set a shorter warm-up")
        say_once(f"note: {message}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the learning rate of this step and the random numbers of this batch."""
        self.schedule.step_update(self.trainer.global_step)
        seed = self.batch_seed(batch_idx, _STEP)
        if self.device.type not in ("cpu", "cuda"):
            torch.manual_seed(seed)
            return
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every kind of device, also absent ones
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def batch_seed(self, batch_idx: int, stream: int) -> int:
        """Return the seed of one stream of random numbers in a training batch of this process."""
        return derive_seed(self.seed, self.current_epoch, batch_idx, self.global_rank // self.sharers, stream)

    def track_loss(self, loss: Tensor, count: int) -> None:
        """Add the mean loss of `count` samples of a training batch to what is logged, and the samples to the rate."""
        self.throughput.images += count * (self.trainer.world_size // self.sharers)
        self.step_loss = loss.detach()
        self.train_loss[0] += self.step_loss * count
        self.train_loss[1] += count

    def on_after_backward(self) -> None:
        """Copy accumulated gradients out of the memory of CUDA graphs, which the next replay overwrites."""
        if self.compile_net != "graphs":
            return
        if not self.trainer.fit_loop._should_accumulate():
            self._copied_gradients.clear()
            return
        for parameter in self.net.parameters():
            grad = parameter.grad
            if grad is not None and grad is not self._copied_gradients.get(parameter):  # later batches add to the copy
                parameter.grad = self._copied_gradients[parameter] = grad.clone()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the loss of the last batch and the learning rate, every `log_every_n_steps` steps.

        TensorBoard also gets the images per second; of other loggers only those of an epoch, as in `metrics.csv` they
        are the one column that differs between repetitions of a run.
        """
        every_n_steps: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (self.trainer.global_step + 1) % every_n_steps == 0:
            rate = max(group["lr"] for group in optimizer.param_groups)
            assert self.step_loss is not None
            self.log_now({"train/loss_step": float(self.step_loss), "lr": rate}, self.trainer.global_step)
            lately = self.throughput.lately()
            for logger in self.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.log_metrics({RATE: lately}, self.trainer.global_step)

    def on_train_epoch_start(self) -> None:
        """Forget the loss of the epoch before, and count its images from here on."""
        self.epoch_loss = None
        self.throughput.start()

    def on_validation_model_eval(self) -> None:
        """Stop the clock before anything of a validation."""
        super().on_validation_model_eval()
        self.throughput.pause()

    def on_validation_end(self) -> None:
        """Go on without the validation."""
        self.throughput.resume()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the mean loss of a finished epoch, including the part before an interruption, and its rate."""
        if self.trainer.is_last_batch:
            self.epoch_rate = self.throughput.of_epoch()
            for logger in self.loggers:
                if not isinstance(logger, TensorBoardLogger):
                    logger.log_metrics({RATE: round(self.epoch_rate, 1)}, self.trainer.global_step - 1)
            total, count = self.sums_of_processes(self.train_loss).sum(0).tolist()
            self.epoch_loss = total / count
            self.log_now({"train/loss": self.epoch_loss}, self.trainer.global_step - 1)
            self.train_loss.zero_()

    def network_inputs(self, batch: Any) -> tuple[Any, ...]:
        """Return the arguments with which validation calls the network on a batch."""
        raise NotImplementedError

    def log_now(self, metrics: dict[str, float], step: int) -> None:
        """Pass metrics of a step to the loggers at once."""
        # What self.log collects reaches the loggers after the hooks in which a run may be saved and stopped.
        for logger in self.loggers:
            logger.log_metrics({"epoch": self.current_epoch, **metrics}, step)
            logger.save()

    def sums_of_processes(self, sums: Tensor) -> Tensor:
        """Return the sums that each process has added up, of sharers the first: [processes, *shape of sums]."""
        return self.trainer.strategy.all_gather(sums.clone()).view(-1, *sums.shape)[:: self.sharers]

    def own_sums(self, saved: Tensor) -> Tensor:
        """Return what this process goes on adding to, of the saved sums of all, [processes, *shape of sums].

        Those it had, so that they are rounded as without the interruption. With another number of processes than
        before the first one takes over all of them.
        """
        rank = self.global_rank // self.sharers
        if len(saved) == self.trainer.world_size // self.sharers:
            return saved[rank].clone()
        return saved.sum(0) if rank == 0 else torch.zeros_like(saved[0])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the running mean of the loss, what a batch is of, and the name of the optimizer."""
        checkpoint["batch"] = self._batch()
        checkpoint["opt"] = self.optimizer_config.opt
        if hasattr(self, "train_loss"):
            checkpoint["train_loss"] = self.sums_of_processes(self.train_loss)

    def _batch(self) -> dict[str, int]:
        return {
            "processes": self.trainer.world_size // self.sharers,
            "size": getattr(getattr(self.trainer, "datamodule", None), "batch_size", 0),
        }

    def check_settings(self, stored: dict[str, Any]) -> None:
        """Raise InputError if the description in a checkpoint is of a model that learns something else."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the running mean of the loss, and refuse a checkpoint of another model.

        Raises:
            InputError: If the name, the number of classes or any weight's name or shape differs, or a weight is not
                finite, see also `check_settings`; if training goes on with another optimizer, or with batches of
                another size, all processes together, within an epoch or with another number of processes; if the
                checkpoint has another form than this run writes.
        """
        check_description(checkpoint, self.description["name"], self.num_classes)
        self.check_settings(checkpoint[DESCRIPTION_KEY])
        check_state(checkpoint["state_dict"], self.state_dict())
        for state in ("state_dict", "current_model_state"):
            check_finite(checkpoint.get(state, {}), "the checkpoint")
        self.class_names = checkpoint[DESCRIPTION_KEY]["class_names"]
        check_progress(self.trainer, self, checkpoint)
        if self.trainer.state.fn == "fit":
            self._optimizer_states = checkpoint["optimizer_states"]
            if not any(isinstance(callback, WeightAveraging) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
                # a run without average goes on from the weights that were trained, to which the optimizer belongs
                checkpoint["state_dict"] = checkpoint.get("current_model_state", checkpoint["state_dict"])
        if self.trainer.state.fn == "fit" and "batch" in checkpoint:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            within_epoch = progress["current"]["processed"] > 0 and not progress["is_last_batch"]
            _check_batch(checkpoint["batch"], self._batch(), within_epoch)
            before, now = checkpoint.get("opt", self.optimizer_config.opt), self.optimizer_config.opt
            if before != now:
                raise InputError(f"model.optimizer.opt={now} cannot go on with the state of {before}")
        if "train_loss" in checkpoint:
            check_sums("train_loss", checkpoint["train_loss"], 2)
            self.train_loss = self.own_sums(checkpoint["train_loss"].view(-1, 2))


def _check_batch(saved: Any, now: dict[str, int], within_epoch: bool) -> None:
    before = check_fields("the entry 'batch' of the checkpoint", saved, dict.fromkeys(now, int))
    samples, processes = before["processes"] * before["size"], now["processes"]
    if samples == processes * now["size"] or (processes == before["processes"] and not within_epoch):
        return
    fitting = "" if samples % processes else f"; set data.batch_size={samples // processes}"
    raise InputError(
        f"the run had batches of {before['processes']} x {before['size']} samples (processes x data.batch_size), not"
        f" {processes} x {now['size']}: it would lose its place in the data{fitting}"
    )
