"""Compute loss and accuracy of a classifier over one evaluation."""

import math

from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy


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
