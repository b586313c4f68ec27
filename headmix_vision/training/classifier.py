"""Image classification as a LightningModule around one timm model."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from headmix_vision.data.seeding import derive_seed, seeded
from headmix_vision.training.accuracy import ClassificationMetrics
from headmix_vision.training.checkpoints import DESCRIPTION_KEY, check_description, check_state
from headmix_vision.training.networks import create_network
from headmix_vision.training.options import (
    DEFAULT_LOSS,
    DEFAULT_MIXUP,
    DEFAULT_OPTIMIZER,
    DEFAULT_SCHEDULE,
    LossConfig,
    MixupConfig,
    OptimizerConfig,
    ScheduleConfig,
)

Batch = tuple[Tensor, Tensor]
_STEP, _MIXUP = 0, 1  # streams of random numbers


class ImageClassifier(LightningModule):
    """Train and evaluate one timm model on images with one label each.

    Random numbers of a training batch (dropout, drop path, mixup) follow from the seed, the epoch, the batch index
    and the rank alone, so that an interrupted run continues as if it had not been interrupted.

    Args:
        name: Name of the model in timm, for example `deit_mhla_small`.
        num_classes: Number of classes; the model's default when null.
        img_size: Image size in pixels, one number or [height, width]; the model's default when null.
        model_args: Further arguments of `timm.create_model`, for example `{drop_path_rate: 0.1, cpe: true}`.
        checkpoint: Start weights: an exported `.safetensors`, a `.pth` of timm or a `.ckpt` of this package.
        loss: Training loss.
        mixup: Mixup and CutMix.
        optimizer: Optimizer.
        schedule: Learning rate schedule.
        compile: Compile the network with `torch.compile`.
        seed: Seed of dropout, drop path and mixup; the command line sets it to `seed_everything`.

    Raises:
        ValueError: If the model is unknown, or the start weights do not fit it.
    """

    train_loss: Tensor
    schedule: Scheduler
    _step_loss: Tensor

    def __init__(
        self,
        name: str,
        num_classes: int | None = None,
        img_size: int | list[int] | None = None,
        model_args: dict[str, Any] | None = None,
        checkpoint: str | None = None,
        loss: LossConfig = DEFAULT_LOSS,
        mixup: MixupConfig = DEFAULT_MIXUP,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        schedule: ScheduleConfig = DEFAULT_SCHEDULE,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.net = create_network(name, num_classes, img_size, model_args, checkpoint)
        self.num_classes = int(self.net.num_classes)  # type: ignore[arg-type]
        self.description: dict[str, Any] = {
            "name": name,
            "num_classes": self.num_classes,
            "img_size": img_size,
            "model_args": dict(model_args or {}),
        }
        self.class_names: list[str] | None = None
        self.loss_config, self.mixup_config = loss, mixup
        self.optimizer_config, self.schedule_config = optimizer, schedule
        self.compile_net = compile
        self.seed = seed

        self.criterion = _make_criterion(loss, soft_targets=mixup.enabled)
        self.mix = _make_mixup(mixup, loss, self.num_classes) if mixup.enabled else None
        self.val_metrics, self.test_metrics = (ClassificationMetrics(self.num_classes) for _ in range(2))
        self._param_group_options: list[dict[str, Any]] = []
        self._validated_at = -1

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, C] of images [B, channels, H, W]."""
        return self.net(images)

    def setup(self, stage: str) -> None:
        """Compare the model with the data.

        Raises:
            ValueError: If their numbers of classes differ, or mixup is asked for with an odd batch size.
        """
        datamodule = getattr(self.trainer, "datamodule", None)
        classes = getattr(datamodule, "num_classes", None)
        if classes is not None and classes != self.num_classes:
            raise ValueError(
                f"the model has {self.num_classes} classes, the data {classes}: set model.num_classes={classes}"
            )
        batch_size = getattr(datamodule, "batch_size", None)
        if stage == "fit" and self.mix is not None and batch_size is not None and batch_size % 2:
            raise ValueError(f"mixup pairs images and needs an even data.batch_size, got {batch_size}")
        self.class_names = getattr(datamodule, "class_names", None) or self.class_names
        if self.compile_net:
            self.net.compile()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer; the schedule follows in `on_train_start`."""
        config = self.optimizer_config
        optimizer = create_optimizer_v2(
            self.net,
            opt=config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            layer_decay=config.layer_decay,
            **config.args,
        )
        self._param_group_options = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        return optimizer

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
        total_steps = self.trainer.estimated_stepping_batches
        if not 0 < total_steps < math.inf:
            raise ValueError("the schedule needs the length of the run: set trainer.max_epochs or trainer.max_steps")
        steps_per_epoch = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        if math.isinf(steps_per_epoch) and self.schedule_config.warmup_epochs:
            raise ValueError("the length of an epoch is unknown: set schedule.warmup_epochs=0")
        warmup_steps = round(self.schedule_config.warmup_epochs * steps_per_epoch) if steps_per_epoch < math.inf else 0
        self.schedule, _ = create_scheduler_v2(
            optimizer,
            sched=self.schedule_config.sched,
            num_epochs=int(total_steps),
            warmup_epochs=warmup_steps,
            warmup_lr=self.schedule_config.warmup_lr,
            min_lr=self.schedule_config.min_lr,
            step_on_epochs=False,
            updates_per_epoch=1,
        )
        self.schedule.step_update(max(0, self.trainer.global_step - 1))
        if not hasattr(self, "train_loss"):
            self.train_loss = torch.zeros(2)
        self.train_loss = self.train_loss.to(self.device)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Set the learning rate of this step and the random numbers of this batch."""
        self.schedule.step_update(self.trainer.global_step)
        torch.manual_seed(self._batch_seed(batch_idx, _STEP))

    def _batch_seed(self, batch_idx: int, stream: int) -> int:
        return derive_seed(self.seed, self.current_epoch, batch_idx, self.global_rank, stream)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of images [B, channels, H, W], float32, and targets [B], int64."""
        images, targets = batch
        if self.mix is not None:
            with seeded(self._batch_seed(batch_idx, _MIXUP)):
                images, targets = self.mix(images, targets)
        loss = self.criterion(self.net(images).float(), targets)
        self.train_loss += torch.stack([loss.detach() * len(images), loss.new_tensor(len(images))])
        self.log("loss", loss, prog_bar=True, logger=False)
        self._step_loss = loss.detach()
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the loss of the last batch and the learning rate, every `log_every_n_steps` steps."""
        every_n_steps: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (self.trainer.global_step + 1) % every_n_steps == 0:
            rate = max(group["lr"] for group in optimizer.param_groups)
            self._log_now({"train/loss_step": float(self._step_loss), "lr": rate}, self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the mean loss of a finished epoch, including the part before an interruption."""
        if self.trainer.is_last_batch:
            total, count = self._reduced_train_loss().tolist()
            self._log_now({"train/loss": total / count}, self.trainer.global_step - 1)
            self.train_loss.zero_()

    def _log_now(self, metrics: dict[str, float], step: int) -> None:
        # What self.log collects reaches the loggers after the hooks in which a run may be saved and stopped.
        for logger in self.loggers:
            logger.log_metrics({"epoch": self.current_epoch, **metrics}, step)
            logger.save()

    def _reduced_train_loss(self) -> Tensor:
        return self.trainer.strategy.reduce(self.train_loss.clone(), reduce_op="sum")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Update the validation metrics with images [B, channels, H, W] and targets [B]."""
        self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Update the test metrics with images [B, channels, H, W] and targets [B]."""
        self._evaluate(self.test_metrics, batch)

    def _evaluate(self, metrics: ClassificationMetrics, batch: Batch) -> None:
        images, targets = batch
        if len(images):  # none of the batch may have been readable
            metrics.update(self.net(images).float(), targets)

    def on_validation_epoch_end(self) -> None:
        """Log loss and accuracy of the validation split."""
        self._log_metrics("val", self.val_metrics)
        self._validated_at = -1 if self.trainer.sanity_checking else self.trainer.global_step

    def on_test_epoch_end(self) -> None:
        """Log loss and accuracy of the test split."""
        self._log_metrics("test", self.test_metrics)

    def _log_metrics(self, stage: str, metrics: ClassificationMetrics) -> None:
        for name, value in metrics.compute().items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "top1")

    def predict_step(self, batch: tuple[Tensor, list[str]], batch_idx: int) -> tuple[list[str], Tensor]:
        """Paths and class probabilities [B, C], float32, of images [B, channels, H, W]."""
        images, paths = batch
        logits = self.net(images).float()
        return paths, logits.sigmoid() if self.loss_config.kind == "bce" else logits.softmax(-1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Describe the model, and keep the running mean of the loss."""
        fresh = self._validated_at == self.trainer.global_step
        top1 = float(self.trainer.callback_metrics["val/top1"]) if fresh else None
        checkpoint[DESCRIPTION_KEY] = {**self.description, "class_names": self.class_names, "top1": top1}
        if hasattr(self, "train_loss"):
            checkpoint["train_loss"] = self._reduced_train_loss()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model.

        Raises:
            ValueError: If the name, the number of classes or any weight's name or shape differs.
        """
        check_description(checkpoint, self.description["name"], self.num_classes)
        check_state(checkpoint["state_dict"], self.state_dict())
        self.class_names = checkpoint[DESCRIPTION_KEY]["class_names"]
        if "train_loss" in checkpoint:
            saved = checkpoint["train_loss"]
            self.train_loss = saved.clone() if self.global_rank == 0 else torch.zeros_like(saved)


def _make_criterion(config: LossConfig, *, soft_targets: bool) -> nn.Module:
    if config.kind == "bce":
        return BinaryCrossEntropy(config.smoothing, config.bce_target_threshold)
    if soft_targets:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(config.smoothing) if config.smoothing else nn.CrossEntropyLoss()


def _make_mixup(config: MixupConfig, loss: LossConfig, num_classes: int) -> Mixup:
    return Mixup(
        mixup_alpha=config.mixup_alpha,
        cutmix_alpha=config.cutmix_alpha,
        prob=config.prob,
        switch_prob=config.switch_prob,
        mode=config.mode,
        label_smoothing=loss.smoothing,
        num_classes=num_classes,
    )
